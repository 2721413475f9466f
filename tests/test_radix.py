"""The prefix tree, alone and with the allocator: one holder a page, right pages for a prefix, the
same tree on every rank"""
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpkv.alloc import Holder, PageAllocator, cyclic_classes, pick_base
from cpkv.laws import (CapacityError, ConservationError, InputError, LeaseError, OwnershipError,
                       PageIdError, ResidencyError)
from cpkv.layout import PageLayout
from cpkv.radix import (NO_BASE, NO_OP, Declined, RadixTree, Residency, Tier, key_bytes,
                        page_hashes)
from cpkv.residency import Operations

FREE, TREE, REQUEST = Holder.FREE, Holder.TREE, Holder.REQUEST


def grow(P=4, **kw): return RadixTree(P, namespace="test", **kw)

def put(t, tokens, pages, base=0):
    done = t.insert(t.key(tokens), pages, base)
    t.check()
    return done

def shape(t):
    "Everything a tree is, without what a use changes"
    return [(n.parent.node_id, n.node_id, n.key, n.pages[0].tolist(), n.base, n.locks, n.hits,
             tuple(n.residency), [p.tolist() for p in n.pages], n.ops) for n in t.nodes()]

def on_host(t, tokens, pages, base=0):
    done = t.insert(t.key(tokens), pages, base, tier=Tier.HOST)
    t.check()
    return done


# ── keys ────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("P", [1, 4, 32])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_key_is_whole_pages_of_tokens_or_pairs(P, pairs):
    t = grow(P, pairs=pairs)
    for n in sorted({0, 1, P - 1, P, P + 1, 2 * P, 2 * P + 1, 5 * P - 1}):
        k = t.key(range(n))
        assert k.num_pages == max(n - pairs, 0) // P
        assert len(k.data) == key_bytes(n, P, pairs) == k.num_pages * t.width
        rest = t.reusable(range(n))
        assert rest.num_pages == max(n - 1, 0) // P and k.data.startswith(rest.data)
        assert t.match(k).pages.tolist() == [] and t.match(k).base == NO_BASE

def test_a_key_does_not_depend_on_the_kind_of_the_tokens():
    t, ids = grow(), [7, 0, 2**31 - 1, 5, 6, 7, 8, 9]
    kinds = [ids, tuple(ids), np.array(ids), np.array(ids, np.int32), np.array(ids, ">i4"),
             np.array(ids, np.uint64), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)]
    assert {t.key(x) for x in kinds} == {t.key(ids)} and t.key(ids).num_pages == 2

def test_tokens_that_would_wrap_are_refused():
    t = grow(1)
    for bad in ([2**31], [2**32 + 5], [-2**31 - 1], [5.0], [[5]], np.array([2**32 + 5])):
        with pytest.raises(InputError): t.key(bad)

def test_namespace_page_size_and_pairs_are_part_of_the_key():
    tokens = list(range(64))
    trees = [RadixTree(P, namespace=ns, pairs=pairs) for P in (4, 8) for ns in ("a", "a\0", "ab")
             for pairs in (False, True)]
    assert len({t.root_digest for t in trees}) == 12
    names = [h for t in trees for h in page_hashes(t, t.key(tokens))]
    assert len(set(names)) == len(names)
    for t in trees[1:]:
        alien = trees[0].key(tokens)
        with pytest.raises(InputError, match="another namespace"): t.match(alien)
        with pytest.raises(InputError, match="another namespace"): t.insert(alien, range(1, 17), 0)
    same = RadixTree(4, namespace="a")
    assert same.key(tokens) == trees[0].key(tokens)

def test_a_page_name_says_all_before_it():
    t = grow(2)
    texts = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [0, 2, 3, 4, 5, 6]
    a, b, c = (page_hashes(t, t.key(x)) for x in texts)
    assert [x == y for x, y in zip(a, b)] == [True, True, False] and not set(a) & set(c)


# ── hits ────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("pairs", [False, True])
def test_hits_when_the_same_prompt_comes_again(pairs):
    hits = []
    for n in (3, 4, 5, 8, 9):
        t = grow(pairs=pairs)
        for _ in range(3):
            k = t.key(range(n))
            put(t, range(n), range(1, 1 + k.num_pages))
            hits.append(t.match(t.reusable(range(n))).num_tokens)
    assert hits == [h for h in (0, 0, 4, 4, 8) for _ in range(3)]

def test_a_pair_is_dropped_once_for_the_whole_prompt():
    t = grow(pairs=True)
    shared = list(range(40))
    put(t, [*shared, 100, 101], range(1, 11))
    m = t.match(t.reusable([*shared, 200, 201, 202]))
    assert m.num_tokens == 36  # the tenth page's last pair is (39, 100): another next token
    assert t.match(t.reusable([*shared, 100, 7])).num_tokens == 40

def test_a_key_shorter_than_a_page_is_an_empty_match():
    t = grow()
    put(t, range(8), [1, 2])
    m = t.match(t.key([0, 1, 2]))
    assert (m.pages.tolist(), m.num_tokens, m.path, m.base) == ([], 0, (), NO_BASE)
    with t.lease(m): assert t.num_locked == 0
    assert put(t, [0, 1, 2], []).already == 0 and t.num_pages == 2

