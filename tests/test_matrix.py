"""Split x placement x reader x format x path x ranks: all that is allowed says what one rank alone says, bit for bit

Pairwise cover on threads in every run, a sample on processes, the full product under `--slow`; what the
design forbids is refused before anything is made.
"""
import itertools
from functools import cache

import numpy as np
import pytest
import torch

from cpkv.compute_owner import PLACEMENTS, SPLITTERS
from cpkv.demo import run_demo
from cpkv.engine import Engine, generate
from cpkv.launch import run_ranks
from cpkv.laws import ConfigError
from cpkv.layer_split import READERS
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.pool import FORMATS
from cpkv.request import EngineConfig
from cpkv.talks import shipped_text
from cpkv.world import Solo

AXES = dict(split=sorted(SPLITTERS), placement=sorted(PLACEMENTS), reader=sorted(READERS), format=sorted(FORMATS),
            path=["cold", "hit", "chunked", "batch", "handoff"], cp=[1, 2, 3, 4, 8])
PROMPT = np.random.default_rng(5).integers(0, 256, 75)
OTHERS = [PROMPT[:1], PROMPT[20:61], PROMPT[:40]]
P, NUM = 8, 3


def allowed(case: dict) -> bool:
    "A page can live where it is computed only if one rank computes it, and if there is a shard a rank"
    alone = case["placement"] == "cyclic" or case["cp"] == 1
    return alone or (case["split"] == "page" and READERS[case["reader"]].shards(case["cp"]) == case["cp"])

def hands_off(case: dict) -> bool:
    "A page whose layers are on several ranks is not sent anywhere"
    return case["path"] != "handoff" or all(READERS[case["reader"]].holds(3, case["cp"], 0))

def pairwise(axes: dict) -> list[dict]:
    "Rows in which every two values of two axes meet that may, built greedily from the full product"
    names, rows = list(axes), [(*case.values(),) for case in product(axes)]
    def pairs(row): return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)}
    open_, out = set().union(*map(pairs, rows)), []
    while open_:
        best = max(rows, key=lambda row: len(pairs(row) & open_))
        open_ -= pairs(best)
        out.append(dict(zip(names, best)))
    return out

def product(axes: dict) -> list[dict]:
    cases = (dict(zip(axes, v)) for v in itertools.product(*axes.values()))
    return [case for case in cases if allowed(case) and hands_off(case)]

def name(case: dict) -> str: return "-".join(map(str, case.values()))

@cache
def model() -> Model:
    config = parse_config(TINY, layers=3)
    return Model(config, random_weights(config, seed=2), REF)

def engine_of(world, case, chunk=1000) -> Engine:
    sizes = EngineConfig(page_size=P, chunk=chunk, device_tokens=256, max_tokens=256, format=case["format"],
                         split=case["split"], reader=case["reader"], placement=case["placement"])
    engine = Engine(world, model(), sizes)
    engine.pool.poison()
    return engine

def run_case(peers, case: dict):
    "What one rank says of the prompt by one path"
    path = case["path"]
    engine = engine_of(peers.world(), case, chunk=13 if path == "chunked" else 1000)
    if path == "hit":
        generate(engine, 0, PROMPT[:50], 1)
        r = engine.begin(1, PROMPT)
        assert r.cached == 48
        engine.abort(r)
    if path == "batch":
        rs = [engine.begin(i, p) for i, p in enumerate([*OTHERS, PROMPT])]
        logits = engine.compute([(r, len(r.tokens)) for r in rs])[-1].logits
        for r in rs: engine.abort(r)
        out = [int(logits.argmax())], logits[None]
    else: out = generate(engine, 1, PROMPT, NUM)
    assert engine.world.ledger.received() == {k: v for k, v in engine.predicted.items() if k in engine.world.ledger.received()}
    return out, engine.leaked_pages()

@cache
def oracle(fmt: str):
    "One rank, replicated, cold, in one chunk"
    return generate(engine_of(Solo(), dict(format=fmt, split="zigzag", reader="replicated", placement="cyclic")), 0, PROMPT, NUM)

def check(case: dict, backend: str) -> None:
    if case["path"] == "handoff":
        r = run_demo(text=shipped_text()[:90], cp=case["cp"], num_output=2, backend=backend,
                     engine=dict(page_size=P, chunk=40, **{k: case[k] for k in ("split", "placement", "format", "reader")}))
        assert r["ok"] and r["leaked_pages"] == 0
        return
    tokens, logits = oracle(case["format"])
    for (got, rows), leaked in run_ranks(run_case, case["cp"], case, backend=backend):
        assert got == tokens[:len(got)] and torch.equal(rows, logits[:len(rows)]) and leaked == 0


COVER = pairwise(AXES)

def test_the_cover_is_one():
    def pairs(cases): return {(a, c[a], b, c[b]) for c in cases for a, b in itertools.combinations(AXES, 2)}
    assert pairs(COVER) == pairs(product(AXES)) and len(COVER) < len(product(AXES)) / 8
    assert {(c["split"], c["placement"]) for c in COVER if c["cp"] > 1} >= {("page", "compute_owner"), ("zigzag", "cyclic")}

FORBIDDEN = [dict(split=s, placement="compute_owner", reader=r, cp=2) for s in sorted(SPLITTERS) for r in sorted(READERS)]
FORBIDDEN = [case for case in FORBIDDEN if not allowed(case)]

@pytest.mark.parametrize("case", FORBIDDEN, ids=name)
def test_what_cannot_be_is_refused_at_start(case):
    def start(peers): engine_of(peers.world(), case | dict(format="fp32"))
    with pytest.raises(ConfigError, match="compute_owner needs"): run_ranks(start, 2, backend="local")

@pytest.mark.parametrize("case", COVER, ids=name)
def test_on_threads(case): check(case, "local")

GLOO = [dict(split=s, placement=o, reader=r, format=f, path=p, cp=c) for s, o, r, f, p, c in [
    ("page", "compute_owner", "chunk_reuse", "fp8_packed", "cold", 2),
    ("interleave", "cyclic", "full_view", "fp8_packed", "cold", 2),
    ("page", "compute_owner", "full_view", "fp32", "hit", 2), ("interleave", "cyclic", "chunk_reuse", "bf16", "hit", 3),
    ("zigzag", "cyclic", "full_view", "fp8", "chunked", 3), ("page", "compute_owner", "chunk_reuse", "fp32", "chunked", 2),
    ("zigzag", "cyclic", "chunk_reuse", "bf16", "batch", 4), ("page", "compute_owner", "full_view", "fp8_packed", "batch", 4),
    ("zigzag", "cyclic", "replicated", "fp8_packed", "batch", 2), ("interleave", "cyclic", "replicated", "fp32", "cold", 3),
    ("page", "cyclic", "chunk_reuse", "fp8_packed", "handoff", 2), ("page", "compute_owner", "chunk_reuse", "bf16", "handoff", 3)]]

@pytest.mark.parametrize("case", GLOO, ids=name)
def test_on_processes(case): check(case, "gloo")

@pytest.mark.slow
@pytest.mark.parametrize("case", product(AXES), ids=name)
def test_the_full_product(case): check(case, "local")
