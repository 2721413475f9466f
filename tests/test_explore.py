"""Every order of events: the search itself is right, and finds nothing in larger worlds"""
import random

import pytest

from cpkv import explore as ex
from cpkv.explore import LARGE, SMALL, Pair, explore
from cpkv.laws import CapacityError, OrderError
from cpkv.small import Bounds

PLAIN = Bounds(prompts=("a",))
BACK = Bounds(prompts=("a",), policy="write_back")
WIDE = Bounds(prompts=("a", "ab", "ac"), requests=2, faults=("copy", "unreadable", "issue"))


def walk(pair, steps, seed):
    "A random story, told as it is found"
    rng, story = random.Random(seed), []
    for _ in range(steps):
        story.append(rng.choice(pair.actions()))
        pair.act(story[-1])
    return story


# -- fix-points

@pytest.mark.slow
@pytest.mark.parametrize("bounds", [*SMALL, *LARGE], ids=str)  # the chapter explores the small ones
def test_no_world_breaks_a_law_or_has_a_dead_end(bounds):
    r = explore(bounds)
    print(bounds, r.states, r.transitions, r.depth)
    assert (r.story, r.error, r.stuck) == ((), None, 0) and r.states > 700

def test_the_counts_are_the_same_every_time():
    assert explore(BACK)[:4] == explore(BACK)[:4]

def test_a_search_that_does_not_end_is_no_proof():
    n = explore(BACK).states
    assert explore(BACK, most=n).states == n > 100
    for most in (0, 1, n - 1):
        with pytest.raises(CapacityError): explore(BACK, most=most)

def test_a_state_without_a_way_to_rest_is_counted():
    before = [[], [0], [1], [2, 3], [4]]  # 0 -> 1 -> 2 -> 3 -> 3, and 4 alone
    assert ex._back(before, {0}) == {0} and ex._back(before, {2}) == {0, 1, 2}
    assert ex._back(before, {3}) == {0, 1, 2, 3} and ex._back(before, {4}) == {4}


# -- the same state

def said(pair, a):
    "An action by what its request is, not by where it stands"
    if a[0] not in ("load", "read", "compute", "abort"): return a
    q, live = pair.ranks[0].open[a[1]], [*pair.ranks[0].cache.ops.live]
    op = None if q.load is None else live.index(q.load.op) if q.load.op in live else q.load.answer
    return a[0], q.prompt, len(q.pages), len(q.leased.host_pages), q.is_read, op

def successors(pair):
    "What each action leads to"
    saved, out = pair.save(), {}
    for a in pair.actions():
        pair.restore(saved)
        name = said(pair, a)
        got = pair.act(a), pair.key()
        assert out.setdefault(name, got) == got  # also of two requests that look the same
    pair.restore(saved)
    return out

@pytest.mark.parametrize("bounds,most", [
    (PLAIN, 70), (Bounds(prompts=("a", "ab")), 120),
    (Bounds(prompts=("a", "b"), policy="write_back", faults=("copy",)), 90),
    (Bounds(prompts=("a",), requests=2, faults=("copy", "unreadable")), 90),
    pytest.param(PLAIN, 1000, marks=pytest.mark.slow),
    pytest.param(Bounds(prompts=("a", "ab"), faults=("copy",)), 2500, marks=pytest.mark.slow),
    pytest.param(Bounds(prompts=("a", "ab"), requests=2), 1500, marks=pytest.mark.slow)], ids=str)
def test_states_that_look_the_same_go_on_in_the_same_way(bounds, most):
    pair = Pair(bounds)
    seen, todo, again = {pair.key(): successors(pair)}, [pair.save()], 0
    while todo and len(seen) < most:
        saved = todo.pop(0)
        pair.restore(saved)
        for a in pair.actions():
            pair.restore(saved)
            pair.act(a)
            key, next_ = pair.key(), successors(pair)
            if key in seen: again += 1
            else: todo.append(pair.save())
            assert seen.setdefault(key, next_) == next_
    assert again > len(seen)

def test_a_restored_state_is_the_state_and_goes_on_as_it_did():
    for seed in range(6):
        pair = Pair(WIDE)
        walk(pair, 5 * seed, seed)
        saved, key = pair.save(), pair.key()
        story = walk(pair, 20, seed + 100)
        end = pair.key()
        for _ in range(2):
            pair.restore(saved)
            assert pair.key() == key
            for a in story: pair.act(a)
            assert pair.key() == end
            pair.check()

def test_the_state_has_all_that_the_cache_keeps():
    r = Pair(PLAIN).ranks[0]
    seen = {"ops", "_joined", "_broken", "_later", "_suspect", "after_hits"}  # in the key
    fixed = {"world", "tree", "alloc", "copies", "host", "policy"}            # objects apart, or for ever
    assert vars(r.cache).keys() == seen | fixed | {"counters"}


# -- two ranks in turn

def test_a_rank_that_comes_to_a_collective_alone_is_an_error():
    for alone in range(2):
        pair = Pair(PLAIN)
        with pytest.raises(OrderError):
            pair.both(lambda r, alone=alone: r.world.agreed_min([1]) if r.rank == alone else None)
    with pytest.raises(OrderError): Pair(PLAIN).both(lambda r: r.world.agreed_min([1] * (1 + r.rank)))
    with pytest.raises(OrderError): Pair(PLAIN).both(lambda r: [r.world.agreed_min([1]) for _ in "ab"])
    assert Pair(PLAIN).both(lambda r: tuple(r.world.agreed_min([r.rank, 3 - r.rank]))) == (0, 2)

def test_ranks_that_answer_differently_are_an_error():
    with pytest.raises(OrderError): Pair(PLAIN).both(lambda r: r.rank)
    with pytest.raises(OrderError): Pair(PLAIN).both(lambda r: 1 // r.rank)
    with pytest.raises(ZeroDivisionError): Pair(PLAIN).both(lambda r: 1 // 0)
