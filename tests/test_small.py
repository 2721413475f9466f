"""One rank of a small world: blocks end as they would, and ranks in turn are ranks of the local world"""
import random

import pytest

from cpkv import small
from cpkv.explore import Pair, own_view, shared_view
from cpkv.launch import run_ranks
from cpkv.laws import CpkvError
from cpkv.small import Bounds, Rank

WIDE = Bounds(prompts=("a", "ab", "ac"), requests=2, faults=("copy", "unreadable", "issue"))
BACK = Bounds(prompts=("a", "ab", "b"), requests=2, policy="write_back", faults=("copy",))


def walk(pair, steps, seed):
    "A random story, told as it is found"
    rng, story = random.Random(seed), []
    for _ in range(steps):
        story.append(rng.choice(pair.actions()))
        pair.act(story[-1])
    return story

def test_a_block_is_left_as_it_would_end(monkeypatch):
    for seed in range(8):
        left, ended = Pair(WIDE), Pair(WIDE)
        story = walk(left, 40, seed)
        monkeypatch.setattr(small, "leave", lambda block: block.__exit__(None, None, None))
        for a in story: ended.act(a)
        monkeypatch.undo()
        assert left.key() == ended.key() and [r.tree.digest() for r in left.ranks] == [
            r.tree.digest() for r in ended.ranks]


def tell(r: Rank, story):
    "A story on one rank of any world; what is refused is refused"
    for a in story:
        try: r.do(a)
        except CpkvError as e: assert a[0] in ("lost", "reset"), e
    return shared_view(r), own_view(r), r.tree.step_digest

@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bounds", [WIDE, BACK], ids=str)
def test_ranks_in_turn_are_ranks_of_the_local_world(bounds, seed):
    pair = Pair(bounds)
    story = walk(pair, 60, seed)
    got = run_ranks(lambda peers: tell(Rank(peers.world(), bounds), story), 2, backend="local", seed=seed)
    assert got == [(shared_view(r), own_view(r), r.tree.step_digest) for r in pair.ranks]