@pytest.mark.parametrize("at", range(6))
def test_split_at_each_page_keeps_all_in_both_halves(at):
    t = grow(1)
    put(t, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15], base=3)
    whole = t.match(t.key([1, 2, 3, 4, 5]))
    with t.lease(whole):
        [old] = t.nodes()
        old.residency[Tier.DEVICE] = Residency.READY
        part = t.match(t.key([1, 2, 3, 4, 5][:at]))
        assert part.pages.tolist() == [11, 12, 13, 14, 15][:at]
        before = (old.locks, old.hits, old.base)
        with t.lease(part):
            t.check()
            nodes = list(t.nodes())
            assert len(nodes) == (1 if at in (0, 5) else 2)
            assert t.pages().tolist() == [11, 12, 13, 14, 15]
            locks = [2, 1] if len(nodes) == 2 else [1 + (at == 5)]
            assert [n.locks for n in nodes] == locks and nodes[-1] is old
        assert all((n.locks, n.base) == (before[0], before[2]) for n in t.nodes())
        assert [n.hits for n in t.nodes()] == ([2, 1] if len(nodes) == 2 else [1 + (at == 5)])
        assert t.match(t.key([1, 2, 3, 4, 5])).pages.tolist() == [11, 12, 13, 14, 15]
        assert t.evict(9).tolist() == []
    assert t.num_locked == 0
    t.check()

def test_split_copies_a_pending_state_to_both_halves_and_neither_serves():
    t = grow(1)
    ops = Operations(t)
    on_host(t, [1, 2, 3], [1, 2, 3])
    op = ops.begin(Tier.DEVICE, [*t.nodes()], [11, 12, 13])
    assert t.match(t.key([1, 2, 3])).num_tokens == t.match(t.key([1, 2, 3])).num_host_tokens == 0
    on_host(t, [1, 2, 9], [1, 2, 9])  # splits it
    assert [[r.value for r in m.residency] for m in t.nodes()] == [
        ["pending", "ready"], ["pending", "ready"], ["absent", "ready"]]
    assert [m.ops[0] for m in t.nodes()] == [op, op, NO_OP]
    for text in ([1, 2, 3], [1, 2, 9]):
        m = t.match(t.key(text))
        assert (m.num_tokens, m.num_host_tokens, m.join, m.base) == (0, 0, op, 0)
    assert ops.publish(op).taken.tolist() == [11, 12, 13]
    assert t.match(t.key([1, 2, 3])).pages.tolist() == [11, 12, 13]
    m = t.match(t.key([1, 2, 9]))
    assert (m.pages.tolist(), m.host_pages.tolist(), m.join) == ([11, 12], [9], NO_OP)

def test_split_at_each_page_of_a_node_with_everything():
    for at in range(1, 5):
        t = grow(1, policy="priority")
        t.insert(t.key([1, 2, 3, 4, 5]), [11, 12, 13, 14, 15], 3, priority=7)
        on_host(t, [1, 2, 3, 4, 5], [21, 22, 23, 24, 25], base=3)
        [node] = t.nodes()
        names = t.hashes(node)
        with t.lease(t.match(t.key([1, 2, 3, 4, 5]))):
            upper = t.split(node, at)
            for n in (upper, node):
                assert (n.locks, n.hits, n.used, n.born, n.base, n.priority) == (1, 1, 3, 0, 3, 7)
            assert upper.pages[1].tolist() + node.pages[1].tolist() == [21, 22, 23, 24, 25]
            assert upper.hashes + node.hashes == names and len(upper.hashes) == at
            t.unsplit(upper)  # somebody holds them: they stay apart
            assert [*t.nodes()] == [upper, node]
            t.check()
        t.unsplit(upper)
        assert [*t.nodes()] == [node] and node.hashes == names
        assert node.pages[1].tolist() == [21, 22, 23, 24, 25]
        t.check()


# ── insert ──────────────────────────────────────────────────────────────────────────────────────

def test_duplicates_go_back_and_known_pages_do_not():
    t = grow(1)
    assert put(t, [1, 2, 3], [11, 12, 13]).taken.tolist() == [11, 12, 13]
    done = put(t, [1, 2, 3, 4], [11, 22, 13, 14])  # 11 and 13 matched, 22 in vain
    assert (done.already, done.taken.tolist(), done.duplicates.tolist()) == (3, [14], [22])
    assert t.match(t.key([1, 2, 3, 4])).pages.tolist() == [11, 12, 13, 14]

@pytest.mark.parametrize("parts_at", range(1, 5))
def test_a_graft_with_another_base_is_declined_whole(parts_at):
    t = grow(1)
    put(t, [1, 2], [11, 12], base=1)
    put(t, [1, 2, 3, 4], [11, 12, 13, 14], base=1)
    before = t.digest()
    other = [1, 2, 3, 4][:parts_at] + [9, 9]
    done = t.insert(t.key(other), range(21, 21 + len(other)), 0)
    assert done.declined and not done.taken.size and not done.duplicates.size
    assert done.already == parts_at and t.digest() == before
    assert not put(t, other, range(21, 21 + len(other)), base=1).declined

def test_another_base_is_declined_also_when_all_is_known():
    t = grow(1)
    put(t, [1, 2, 3], [11, 12, 13], base=1)
    done = put(t, [1, 2], [21, 22], base=0)  # else its request would go on with two rounds
    assert done.declined and not done.duplicates.size
    assert put(t, [1, 2], [21, 22], base=1).duplicates.tolist() == [21, 22]
    assert not put(t, [7], [17], base=0).declined  # another chain, its own base
    assert not put(t, [], [], base=0).declined
    assert t.match(t.key([1, 2])).base == 1 and t.match(t.key([7])).base == 0

