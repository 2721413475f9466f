"Batches of any lengths over any number of ranks, and the tokens that they are made of"
import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from cpkv.split import SPLITS, Extend

splits = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5)
ranks = st.integers(1, 8)
GOLD = json.loads((Path(__file__).parent / "data/upstream_golden.json").read_text())["zigzag"]
golden = pytest.mark.parametrize("case", GOLD, ids=lambda c: f"cp{c['cp']}-r{c['rank']}-{c['extend_lens']}")


def extends_of(pairs):
    "Extends of (history, new tokens) pairs, request ids unlike places"
    return tuple(Extend(request=100 + i, start=h, stop=h + n) for i, (h, n) in enumerate(pairs))

def positions(segment): return range(segment.start, segment.stop, segment.step)

def new_tokens(extends):
    return [(i, p) for i, e in enumerate(extends) for p in range(e.start, e.stop)]

def pairs_of(case):
    "History and new tokens of each request of another engine's case"
    return [(s - n, n) for s, n in zip(case["seq_lens"], case["extend_lens"])]
