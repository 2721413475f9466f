"""Nodes alone: moves keep the counts, a split can be undone, and what goes is a tail"""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.laws import ConservationError, InputError, LeaseError, PageIdError, ResidencyError
from cpkv.nodes import NO_OP, NO_PAGES, POLICIES, Nodes, Residency, Tier

ABSENT, PENDING, READY = Residency
DEVICE, HOST = Tier


def grow(n, parent, num, first, tiers=(DEVICE,)):
    "A node of `num` pages that begin with `first`, on some tiers"
    n.clock += 1
    pages = np.arange(first, first + num, dtype=np.int32)
    for tier in tiers: n.hold(tier, pages)
    key = pages.astype("<i4").tobytes()
    node = n.add(parent, key, tiers[0], pages, base=0)
    for tier in tiers[1:]: n.set_copy(node, tier, READY, pages, NO_OP)
    return node

def known(node):
    return (node.base, node.locks, node.hits, node.used, node.born, node.priority, node.residency,
            node.ops)


def test_what_must_stay_stays_and_all_above_it():
    n = Nodes(page_size=1, width=4)
    top = grow(n, n.root, 2, 1, (DEVICE, HOST))
    leaf, other = grow(n, top, 2, 11, (DEVICE, HOST)), grow(n, n.root, 3, 21, (DEVICE, HOST))
    for tier in Tier:
        assert n.coldest(9, tier, but=[leaf]) == {other: 0}
        assert n.evictable_by_class(1, tier, but=[other]) == [4] and n.coldest(9, tier, but=[n.root, top, leaf, other]) == {}
    cold = n.coldest(3, HOST, but=[top])
    gone = n.give_back(cold, HOST)
    assert sorted(gone.tolist()) == [11, 12, 23] and n.num_ready == [7, 4]
    n.check()

@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("tiers", [(DEVICE,), (HOST,), (DEVICE, HOST)])
def test_a_split_knows_all_on_both_sides_and_can_be_undone(at, tiers):
    n = Nodes(page_size=1, width=4)
    top = grow(n, n.root, 2, 100, tiers)
    node = grow(n, top, 5, 1, tiers)
    leaf = grow(n, node, 1, 50, tiers)
    node.hits, node.priority, node.hashes = 3, 4, [b"%d" % i for i in range(5)]
    before = (*known(node), node.key, node.hashes, [p.tolist() for p in node.pages])
    upper = n.split(node, at)
    n.check()
    assert (upper is node) == (at == 5)
    if at < 5:
        assert known(upper) == known(node) and upper.parent is top and node.parent is upper
        assert len(upper.key) == 4 * at and upper.hashes + node.hashes == before[-2]
        n.unsplit(upper)
        n.check()
    assert [*n.nodes()] == [top, node, leaf]
    assert (*known(node), node.key, node.hashes, [p.tolist() for p in node.pages]) == before

@pytest.mark.parametrize("change", ["locks", "hits", "used", "born", "priority", "base", "residency",
                                    "sibling"])
def test_halves_that_differ_stay_apart(change):
    n = Nodes(page_size=1, width=4)
    node = grow(n, n.root, 4, 1, (DEVICE, HOST))
    upper = n.split(node, 2)
    if change == "locks": n.lock(node, 1)
    elif change == "residency": n.end_copy(node, DEVICE)
    elif change == "sibling": grow(n, upper, 1, 9).used = upper.used
    else: setattr(node, change, 7)
    n.unsplit(upper)
    assert len(upper.children) == 1 + (change == "sibling") and node.parent is upper

def test_pages_come_in_all_or_none():
    n = Nodes(page_size=1, width=4)
    grow(n, n.root, 3, 1)
    for bad, error in (([7, 8, 3], ConservationError), ([7, 8, 7], ConservationError),
                       ([7, 0], PageIdError), ([-1, 7], PageIdError)):
        with pytest.raises(error): n.hold(DEVICE, np.array(bad, np.int32))
        assert n.held == [{1, 2, 3}, set()]
    n.hold(DEVICE, NO_PAGES)
    n.hold(HOST, np.array([3], np.int32))  # the tiers' numbers have nothing to do with each other
    assert n.held == [{1, 2, 3}, {3}]