def test_a_device_copy_that_was_given_up_comes_back_with_an_insert():
    t = grow(1)
    put(t, [1, 2, 3, 4], [11, 12, 13, 14])
    on_host(t, [1, 2, 3, 4], [21, 22, 23, 24])
    assert t.evict(3).tolist() == [14, 13, 12]
    assert t.insert(t.key([1, 2, 3]), [31, 32, 33], base=1).declined is Declined.BASE
    done = put(t, [1, 2, 3], [31, 32, 33])  # computed again, and its first page in vain
    assert (done.already, done.taken.tolist(), done.duplicates.tolist()) == (1, [32, 33], [31])
    m = t.match(t.key([1, 2, 3, 4]))
    assert (m.pages.tolist(), m.host_pages.tolist()) == ([11, 32, 33], [24])
    assert m.num_host_tokens == 1 and m.host_path[-1].pages[1].tolist() == [24]
    assert put(t, [1, 2, 3, 4, 5], [11, 32, 33, 34, 35]).taken.tolist() == [34, 35]
    assert not t.match(t.key([1, 2, 3, 4, 5])).host_pages.size

def test_nothing_is_inserted_under_a_copy_that_is_on_its_way():
    t = grow(1)
    ops = Operations(t)
    put(t, [1, 2], [11, 12])
    on_host(t, [1, 2], [21, 22])
    t.evict(1)
    op = ops.begin(Tier.DEVICE, t.match(t.key([1, 2])).host_path, [32])
    before = t.digest()
    for text, pages in (([1, 2, 3], [11, 42, 43]), ([1, 2], [11, 42])):
        done = t.insert(t.key(text), pages, 0)
        assert done.declined is Declined.PENDING and not done.taken.size + done.duplicates.size
    assert t.digest() == before
    assert put(t, [1, 9], [11, 49]).taken.tolist() == [49]  # beside it is fine
    ops.abort(op)
    assert put(t, [1, 2, 3], [11, 42, 43]).taken.tolist() == [42, 43]

def test_refusals_come_before_any_effect():
    t = grow(1)
    put(t, [1, 2, 3], [11, 12, 13])
    before = t.digest()
    for tokens, pages, base, err in (
            ([1, 2, 3, 4], [11, 12, 13], 0, ConservationError),
            ([1], [11, 12], 0, ConservationError),
            ([1, 2, 8, 9], [11, 12, 18, 18], 0, ConservationError),
            ([8, 9], [18, 12], 0, ConservationError), ([8], [0], 0, PageIdError),
            ([8], [-1], 0, PageIdError), ([8], [18], -1, OwnershipError)):
        with pytest.raises(err): t.insert(t.key(tokens), pages, base)
        assert t.digest() == before
        t.check()
    for bad in (0, -1, 2.0, None):
        with pytest.raises(InputError): RadixTree(bad, namespace="x")
    with pytest.raises(InputError): RadixTree(1, namespace="")
    with pytest.raises(InputError, match="lru.*lfu.*fifo.*priority"):
        RadixTree(1, namespace="x", policy="luck")

def test_pages_handed_out_cannot_change_the_tree():
    t, mine = grow(1), np.array([11, 12], np.int32)
    put(t, [1, 2], mine)
    mine[:] = 99
    m = t.match(t.key([1, 2]))
    assert m.pages.tolist() == [11, 12]
    with pytest.raises(ValueError): m.pages[0] = 5


# ── leases ──────────────────────────────────────────────────────────────────────────────────────

def test_leases_nest_and_end_in_any_order():
    t = grow(1)
    put(t, [1, 2, 3, 4], [11, 12, 13, 14])
    a, b = ExitStack(), ExitStack()
    a.enter_context(t.lease(t.match(t.key([1, 2, 3]))))
    b.enter_context(t.lease(t.match(t.key([1, 2]))))
    put(t, [1, 9], [11, 19])  # splits under both
    assert [n.locks for n in t.nodes()] == [2, 2, 1, 0, 0] and t.num_locked == 3
    a.close()
    t.check()
    assert [n.locks for n in t.nodes()] == [1, 1, 0, 0, 0] and t.evict(9).tolist() == [14, 13, 19]
    b.close()
    assert t.num_locked == 0 and t.evict(9).tolist() == [12, 11] and t.num_pages == 0
    t.check()

def test_a_lease_ends_with_its_block_whatever_happens():
    t = grow(1)
    put(t, [1, 2], [11, 12])
    with pytest.raises(KeyError):
        with t.lease(t.match(t.key([1]))): raise KeyError
    assert t.num_locked == 0 and not any(n.locks for n in t.nodes())

def test_a_stale_match_is_refused_and_a_split_one_is_not():
    t = grow(1)
    put(t, [1, 2, 3], [11, 12, 13])
    m = t.match(t.key([1, 2, 3]))
    put(t, [1, 9], [11, 19])
    with t.lease(m): assert t.num_locked == 3
    t.evict(3)
    before = shape(t)
    with pytest.raises(LeaseError):
        with t.lease(m): pass
    assert shape(t) == before
    put(t, [1, 2, 3], [11, 22, 23] if t.num_pages else [21, 22, 23])
    with pytest.raises(LeaseError):  # the prefix is known again, by other pages
        with t.lease(m): pass
    t.check()

def test_a_lease_keeps_the_host_pages_that_a_match_found():
    t = grow(1)
    put(t, [1, 2, 3, 4], [11, 12, 13, 14])
    on_host(t, [1, 2, 3, 4], [21, 22, 23, 24])
    t.evict(2)
    with t.lease(t.match(t.key([1, 2, 3]))):  # one of the host's two nodes' pages
        assert t.evict(9, Tier.HOST).tolist() == [24]
        assert t.evict(9).size == 0 and t.num_locked == 2
    stale = t.match(t.key([1, 2, 3]))
    with t.lease(t.match(t.key([1]))):
        assert t.evict(9, Tier.HOST).tolist() == [23, 22, 21]  # the device has what is leased
    for m in (stale, t.match(t.key([1, 2]))._replace(host_pages=np.array([23], np.int32))):
        with pytest.raises(LeaseError):
            with t.lease(m): pass
    t.check()
    assert t.pages().tolist() == [11, 12] and t.pages(Tier.HOST).size == 0

def test_a_match_stays_good_when_its_host_part_comes_to_the_device():
    t = grow(1)
    ops = Operations(t)
    on_host(t, [1, 2, 3], [21, 22, 23])
    m = t.match(t.key([1, 2, 3]))
    ops.publish(ops.begin(Tier.DEVICE, m.host_path, [11, 12, 13]))
    with t.lease(m): assert t.num_locked == 3
    assert t.num_locked == 0

def test_looking_changes_nothing():
    t = grow(2)
    put(t, range(12), range(1, 7))
    on_host(t, range(8), range(1, 5))
    before = t.digest()
    t.coldest(3), t.coldest([1, 1], Tier.HOST), t.evictable_by_class(2)
    for n in range(13):
        t.match(t.key([*range(n), 99, 99, 99]))
        t.match(t.reusable(range(n)))
    assert t.digest() == before


# ── eviction ────────────────────────────────────────────────────────────────────────────────────

def test_tails_first_oldest_first_and_a_use_makes_young():
    t = grow(1)
    put(t, [1, 1, 1], [1, 2, 3])
    put(t, [2, 2], [4, 5])
    put(t, [3], [6])
    with t.lease(t.match(t.key([1]))): pass
    assert [t.evict(1).tolist() for _ in range(7)] == [[3], [2], [5], [4], [6], [1], []]

def test_an_insert_is_a_use_of_the_whole_chain():
    t = grow(1)
    put(t, [1, 1], [1, 2])
    put(t, [2], [3])
    with t.lease(t.match(t.key([2]))):
        put(t, [1, 1, 1], [1, 2, 4])
        assert t.evict(1).tolist() == [4]
    assert t.evict(3).tolist() == [3, 2, 1]  # the chain was extended after the lease began

def test_a_parent_is_a_leaf_once_its_children_are_gone():
    t = grow(1)
    put(t, [1, 2, 3], [1, 2, 3])
    put(t, [1, 2, 4], [1, 2, 4])
    assert [len(n.children) for n in t.nodes()] == [2, 0, 0]
    assert t.evict(2).tolist() == [3, 4] and [len(n.children) for n in t.nodes()] == [0]
    assert t.match(t.key([1, 2, 3])).pages.tolist() == [1, 2]
    assert t.evict(1).tolist() == [2] and t.match(t.key([1, 2])).pages.tolist() == [1]

def test_a_wanted_class_under_others_is_uncovered_last():
    t = grow(1)
    put(t, [1], [3])             # class 1, a root of two leaves of class 0
    put(t, [1, 2], [3, 4])
    put(t, [1, 3], [3, 6])
    put(t, [5, 6], [7, 8])       # class 1 under class 0, younger
    assert t.evictable_by_class(2) == [3, 2]
    assert t.evict([0, 1]).tolist() == [8, 7]       # one tail, not two leaves
    assert t.evict([0, 1]).tolist() == [4, 6, 3]    # now there is no other way
    assert t.num_pages == 0 and t.evict([1, 1]).tolist() == []

def test_a_leaf_of_no_use_stays():
    t = grow(1)
    put(t, [1, 2], [2, 4])
    for need in ([0, 5], 0, [0, 0], [-1, 3]): assert t.evict(need).tolist() == []
    with t.lease(t.match(t.key([1]))):  # locked above: nothing to uncover
        put(t, [1, 2, 3], [2, 4, 6])
        assert t.evict([0, 1]).tolist() == []
    t.check()


def test_each_policy_has_its_own_oldest():
    said = {}
    for policy in ("lru", "lfu", "fifo", "priority"):
        t = grow(1, policy=policy)
        for i, value in enumerate((5, 9, 1, 5), 1): t.insert(t.key([i]), [i], 0, priority=value)
        for i in (1, 1, 2, 3, 3, 2, 1):
            with t.lease(t.match(t.key([i]))): pass
        said[policy] = [t.evict(1).tolist()[0] for _ in range(4)]
        t.check()
    assert said == dict(lru=[4, 3, 2, 1], lfu=[4, 3, 2, 1], fifo=[1, 2, 3, 4], priority=[3, 4, 1, 2])