def test_a_copy_that_an_operation_needs_does_not_go_even_without_a_lease():
    n = Nodes(page_size=1, width=4)
    node = grow(n, n.root, 2, 1, (DEVICE,))
    n.hold(HOST, np.array([5, 6], np.int32))
    n.set_copy(node, HOST, PENDING, np.array([5, 6], np.int32), op=3)
    for tier in Tier:
        assert not n.is_free(node, tier) and n.evict(9, tier).size == 0
        with pytest.raises(ResidencyError): n.drop(node, tier)
    n.set_copy(node, HOST, READY, node.pages[HOST], NO_OP)
    assert n.evict(9).tolist() == [2, 1] and n.evict(9, HOST).tolist() == [6, 5]

def test_coldest_says_what_evict_takes_and_changes_nothing():
    n = Nodes(page_size=1, width=4)
    a = grow(n, n.root, 4, 1, (DEVICE, HOST))
    b = grow(n, a, 2, 11)
    grow(n, n.root, 2, 21)
    n.check()
    before = [(known(x), x.key) for x in n.nodes()], n.step_digest
    assert n.coldest(3) == {b: 0, a: 3} and n.coldest(0) == {} and [*n.coldest(3)] == [b, a]
    assert ([(known(x), x.key) for x in n.nodes()], n.step_digest) == before
    assert n.evict(3).tolist() == [12, 11, 4] and n.step_digest != before[1]
    n.check()

def test_a_lease_keeps_the_nearest_copy_and_all_above_it():
    n = Nodes(page_size=1, width=4)
    a = grow(n, n.root, 2, 1, (DEVICE, HOST))
    b = grow(n, a, 2, 11, (HOST,))
    n.lock(a, 1)
    assert (n.evictable_by_class(1), n.evictable_by_class(1, HOST)) == ([0], [4])
    with pytest.raises(LeaseError): n.drop(a, DEVICE)
    n.lock(b, 1)
    assert n.evictable_by_class(1, HOST) == [0] and n.evict(9, HOST).size == 0
    with pytest.raises(LeaseError): n.drop(b, HOST)
    with pytest.raises(ResidencyError): n.drop(a, HOST)
    n.lock(b, -1)
    assert n.drop(b, HOST).tolist() == [11, 12] and n.drop(a, HOST).tolist() == [1, 2]
    n.lock(a, -1)
    assert n.drop(a, DEVICE).tolist() == [1, 2] and not [*n.nodes()]
    n.check()

@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_never_takes_a_head_before_its_tail(policy):
    n, rng = Nodes(page_size=1, width=4, policy=policy), np.random.default_rng(3)
    nodes = [n.root]
    for i in range(30): nodes.append(grow(n, nodes[rng.integers(len(nodes))], 3, 10 * i + 1))
    for x in nodes[1:]: x.hits, x.used, x.priority = rng.integers(0, 3, 3).tolist()
    above = {int(p): int(n_.parent.pages[0][-1]) if n_.parent is not n.root else 0
             for n_ in nodes[1:] for p in n_.pages[0][:1]}
    out = []
    while (got := n.evict(int(rng.integers(1, 5))).tolist()):
        out += got
        n.check()
    place = {p: i for i, p in enumerate(out)}
    assert len(out) == 90
    for p in out:
        before = above.get(p, p - 1)
        assert before == 0 or place[before] > place[p]

def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError): Nodes(page_size=1, width=4, policy="luck")

@given(st.lists(st.one_of(st.integers(0, 9), st.binary(max_size=5)), max_size=600),
       st.sets(st.integers(0, 600)))
def test_the_step_digest_does_not_depend_on_when_it_is_asked(moves, asked):
    a, b = Nodes(page_size=1, width=4), Nodes(page_size=1, width=4)
    for i, what in enumerate(moves):
        a.note(what)
        b.note(what)
        if i in asked: assert 0 <= b.step_digest < 2**61
    assert a.step_digest == b.step_digest and len(a._unread) == 0
    b.note(0)
    assert b.step_digest != a.step_digest

def test_it_draws_itself():
    n = Nodes(page_size=1, width=4)
    a = grow(n, n.root, 2, 2, (DEVICE, HOST))
    n.lock(a, 2)
    assert repr(n) == "2 pages, 2 locked, 2 on the host"
    assert repr(n.draw(cp_size=2)).split("\n")[1].strip() == (
        "device ready: 2 3 | host ready: 2 3 | base 0 | locks 2 | hits 0 | owners 0 1")
    assert "0 of 0 nodes" in Nodes(page_size=1, width=4)._repr_html_()