def test_a_priority_is_that_of_the_most_important_request_through_a_node():
    t = grow(1, policy="priority")
    t.insert(t.key([1, 2]), [1, 2], 0, priority=3)
    t.insert(t.key([5]), [5], 0, priority=4)
    t.insert(t.key([1, 2, 3]), [1, 2, 3], 0, priority=9)
    t.insert(t.key([1, 2]), [1, 2], 0, priority=1)
    assert [n.priority for n in t.nodes()] == [9, 9, 4]
    assert t.evict(4).tolist() == [5, 3, 2, 1]

@pytest.mark.parametrize("shared", [48, 63, 64, 65])
def test_a_hit_is_what_is_shared_in_pages_and_not_in_pages_times_ranks(shared):
    P, R = 16, 4
    c = Cache(R=R, local=9, P=P)
    first, second = list(range(80)), [*range(shared), *range(200, 232)]
    c.start(first, 1)
    c.step(c.live[0], 5)
    assert c.tree.match(c.tree.reusable(second)).num_tokens == shared // P * P
    c.start(second, 0)
    assert c.live[1]["base"] == 1  # of the chain that it goes on
    for _ in range(3): c.step(c.live[1], 5)
    c.check()
    c.drain()

@pytest.mark.parametrize("kept", [0, 512, 576, 640, 700])
def test_a_request_that_keeps_a_part_frees_each_page_of_the_rest_once(kept):
    alloc = PageAllocator(PageLayout(cp_size=8, page_size=64), 9)
    t, tokens = grow(64), list(range(700))
    [pages] = alloc.take([cyclic_classes(0, 11, 3, 8)])
    key = t.key(tokens[:kept])
    done = t.insert(key, pages[:key.num_pages], 3)
    alloc.move(done.taken, REQUEST, TREE)
    alloc.free(pages[key.num_pages:])
    alloc.check()
    assert sum(alloc.count(TREE)) == t.num_pages == kept // 64
    alloc.free(t.evict(99), TREE)
    assert sum(alloc.free_by_class) == 64 and not sum(alloc.count(REQUEST))

# ── allocator and tree together ─────────────────────────────────────────────────────────────────

class Cache:
    "An engine in small: requests take pages, compute, publish, finish or abort"
    def __init__(self, R, local, P, pairs=False):
        self.R, self.P = R, P
        self.alloc = PageAllocator(PageLayout(cp_size=R, page_size=P), local)
        self.tree = RadixTree(P, namespace="cache", pairs=pairs)
        self.live, self.bytes, self.known = [], {}, {}  # bytes: prefix that a page's content is of

    def prefix(self, tokens, i): return self.tree.key(tokens).data[:(i + 1) * self.tree.width]

    def start(self, tokens, base):
        key = self.tree.reusable(tokens)
        m = self.tree.match(key)
        want, W = 0, self.tree.width
        while want < key.num_pages and key.data[:(want + 1) * W] in self.known: want += 1
        assert m.num_tokens == want * self.P and m.num_tokens <= max(len(tokens) - 1, 0)
        assert m.pages.tolist() == [self.known[self.prefix(tokens, i)] for i in range(want)]
        assert all(self.bytes[p] == self.prefix(tokens, i) for i, p in enumerate(m.pages.tolist()))
        stack = ExitStack()
        stack.enter_context(self.tree.lease(m))
        base = base % self.R if m.base == NO_BASE else m.base
        more = -(-len(tokens) // self.P) - want
        try: [own] = self.alloc.take([cyclic_classes(want, more, base, self.R)])
        except CapacityError:
            stack.close()
            return
        own = own.tolist()
        self.live.append(dict(tokens=tokens, base=base, own=own, leases=stack, done=want,
                              pages=[*m.pages.tolist(), *own]))

    def step(self, r, pages):
        "Compute some pages of a request and publish them"
        r["done"] = min(r["done"] + pages, self.tree.key(r["tokens"]).num_pages)
        for i in range(r["done"]):
            if r["pages"][i] in r["own"]: self.bytes[r["pages"][i]] = self.prefix(r["tokens"], i)
        self.publish(r, r["done"], r["tokens"][:r["done"] * self.P + self.tree.pairs])

    def publish(self, r, n, tokens):
        key = self.tree.key(tokens)
        assert key.num_pages == n
        done = self.tree.insert(key, r["pages"][:n], r["base"])
        self.alloc.move(done.taken, REQUEST, TREE)
        if done.declined: return
        for i in range(done.already, n): self.known[self.prefix(tokens, i)] = r["pages"][i]
        m = self.tree.match(key)
        assert m.num_tokens == n * self.P and len(done.taken) == n - done.already
        r["leases"].enter_context(self.tree.lease(m))
        self.alloc.free(done.duplicates)
        for p in (*done.taken.tolist(), *done.duplicates.tolist()): r["own"].remove(p)
        r["pages"][:n] = m.pages.tolist()

    def end(self, r):
        "Finish or abort, at any point: what is the request's own goes back, all else is the tree's"
        self.live.remove(r)
        self.alloc.free(r["own"])
        r["leases"].close()

    def evict(self, need):
        want = np.array([need] if isinstance(need, int) else need)
        R = len(want)
        could = self.tree.evictable_by_class(R)
        locked = {p for n in self.tree.nodes() if n.locks for p in n.pages[0].tolist()}
        out = self.tree.evict(need)
        got = np.bincount(out % R, minlength=R)
        assert (got >= np.minimum(want, could)).all() and not set(out.tolist()) & locked
        if isinstance(need, int): assert len(out) == min(need, could[0])
        if not (np.minimum(want, could) > 0).any(): assert not len(out)
        self.alloc.free(out, TREE)
        gone = set(out.tolist())
        self.known = {k: p for k, p in self.known.items() if p not in gone}

    def check(self):
        self.alloc.check()
        self.tree.check()
        held = {h: set(np.flatnonzero(self.alloc._holder == h).tolist()) for h in Holder}
        own = [p for r in self.live for p in r["own"]]
        assert held[TREE] == set(self.tree.pages().tolist()) == set(self.known.values())
        assert len(own) == len(set(own)) and held[REQUEST] == set(own)
        for r in self.live:
            assert all(p in held[TREE] or p in r["own"] for p in r["pages"])
            round_ = (r["base"] + np.arange(len(r["pages"]))) % self.R
            assert [p % self.R for p in r["pages"]] == round_.tolist()
        locked = sum(len(n.pages[0]) for n in self.tree.nodes() if n.locks)
        leased = {p for r in self.live for p in r["pages"]} & held[TREE]
        assert locked == self.tree.num_locked and len(leased) <= locked
        assert self.tree.num_evictable + locked == len(held[TREE])
        assert self.tree.num_evictable == sum(self.tree.evictable_by_class(self.R))

    def drain(self):
        for r in [*self.live]: self.end(r)
        self.evict(self.alloc.num_pages)
        self.check()
        assert sum(self.alloc.free_by_class) == self.alloc.num_pages - self.R
        assert self.tree.num_pages == 0 and not list(self.tree.nodes())


class CacheMachine(RuleBasedStateMachine):
    @initialize(R=st.integers(1, 3), local=st.integers(2, 8), P=st.sampled_from([1, 2]),
                pairs=st.booleans())
    def begin(self, R, local, P, pairs): self.c = Cache(R, local, P, pairs)

    def pick(self, i): return self.c.live[i % len(self.c.live)]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), base=st.integers(0, 2))
    def start(self, tokens, base): self.c.start(tokens, base)

    @rule(i=st.integers(0, 9), pages=st.integers(0, 4))
    def step(self, i, pages):
        if self.c.live: self.c.step(self.pick(i), pages)

    @rule(i=st.integers(0, 9))
    def end(self, i):
        if self.c.live: self.c.end(self.pick(i))

    @rule(n=st.integers(0, 6))
    def evict(self, n): self.c.evict(n)

    @rule(need=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def evict_by_class(self, need): self.c.evict(need[:self.c.R])

    @invariant()
    def laws(self):
        if hasattr(self, "c"): self.c.check()

    def teardown(self):
        if hasattr(self, "c"): self.c.drain()

TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=max(60, settings.default.max_examples),
                              stateful_step_count=40)


@pytest.mark.parametrize("P,R,pairs,seed", [(1, 2, False, 1), (4, 3, True, 2), (32, 4, False, 3)])
def test_counters_are_the_tree_s_after_each_of_many_steps(P, R, pairs, seed):
    c, rng = Cache(R, 9, P, pairs), np.random.default_rng(seed)
    docs = [rng.integers(0, 3, 12 * P).tolist() for _ in range(4)]
    for _ in range(3_400):
        what = rng.integers(0, 8)
        if what < 2 and len(c.live) < 6:
            cut = int(rng.integers(0, 12 * P))
            more = rng.integers(0, 2, rng.integers(0, 3 * P)).tolist()
            c.start([*docs[rng.integers(4)][:cut], *more], int(rng.integers(R)))
        elif what < 5 and c.live: c.step(c.live[rng.integers(len(c.live))], int(rng.integers(0, 5)))
        elif what == 5 and c.live: c.end(c.live[rng.integers(len(c.live))])
        elif what == 6: c.evict(int(rng.integers(0, 5)))
        else: c.evict(rng.integers(0, 3, R).tolist())
        c.check()
    assert c.tree.next_id > 100
    c.drain()


def test_a_published_chunk_survives_the_abort_of_its_request():
    c = Cache(R=2, local=9, P=4)
    prompt = list(range(24))
    c.start(prompt, 0)
    [r] = c.live
    for _ in range(2): c.step(r, 2)  # 16 tokens are published
    published = r["pages"][:4]
    with pytest.raises(ConservationError): c.alloc.free(r["pages"])  # the abort that frees all
    c.check()
    c.end(r)
    c.check()
    assert c.tree.pages().tolist() == published and sum(c.alloc.count(TREE)) == 4
    while True:  # fill the pool with another request's pages
        try: c.alloc.take([[int(np.argmax(c.alloc.free_by_class))]])
        except CapacityError: break
    m = c.tree.match(c.tree.reusable(prompt))
    assert m.num_tokens == 16 and m.pages.tolist() == published
    assert all(c.alloc.holder_of(p) is TREE for p in published)

def test_two_requests_of_one_prefix_with_different_bases():
    c = Cache(R=2, local=9, P=1)
    c.start([1, 2, 3, 4], 0)
    c.start([1, 2, 3, 5], 1)
    a, b = c.live
    for _ in range(2):
        for r in (a, b): c.step(r, 2)
        c.check()
    assert b["own"] == b["pages"] and c.tree.pages().tolist() == a["pages"]
    c.drain()

def test_eviction_until_the_empty_class_has_supply_and_no_further():
    c = Cache(R=2, local=3, P=1)  # two pages a class
    c.start([1, 2], 0)
    c.step(c.live[0], 2)
    c.end(c.live[0])
    hog = c.alloc.take([[1]])[0]  # class 1 is empty now, class 0 has one
    with pytest.raises(CapacityError): c.alloc.take([[0, 1]])
    c.evict([0, 1])
    mine = c.alloc.take([[0, 1]])[0]
    with pytest.raises(CapacityError): c.alloc.take([[1]])
    c.evict([0, 1])
    with pytest.raises(CapacityError): c.alloc.take([[1]])  # dry: no class 1 in the tree
    c.alloc.free(np.concatenate([hog, mine]))
    c.drain()


# ── the same on every rank ──────────────────────────────────────────────────────────────────────

def traffic(seed=5, steps=200):
    c, rng = Cache(2, 9, 2), np.random.default_rng(seed)
    for _ in range(steps):
        what = rng.integers(0, 5)
        if what < 2:
            text = rng.integers(0, 2, rng.integers(0, 14)).tolist()
            c.start(text, pick_base(c.alloc.free_by_class))
        elif what == 2 and c.live: c.step(c.live[rng.integers(len(c.live))], 2)
        elif what == 3 and c.live: c.end(c.live[rng.integers(len(c.live))])
        else: c.evict([1, 1])
    key = c.tree.key(range(40))
    return f"{c.tree.digest()} {page_hashes(c.tree, key)[-1].hex()} {c.alloc._free.tolist()}"

def test_equal_calls_make_equal_trees_in_every_process():
    code = "import sys; sys.path[:0] = ['tests']; import test_radix as t; print(t.traffic())"
    root = Path(__file__).parents[1]
    env = os.environ | dict(PYTHONHASHSEED="77", PYTHONPATH=str(root))  # here it is another one
    there = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True,
                           env=env, timeout=120)
    assert there.stdout.strip() == traffic() != traffic(6), there.stderr

def test_the_digest_sees_each_difference():
    def tree():
        t = grow(1)
        put(t, [1, 2, 3], [11, 12, 13], base=1)
        return t
    def leased(t): next(t.nodes()).locks += 1
    def hit(t): next(t.nodes()).hits += 1
    def used(t): next(t.nodes()).used += 1
    def based(t): next(t.nodes()).base = 0
    def pending(t): next(t.nodes()).residency[Tier.DEVICE] = Residency.PENDING
    def by(t): next(t.nodes()).ops[Tier.HOST] = 3
    def first(t): next(t.nodes()).born += 1
    def valued(t): next(t.nodes()).priority += 1
    def hosted(t): t.insert(t.key([1]), [7], 1, tier=Tier.HOST)
    def clock(t): t.clock += 1
    def cut(t): t.evict(1)
    def split(t): t.split(next(t.nodes()), 1)
    seen = {tree().digest()}
    for change in (leased, hit, used, based, pending, by, first, valued, hosted, clock, cut, split):
        t = tree()
        change(t)
        seen.add(t.digest())
    assert len(seen) == 13 and tree().digest() in seen

def test_the_step_digest_sees_each_call():
    def tree(tokens=(1, 2, 3), pages=(11, 12, 13), base=1, P=1, **kw):
        t = grow(P, **kw)
        t.insert(t.key([*tokens]), pages, base)
        return t
    def lease(t, n):
        with t.lease(t.match(t.key([1, 2, 3][:n]))): pass
    def begin(t): return (o := Operations(t)), o.begin(Tier.HOST, [*t.nodes()], [1, 2, 3])
    calls = [lambda t: t.evict(1), lambda t: t.evict(2), lambda t: lease(t, 1), lambda t: lease(t, 2),
             lambda t: t.drop(next(t.nodes()), Tier.DEVICE), lambda t: begin(t),
             lambda t: t.insert(t.key([1]), [7], 1, tier=Tier.HOST), lambda t: t.insert(t.key([1]), [7], 1),
             lambda t: (lambda o, op: o.publish(op))(*begin(t)),
             lambda t: (lambda o, op: o.end(op, 2))(*begin(t)),
             lambda t: (lambda o, op: o.abort(op))(*begin(t))]
    seen = [tree().step_digest, tree(tokens=(1, 2, 4)).step_digest, tree(pages=(11, 12, 14)).step_digest,
            tree(tokens=(1, 2), pages=(11, 12)).step_digest, tree(pairs=True, tokens=(1, 2, 3, 4)).step_digest]
    for call in calls:
        t = tree()
        call(t)
        seen.append(t.step_digest)
    assert len(set(seen)) == len(seen) == 16 and tree().step_digest == seen[0]
    assert all(type(x) is int and 0 <= x < 2**61 for x in seen)
    a, b = tree(), tree()
    with a.lease(a.match(a.key([1, 2, 3]))):
        lease(b, 3)
        assert a.step_digest != b.step_digest
    assert a.step_digest == b.step_digest
    a.evict(1)
    for t in (a, b): t.evict(3)
    assert a.pages().tolist() == b.pages().tolist() == [] and a.step_digest != b.step_digest

def test_each_token_is_in_the_step_digest():
    text = np.arange(1, 22, dtype=np.int32)
    seen = set()
    for i in range(-1, 21):
        t, other = grow(3), text.copy()
        if i >= 0: other[i] += 100
        t.insert(t.key(other), range(1, 8), 0)
        seen.add(t.step_digest)
    assert len(seen) == 22

def hosted(t, n):
    "A host copy that stands on none"
    t.hold(Tier.HOST, np.array([5], np.int32))
    t.set_copy(n, Tier.HOST, Residency.READY, np.array([5], np.int32), NO_OP)

@pytest.mark.parametrize("fault,err", [
    (lambda t, n: t.held[0].discard(11), ConservationError),
    (lambda t, n: t.held[0].add(99), ConservationError),
    (lambda t, n: setattr(n, "locks", 1), LeaseError),
    (lambda t, n: setattr(t, "num_locked", 1), LeaseError),
    (lambda t, n: setattr(n, "key", b""), ConservationError),
    (lambda t, n: setattr(n, "hashes", [b""] * 2), ConservationError),
    (lambda t, n: t.num_ready.__setitem__(0, 2), ConservationError),
    (lambda t, n: n.residency.__setitem__(1, Residency.READY), ConservationError),
    (lambda t, n: n.residency.__setitem__(0, Residency.ABSENT), ConservationError),
    (lambda t, n: n.ops.__setitem__(0, 5), ResidencyError),
    (lambda t, n: t.set_copy(n, Tier.DEVICE, Residency.PENDING, n.pages[0], 5), ConservationError),
    (lambda t, n: hosted(t, n), ResidencyError),
    (lambda t, n: setattr(n, "base", 7), OwnershipError)])
def test_the_recount_finds_each_fault(fault, err):
    t = grow(1)
    put(t, [1, 2], [11, 12])
    put(t, [1, 2, 3], [11, 12, 13])
    fault(t, [*t.nodes()][-1])
    with pytest.raises(err): t.check()


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=8),
       st.sampled_from([1, 2, 3]))
def test_match_is_the_longest_prefix_that_a_plain_dict_knows(texts, P):
    t, known, fresh = grow(P), {}, iter(range(1, 1000))
    for text in texts:
        n = len(text) // P
        pages = [next(fresh) for _ in range(n)]
        done = put(t, text, pages)
        for i in range(n): known.setdefault(tuple(text[:(i + 1) * P]), pages[i])
        assert done.taken.tolist() == pages[done.already:]
        for other in texts:
            want = []
            while (n := (len(want) + 1) * P) <= len(other) and tuple(other[:n]) in known:
                want.append(known[tuple(other[:n])])
            assert t.match(t.key(other)).pages.tolist() == want


# ── pictures and depth ──────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("end", range(7))
@pytest.mark.parametrize("device", range(5))
def test_the_rest_of_a_match_is_what_lies_behind_its_device_part(end, device):
    t = RadixTree(1, namespace="test")
    t.insert(t.key([1, 2, 3, 4]), [11, 12, 13, 14], 0, Tier.HOST)
    if device: t.insert(t.key([1, 2, 3, 4][:device]), [21, 22, 23, 24][:device], 0)
    with t.lease(t.match(t.key([1, 2, 3, 4, 5, 6][:end]))) as m:
        rest = t.rest(m)
        assert [p for n in rest for p in n.pages[Tier.HOST].tolist()] == [11, 12, 13, 14][device:end]
        t.insert(t.key([1, 2, 3, 4]), [*m.pages, 31, 32, 33, 34][:4], 0)
        assert t.rest(m) == rest  # as they are now: the device has them
    t.check()

def test_a_long_chain_of_nodes_is_no_trouble():
    t, text = grow(1), np.arange(1500)
    for n in range(1, 1501): t.insert(t.key(text[:n]), np.arange(1, n + 1), 0)
    last = [*t.nodes()][-1]
    assert t.hashes(last) == page_hashes(t, t.key(text))[-1:]
    assert len(list(t.nodes())) == 1500 and t.match(t.key(text)).num_tokens == 1500
    t.check()
    assert "32 of 1500 nodes" in t._repr_html_() and len(t.digest()) == 64
    with t.lease(t.match(t.key(text))): assert t.num_locked == 1500
    ops = Operations(t)
    ops.publish(ops.begin(Tier.HOST, [*t.nodes()], np.arange(1, 1501)))
    ops.check()
    assert t.evict(5000).tolist() == t.evict(5000, Tier.HOST).tolist() == list(range(1500, 0, -1))

def test_it_draws_itself():
    t = grow(1)
    assert "0 pages" in t._repr_html_()
    put(t, range(20), range(1, 21), base=1)
    with t.lease(t.match(t.key([0, 1]))): html = t._repr_html_()
    assert "device ready: 1 2 | base 1 | locks 1 | hits 1" in html
    assert "device ready: 3 4 5 6 .. 18 19 20 | base 1 | locks 0" in html
    Operations(t).begin(Tier.HOST, [next(t.nodes())], [7, 8])
    html = t.draw(cp_size=4)._repr_html_()
    assert "device ready: 1 2 | host pending by 0: 7 8 | base 1 | locks 1 | hits 1 | owners 1 2" in html
    assert "20 pages, 2 locked, 2 pending" in html
