"""Copies between tiers: a naive dictionary says what the tree must say after every call, and no
failure leaves a trace"""
import json
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpkv.alloc import Holder, PageAllocator
from cpkv.laws import (ConservationError, InputError, LeaseError, OrderError, PageIdError, ResidencyError)
from cpkv.layout import PageLayout
from cpkv.radix import NO_BASE, NO_OP, Declined, RadixTree, Residency, Tier
from cpkv.residency import Ended, Operations, bench_radix, match_128k_us, trace_prompts

ABSENT, PENDING, READY = Residency
DEVICE, HOST = Tier


def grow(texts=((1, 2, 3, 4),), host=True, P=1):
    "A tree of chains that are on both tiers, its operations; page numbers follow the tokens"
    t = RadixTree(P, namespace="test")
    fresh = [iter(range(10, 1000)), iter(range(510, 1000))]
    for text in texts:
        for tier in (DEVICE, HOST)[:1 + host]:
            m = t.match(t.key(text))
            old = m.pages.tolist() if tier is DEVICE else [
                p for n in t._walk(t.key(text))[0] for p in n.pages[HOST].tolist()]
            new = [next(fresh[tier]) for _ in range(t.key(text).num_pages - len(old))]
            t.insert(t.key(text), old + new, 0, tier)
    return t, Operations(t)

def found(t, text):
    m = t.match(t.key(text))
    return m.pages.tolist(), m.host_pages.tolist(), m.join


# ── one copy's life ─────────────────────────────────────────────────────────────────────────────

def test_a_host_copy_is_matched_after_its_ack_and_not_before():
    t, ops = grow(host=False)
    op = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    assert found(t, [1, 2, 3, 4]) == ([10, 11, 12, 13], [], NO_OP)
    assert t.evict(9).size == 0 and t.num_locked == 4  # the source stays while it is read
    assert t.pages(HOST).size == 0 and (t.num_ready, t.num_pending) == ([4, 0], [0, 4])
    ops.publish(op)
    assert t.evict(9).tolist() == [13, 12, 11, 10]
    assert found(t, [1, 2, 3, 4]) == ([], [21, 22, 23, 24], NO_OP)
    ops.check()

@pytest.mark.parametrize("at", [1, 2, 3])
def test_both_parts_of_a_split_are_published_by_the_ack(at):
    t, ops = grow(host=False)
    op = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    with t.lease(t.match(t.key([1, 2, 3, 4][:at]))): ops.check()
    assert len(ops.parts(op)) == 2 and ops.num_pages(op) == 4
    assert t.evict(9, HOST).size == t.evict(9).size == 0  # no half of it lost its lock
    ops.check()
    assert ops.publish(op).taken.tolist() == [21, 22, 23, 24]
    t.evict(9)
    assert found(t, [1, 2, 3, 4]) == ([], [21, 22, 23, 24], NO_OP)
    assert [n.locks for n in t.nodes()] == [0] * len([*t.nodes()])
    ops.check()

def test_a_second_request_joins_and_keeps_what_arrived():
    t, ops = grow([range(160)])
    t.evict(160)
    [node] = t.nodes()
    with t.lease(t.match(t.key(range(160)))) as m:
        op = ops.begin(DEVICE, m.host_path, range(1001, 1161))
        assert found(t, [*range(160), 7]) == ([], [], op)
        assert t.match(t.key(range(90))).join == op  # a part of it is joined by the same id
        ended = ops.end(op, 87)
        assert (len(ended.taken), ended.back.tolist()) == (87, [*range(1088, 1161)])
        for text in (range(160), range(90)):
            m = t.match(t.key(text))
            assert (m.num_tokens, m.num_host_tokens, m.join) == (87, len(text) - 87, NO_OP)
        assert t.evict(200).size == 0
    ops.check()
    assert t.num_locked == 0 and len(t.evict(200)) == 87 and len(t.evict(200, HOST)) == 160

def test_a_lease_says_which_nodes_a_load_is_of():
    t, ops = grow([range(8)])
    t.evict(5)
    for end in range(9):
        m = t.match(t.key(range(end)))
        with t.lease(m) as leased:
            for tier, nodes, pages in ((DEVICE, leased.path, m.pages), (HOST, leased.host_path, m.host_pages)):
                assert [p for n in nodes for p in n.pages[tier].tolist()] == pages.tolist()
    with t.lease(t.match(t.key(range(6)))) as leased:
        ops.publish(ops.begin(DEVICE, leased.host_path, [101, 102, 103]))
    assert found(t, range(8)) == ([10, 11, 12, 101, 102, 103], [516, 517], NO_OP)
    ops.check()

def test_what_a_tier_lacks_is_what_a_copy_begins_with():
    t, ops = grow([(1,), (1, 2), (1, 2, 3), (1, 2, 4)], host=False)
    one, two, three, four = t.nodes()
    ops.publish(ops.begin(HOST, ops.lacking(HOST, one), [21]))
    assert ops.lacking(HOST, three) == [two, three] and ops.lacking(DEVICE, three) == []
    op = ops.begin(HOST, ops.lacking(HOST, three), [22, 23])
    with pytest.raises(ResidencyError): ops.begin(HOST, ops.lacking(HOST, four), [24])
    ops.publish(op)
    ops.publish(ops.begin(HOST, ops.lacking(HOST, four), [24]))
    ops.check()

def test_an_operation_of_several_chains_ends_in_the_order_in_which_it_began():
    t, ops = grow([(1, 2), (1, 2, 3), (1, 2, 4), (7, 8)], host=False)
    nodes = [*t.nodes()]
    op = ops.begin(HOST, nodes, [31, 32, 33, 34, 37, 38])
    assert ops.end(op, 3).back.tolist() == [34, 37, 38]
    t.evict(9)
    assert found(t, [1, 2, 3])[1] == [31, 32, 33] and found(t, [1, 2, 4])[1] == [31, 32]
    assert found(t, [7]) == ([], [], NO_OP)
    ops.check()

def test_an_empty_operation_is_one():
    t, ops = grow()
    op = ops.begin(HOST, [], [])
    assert ops.num_pages(op) == 0 and [len(x) for x in ops.publish(op)] == [0, 0]
    ops.check()

def test_late_results_change_nothing_and_unknown_ones_are_refused():
    t, ops = grow(host=False)
    first = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    ops.abort(first)
    second = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])  # the same pages, again on their way
    before = t.digest(), t.step_digest
    for late in (ops.publish(first), ops.abort(first), ops.end(first, 3)):
        assert [len(x) for x in late] == [0, 0]
    assert (t.digest(), t.step_digest) == before and t.num_pending == [0, 4]
    for bad in (second + 1, -1):
        with pytest.raises(OrderError): ops.publish(bad)
    for bad in (-1, 5):
        with pytest.raises(ConservationError): ops.end(second, bad)
    assert (t.digest(), t.step_digest) == before
    ops.publish(second)
    ops.check()

def test_after_a_flush_a_late_ack_revives_nothing():
    t, ops = grow(host=False)
    op = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    for live in [*ops.live]: ops.abort(live)
    for tier in Tier: t.evict(99, tier)
    assert [*t.nodes()] == [] and isinstance(ops.publish(op), Ended)
    assert found(t, [1, 2, 3, 4]) == ([], [], NO_OP) and t.held == [set(), set()]
    ops.check()

def refusals(t, ops, gone):
    upper, lower = t.nodes()
    return [
        (lambda: ops.begin(HOST, [lower], [33, 34]), ResidencyError),           # stands on none
        (lambda: ops.begin(HOST, [lower, upper], [33, 34, 31, 32]), ResidencyError),
        (lambda: ops.begin(DEVICE, [upper], [31, 32]), ResidencyError),         # is there
        (lambda: ops.begin(HOST, [upper, upper], [31, 32, 33, 34]), ResidencyError),
        (lambda: ops.begin(HOST, [gone], [31]), ResidencyError),                # was evicted
        (lambda: ops.begin(HOST, [upper], [31]), ConservationError),
        (lambda: ops.begin(HOST, [upper], [31, 32, 33]), ConservationError),
        (lambda: ops.begin(HOST, [], [31]), ConservationError),
        (lambda: ops.begin(HOST, [upper], [31, 31]), ConservationError),
        (lambda: ops.begin(HOST, [upper, lower], [31, 32, 33, 0]), PageIdError),
        (lambda: t.drop(upper, DEVICE), ResidencyError), (lambda: t.drop(upper, HOST), ResidencyError)]

@pytest.mark.parametrize("i", range(12))
def test_a_refusal_leaves_no_trace(i):
    t, ops = grow([(9,), (1, 2), (1, 2, 3, 4)], host=False)
    gone = next(t.nodes())
    t.drop(gone, DEVICE)
    before = t.digest(), t.step_digest, ops.next_op, [*t.num_ready], [*t.num_pending]
    call, error = refusals(t, ops, gone)[i]
    with pytest.raises(error): call()
    assert (t.digest(), t.step_digest, ops.next_op, t.num_ready, t.num_pending) == before
    ops.check()

def test_what_is_on_its_way_is_refused_to_others():
    t, ops = grow([(1, 2), (1, 2, 3, 4)], host=False)
    upper, lower = t.nodes()
    op = ops.begin(HOST, [upper], [31, 32])
    before = t.digest()
    for call, error in ((lambda: ops.begin(HOST, [upper], [41, 42]), ResidencyError),
                        (lambda: ops.begin(HOST, [lower], [43, 44]), ResidencyError),  # under another's
                        (lambda: ops.begin(DEVICE, [upper], [43, 44]), ResidencyError),
                        (lambda: t.drop(upper, HOST), ResidencyError)):
        with pytest.raises(error): call()
        assert t.digest() == before
    ops.publish(op)
    assert ops.publish(ops.begin(HOST, [lower], [43, 44])).taken.tolist() == [43, 44]

@pytest.mark.parametrize("fault,error", [
    (lambda t, ops, n: ops.live.clear(), ResidencyError),
    (lambda t, ops, n: n.ops.__setitem__(1, 7), ResidencyError),
    (lambda t, ops, n: t.lock(n, -1), LeaseError)])
def test_the_recount_finds_each_fault(fault, error):
    t, ops = grow(host=False)
    ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    ops.check()
    fault(t, ops, next(t.nodes()))
    with pytest.raises(error): ops.check()

def test_it_draws_itself():
    t, ops = grow(host=False)
    ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    assert repr(ops.draw()).split("\n")[1].split() == ["0", "host", "1", "4"]
    assert "1 live, 1 begun" in ops._repr_html_()


# ── what public reports gave in ─────────────────────────────────────────────────────────────────

def test_a_host_leaf_is_one_that_no_host_copy_stands_on():
    t, ops = grow([(1,), (1, 2), (1, 2, 3)])
    x, y, z = t.nodes()
    t.evict(9)
    assert t.evict(1, HOST).size == 1  # z is gone from both
    m = t.match(t.key([1, 2, 3]))
    with t.lease(m): ops.publish(ops.begin(DEVICE, m.host_path, [101, 102]))
    t.insert(t.key([1, 2, 3]), [101, 102, 103], 0)  # z is computed again, and written
    z = [*t.nodes()][-1]
    ops.publish(ops.begin(HOST, [z], [603]))
    with pytest.raises(ResidencyError, match="others stand on"): t.drop(y, HOST)
    assert t.evict(2).tolist() == [103, 102]        # y's child is off the device,
    with pytest.raises(ResidencyError, match="others stand on"): t.drop(y, HOST)  # not off the host
    assert [len(p) for p in (t.evict(1, HOST), t.evict(1, HOST))] == [1, 1]
    assert found(t, [1, 2, 3])[0] == [101]
    ops.check()

def test_a_late_prefetch_never_stands_on_a_parent_that_the_host_lacks():
    P, text = 4, list(range(16))
    t = RadixTree(P, namespace="prefetch")
    ops = Operations(t)
    for tier in Tier: t.insert(t.key(text[:8]), [2, 3], 0, tier)
    on_its_way = [2, 3, 14, 15]  # host pages of all 16 tokens; the last two come from a store
    t.insert(t.key(text[:12]), [2, 3, 4], 0)  # meanwhile somebody computes tokens 8 to 11
    done = t.insert(t.key(text), on_its_way, 0, HOST)
    assert done.taken.tolist() == [14, 15] and done.already == 2
    ops.check()
    assert found(t, text) == ([2, 3, 4], [15], NO_OP)
    assert t.evict(9).tolist() == [4, 3, 2] and found(t, text) == ([], on_its_way, NO_OP)
    ops.check()
    assert t.evict(9, HOST).tolist() == [15, 14, 3, 2] and not [*t.nodes()]

def test_a_split_during_a_write_keeps_the_lock_of_the_head():
    t, ops = grow(host=False)
    op = ops.begin(HOST, [*t.nodes()], [21, 22, 23, 24])
    t.insert(t.key([1, 2, 9]), [10, 11, 99], 0)  # splits at page 2
    assert [n.locks for n in t.nodes()] == [1, 1, 0]
    assert t.evict(9).tolist() == [99] and t.evict(9, HOST).size == 0
    ended = ops.publish(op)
    assert ended.taken.tolist() == [21, 22, 23, 24] and [n.locks for n in t.nodes()] == [0, 0]
    t.evict(9)
    assert found(t, [1, 2, 3, 4])[1] == [21, 22, 23, 24]

def test_a_host_smaller_than_the_device_never_comes_to_a_dead_end():
    t, host = RadixTree(1, namespace="small"), PageAllocator(PageLayout(cp_size=1, page_size=1), 5)
    ops, hits = Operations(t), 0
    for i in range(10):
        text = [100 * (i % 4), 1, 2]
        hits += len(t.match(t.key(text)).pages)
        t.insert(t.key(text), np.arange(3) + 3 * i + 1, 0)
        nodes = [n for n in t._walk(t.key(text))[0] if n.residency[HOST] is ABSENT]
        need = sum(len(n.pages[0]) for n in nodes)
        short = need - sum(host.free_by_class)
        if short > 0: host.free(t.evict(short, HOST), Holder.TREE)
        [pages] = host.take([[0] * need])
        ended = ops.publish(ops.begin(HOST, nodes, pages))
        host.move(ended.taken, Holder.REQUEST, Holder.TREE)
        host.check()
        ops.check()
    assert hits == 18 and sum(host.count(Holder.TREE)) == t.num_ready[HOST] == 4

def test_page_by_page_leaves_no_crumbs_in_either_tier():
    for tier in Tier:
        t, ops = grow([range(64)])
        for k in range(1, 64):
            assert t.evict(1, tier).size == 1
            assert [len(n.key) // 4 for n in t.nodes()] == [64 - k, k]
        assert t.evict(9, tier).size == 1 and len([*t.nodes()]) == 1
        ops.check()


# ── a failure after each step of a move ─────────────────────────────────────────────────────────

class Boom(Exception): pass

class Tiers:
    "Two allocators and a tree, and moves that fail after a number of steps"
    def __init__(self, fail_after):
        layout = PageLayout(cp_size=2, page_size=1)
        self.alloc = [PageAllocator(layout, 9), PageAllocator(layout, 9)]
        self.tree = RadixTree(1, namespace="tiers")
        self.ops, self.left, self.text = Operations(self.tree), fail_after, list(range(6))
        [pages] = self.alloc[DEVICE].take([[0, 1, 0, 1, 0, 1]])
        self.tree.insert(self.tree.key(self.text), pages, 0)
        self.alloc[DEVICE].move(pages, Holder.REQUEST, Holder.TREE)

    def step(self):
        if self.left == 0: raise Boom
        self.left -= 1

    def copy(self, tier, arrived):
        "Lease, take pages, begin, move bytes, end"
        alloc = self.alloc[tier]
        with self.tree.lease(self.tree.match(self.tree.key(self.text))) as m:
            nodes = m.host_path if tier is DEVICE else m.path
            self.step()
            [pages] = alloc.take([[i % 2 for i in range(len(m.host_pages) + len(m.pages))]])
            try:
                self.step()
                op = self.ops.begin(tier, nodes, pages)
            except BaseException:
                alloc.free(pages)
                raise
        alloc.move(pages, Holder.REQUEST, Holder.TRANSFER)
        done = 0
        try:
            self.step()
            self.meanwhile()
            self.step()
            done = arrived
        finally:
            ended = self.ops.end(op, done)
            alloc.move(ended.taken, Holder.TRANSFER, Holder.TREE)
            alloc.free(ended.back, Holder.TRANSFER)

    def meanwhile(self):
        "Others lease a part, and want room"
        with self.tree.lease(self.tree.match(self.tree.key(self.text[:2]))): self.room()

    def room(self):
        for tier in Tier: self.alloc[tier].free(self.tree.evict(99, tier), Holder.TREE)

    def check(self):
        self.ops.check()
        assert self.ops.live == {} and not any(n.locks for n in self.tree.nodes())
        for tier in Tier:
            self.alloc[tier].check()
            held = {h: sum(self.alloc[tier].count(h)) for h in Holder}
            assert held[Holder.REQUEST] == held[Holder.TRANSFER] == self.tree.num_pending[tier] == 0
            assert held[Holder.TREE] == self.tree.num_ready[tier] == len(self.tree.pages(tier))

@pytest.mark.parametrize("arrived", [0, 1, 5, 6])
@pytest.mark.parametrize("fail_after", range(9))
def test_a_move_that_fails_after_any_step_leaves_all_as_it_was_or_is_done(fail_after, arrived):
    w = Tiers(fail_after)
    known = 6
    for tier in (HOST, DEVICE):
        try:
            w.copy(tier, arrived if tier is HOST else known)
            if tier is HOST: known = arrived
        except Boom: known = 6 if tier is HOST else known
        w.check()
        m = w.tree.match(w.tree.key(w.text))
        if tier is HOST:  # the device gives up what the host has; what it has not is lost
            assert (len(m.pages), m.join) == (6, NO_OP)
            kept = w.tree.num_ready[HOST]
            assert kept == (arrived if fail_after > 3 else 0)
            w.alloc[DEVICE].free(w.tree.evict(99), Holder.TREE)
            known = kept
            assert len(w.tree.match(w.tree.key(w.text)).host_pages) == kept
        else:
            assert len(m.pages) == (known if fail_after > 7 else 0)
            assert len(m.pages) + len(m.host_pages) == known and m.join == NO_OP
    w.room()
    w.check()
    for alloc in w.alloc: assert sum(alloc.free_by_class) == 16


# ── against a dictionary ────────────────────────────────────────────────────────────────────────

class Naive:
    "What a tree must be, page by page: a prefix is a tuple, and each tier says what it has of it"
    def __init__(self):
        self.have = [{}, {}]  # by tier: prefix -> (residency, page, operation)
        self.base, self.leases, self.ops = {}, [], {}  # op -> (tier, prefixes, ends of its nodes)

    def state(self, tier, prefix): return self.have[tier].get(prefix, (ABSENT, 0, NO_OP))

    def prefixes(self, text): return [text[:i] for i in range(1, len(text) + 1)]

    def known(self, text):
        return [p for p in self.prefixes(text) if any(p in have for have in self.have)]

    def locks(self, prefix):
        ends = [*self.leases, *(e for _, _, ends in self.ops.values() for e in ends)]
        return sum(e[:len(prefix)] == prefix for e in ends)

    def match(self, text):
        known = self.known(text)
        device = [p for p in known if self.state(DEVICE, p)[0] is READY]
        rest, host = known[len(device):], []
        for p in rest:
            if (self.state(DEVICE, p)[0], self.state(HOST, p)[0]) != (ABSENT, READY): break
            host.append(p)
        beyond = rest[len(host):][:1]
        join = max([self.state(t, p)[2] for p in beyond for t in Tier], default=NO_OP)
        base = self.base[text[:1]] if known else NO_BASE
        return ([self.state(DEVICE, p)[1] for p in device], [self.state(HOST, p)[1] for p in host],
                join, base)

    def free(self, tier, prefix):
        "May this page go once nothing stands on it?"
        states = [self.state(t, prefix)[0] for t in Tier]
        nearest = states.index(READY)
        return states[tier] is READY and PENDING not in states and not (
            self.locks(prefix) and nearest == tier)

    def evictable(self, tier):
        have = self.have[tier]
        return [p for p in have if all(self.free(tier, q) for q in have if q[:len(p)] == p)]

    def drop(self, tier, prefix):
        del self.have[tier][prefix]
        if len(prefix) == 1 and not any(prefix in h for h in self.have): del self.base[prefix]


class TierMachine(RuleBasedStateMachine):
    texts = st.lists(st.integers(0, 1), max_size=5).map(tuple)

    @initialize(P=st.sampled_from([1, 4, 32]), pairs=st.booleans(),
                policy=st.sampled_from(["lru", "lfu", "fifo", "priority"]))
    def begin_tree(self, P, pairs, policy):
        self.P, self.pairs = P, pairs
        self.t = RadixTree(P, namespace="machine", pairs=pairs, policy=policy)
        self.ops, self.m, self.stack = Operations(self.t), Naive(), []
        self.fresh = iter(range(1, 10_000))

    def key(self, text, short=0):
        "A page of equal tokens for each symbol; in pair mode a symbol is followed by itself"
        pairs = [np.full(2 * self.P, s) for s in text]
        if not self.pairs: return self.t.key([x for p in pairs for x in p[:self.P]])
        data = b"".join(p.astype("<i4").tobytes() for p in pairs)
        return self.t.key([])._replace(data=data, num_pages=len(text))

    @rule(text=texts, base=st.integers(0, 2), tier=st.sampled_from(Tier), own=st.booleans(),
          priority=st.integers(0, 3))
    def insert(self, text, base, tier, own, priority):
        m, have = self.m, self.m.have[tier]
        known = m.known(text)
        base = m.base[text[:1]] if known and base else base
        ready = [p for p in known if m.state(tier, p)[0] is READY]
        pages = [have[p][1] if own and p in ready else next(self.fresh) for p in m.prefixes(text)]
        before = self.t.digest()
        done = self.t.insert(self.key(text), pages, base, tier, priority)
        if known and m.base[text[:1]] != base: want = Declined.BASE
        elif any(m.state(tier, p)[0] is PENDING for p in known): want = Declined.PENDING
        else: want = Declined.NO
        assert done.declined is want
        if want is not Declined.NO:
            assert self.t.digest() == before and not done.taken.size + done.duplicates.size
            return
        assert done.already == len(ready) and done.taken.tolist() == pages[len(ready):]
        assert done.duplicates.tolist() == [x for x, p in zip(pages, ready) if have[p][1] != x]
        if text: m.base[text[:1]] = base
        for p, page in list(zip(m.prefixes(text), pages))[len(ready):]: have[p] = READY, page, NO_OP

    @rule(text=texts)
    def match(self, text):
        before = self.t.digest(), self.t.step_digest
        m = self.t.match(self.key(text))
        assert (self.t.digest(), self.t.step_digest) == before
        assert (m.pages.tolist(), m.host_pages.tolist(), m.join, m.base) == self.m.match(text)
        assert (m.num_tokens, m.num_host_tokens) == (self.P * len(m.pages), self.P * len(m.host_pages))
        run = [p for n in m.path for p in n.pages[DEVICE].tolist()]
        below = [p for n in m.host_path for p in n.pages[HOST].tolist()]
        assert run[:len(m.pages)] == m.pages.tolist()
        assert below[:len(m.host_pages)] == m.host_pages.tolist()

    @rule(text=texts)
    def lease(self, text):
        m, stack = self.t.match(self.key(text)), ExitStack()
        end = text[:len(m.pages) + len(m.host_pages)]
        leased = stack.enter_context(self.t.lease(m))
        for tier, nodes, pages in ((DEVICE, leased.path, m.pages),
                                   (HOST, leased.host_path, m.host_pages)):
            assert [p for n in nodes for p in n.pages[tier].tolist()] == pages.tolist()
        self.stack.append((stack, end))
        self.m.leases.append(end)

    @rule(i=st.integers(0, 9))
    def unlease(self, i):
        if not self.stack: return
        stack, end = self.stack.pop(i % len(self.stack))
        stack.close()
        self.m.leases.remove(end)

    @rule(n=st.integers(0, 6), tier=st.sampled_from(Tier), by_class=st.booleans())
    def evict(self, n, tier, by_class):
        m = self.m
        could = {m.have[tier][p][1]: p for p in m.evictable(tier)}
        R = 1 + by_class
        classes = np.bincount([page % R for page in could], minlength=R)
        assert self.t.evictable_by_class(R, tier) == classes.tolist()
        out = self.t.evict([n] * R if by_class else n, tier).tolist()
        assert len(out) == len(set(out)) and set(out) <= set(could)
        got = np.bincount([page % R for page in out], minlength=R)
        assert (got >= np.minimum(n, classes)).all() and (by_class or len(out) == min(n, len(could)))
        for page in out: m.drop(tier, could[page])

    @rule(text=texts, tier=st.sampled_from(Tier), start=st.integers(0, 2), count=st.integers(0, 4))
    def begin(self, text, tier, start, count):
        path = self.t._walk(self.key(text))[0]
        nodes = path[start:start + count]
        ends = [text[:0] + self.text_of(n) for n in nodes]
        prefixes = [self.text_of(n)[:k] for n in nodes
                    for k in range(len(self.text_of(n)) - len(n.key) // self.t.width + 1,
                                   len(self.text_of(n)) + 1)]
        pages = [next(self.fresh) for _ in prefixes]
        legal = all(self.m.state(tier, p)[0] is ABSENT for p in prefixes)
        legal &= all(READY in [self.m.state(t, p)[0] for t in Tier] for p in prefixes)
        above = prefixes[0][:-1] if prefixes else ()
        legal &= not above or self.m.state(tier, above)[0] is READY
        before = self.t.digest()
        if not legal:
            with pytest.raises(ResidencyError): self.ops.begin(tier, nodes, pages)
            assert self.t.digest() == before
            return
        op = self.ops.begin(tier, nodes, pages)
        self.m.ops[op] = tier, prefixes, ends
        for p, page in zip(prefixes, pages): self.m.have[tier][p] = PENDING, page, op

    def text_of(self, node):
        "Symbols from the root to the end of a node"
        key = b"".join(n.key for n in reversed([*self.t.up(node)]))
        return tuple(np.frombuffer(key, "<i4")[::self.t.width // 4].tolist())

    @rule(i=st.integers(0, 9), arrived=st.integers(0, 5))
    def end(self, i, arrived):
        if not self.m.ops: return
        op = [*self.m.ops][i % len(self.m.ops)]
        tier, prefixes, _ = self.m.ops.pop(op)
        arrived = min(arrived, len(prefixes))
        pages = [self.m.have[tier][p][1] for p in prefixes]
        ended = {0: self.ops.abort, len(prefixes): self.ops.publish}.get(
            arrived, lambda op: self.ops.end(op, arrived))(op)
        assert (ended.taken.tolist(), ended.back.tolist()) == (pages[:arrived], pages[arrived:])
        for p, page in zip(prefixes[:arrived], pages): self.m.have[tier][p] = READY, page, NO_OP
        for p in prefixes[arrived:]: self.m.drop(tier, p)
        assert [len(x) for x in self.ops.publish(op)] == [0, 0]

    @rule(i=st.integers(0, 20), tier=st.sampled_from(Tier))
    def drop(self, i, tier):
        nodes = [*self.t.nodes()]
        if not nodes: return
        node = nodes[i % len(nodes)]
        text, n = self.text_of(node), len(node.key) // self.t.width
        mine = self.m.prefixes(text)[-n:]
        have, before = self.m.have[tier], self.t.digest()
        stands = any(q[:len(text)] == text and q != text for q in have)
        if not stands and all(p in have and self.m.free(tier, p) for p in mine):
            assert self.t.drop(node, tier).tolist() == [have[p][1] for p in mine]
            for p in mine: self.m.drop(tier, p)
        else:
            with pytest.raises((ResidencyError, LeaseError)): self.t.drop(node, tier)
            assert self.t.digest() == before

    @invariant()
    def the_tree_is_what_the_dictionary_says(self):
        if not hasattr(self, "t"): return
        self.ops.check()
        seen = [{}, {}]
        for node in self.t.nodes():
            text, n = self.text_of(node), len(node.key) // self.t.width
            for i, p in enumerate(self.m.prefixes(text)[-n:]):
                assert (node.locks, node.base) == (self.m.locks(p), self.m.base[text[:1]])
                for tier in Tier:
                    if node.residency[tier] is not ABSENT:
                        seen[tier][p] = (node.residency[tier], int(node.pages[tier][i]),
                                         node.ops[tier])
        assert seen == self.m.have
        for tier in Tier:
            for r, kept in ((READY, self.t.num_ready), (PENDING, self.t.num_pending)):
                assert kept[tier] == sum(x[0] is r for x in seen[tier].values())
        locked = [p for p, x in seen[DEVICE].items() if x[0] is READY and self.m.locks(p)]
        assert self.t.num_locked == len(locked)
        assert self.t.num_evictable == len(self.m.evictable(DEVICE))

    def teardown(self):
        if not hasattr(self, "t"): return
        for op in [*self.ops.live]: self.ops.abort(op)
        for stack, _ in self.stack: stack.close()
        for tier in Tier: self.t.evict(999, tier)
        self.ops.check()
        assert not [*self.t.nodes()] and self.t.held == [set(), set()]
        assert self.t.num_ready == self.t.num_pending == [0, 0] and self.t.num_locked == 0

TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=max(80, settings.default.max_examples),
                              stateful_step_count=40)


# ── the benchmark runs ──────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("page_size", [1, 64])
def test_the_benchmark_reads_a_trace_and_says_what_was_asked(tmp_path, page_size):
    path = tmp_path/"trace.jsonl"
    rows = [dict(timestamp=0, hash_ids=[0, i, i + 1], input_length=n)
            for i, n in enumerate((0, 1, 511, 512, 513, 1536), 1)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    prompts = [*trace_prompts(path, 99)]
    assert [len(p) for p in prompts] == [0, 1, 511, 512, 513, 1536] == [r["input_length"] for r in rows]
    assert prompts[4].tolist() == [*range(512), 5 * 512]
    assert [len(p) for p in trace_prompts(path, 2)] == [0, 1]
    out = bench_radix(path, page_size=page_size, repeats=1)
    assert [*out] == ["match_p50_us", "match_mtok_s", "insert_p50_us", "match_128k_us", "key_us"]
    assert all(x > 0 for x in out.values())

GOOD = '{"hash_ids": [0, 4194303], "input_length": 1024}'

@pytest.mark.parametrize("line,why", [
    ("", "Expecting value"), ("a text", "Expecting value"), ("[]", "no object"), ("7", "no object"), ("{}", "hash_ids"),
    ("[" * 100_000, None), ('{"hash_ids": [0]}', "input_length is None"), ('{"input_length": 1}', "hash_ids"),
    ('{"hash_ids": 3, "input_length": 1}', "hash_ids"), ('{"hash_ids": [0.5], "input_length": 1}', "hash_ids"),
    ('{"hash_ids": [true], "input_length": 1}', "hash_ids"), ('{"hash_ids": [-1], "input_length": 1}', "hash_ids"),
    ('{"hash_ids": [4194304], "input_length": 1}', "below 4194304"),
    ('{"hash_ids": [1], "input_length": 513}', "its blocks have 512 tokens"),
    ('{"hash_ids": [1], "input_length": -1}', "input_length is -1"), ('{"hash_ids": [1], "input_length": "1"}', "input_length"),
    ('{"hash_ids": [1], "input_length": NaN}', "input_length is nan")])
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path, line, why):
    path = tmp_path/"t.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(InputError, match="not a trace of requests") as e: bench_radix(path, repeats=1)
    assert e.value.facts["file"] == str(path) and e.value.facts["line"] == 2 and "hash_ids" in e.value.facts["expected"]
    assert why is None or why in e.value.facts["reason"]
    assert len([*trace_prompts(path, 1)]) == 1  # what is not asked for is not read

def test_files_that_are_no_trace(tmp_path):
    path = tmp_path/"t.jsonl"
    for bad in (path, tmp_path):
        with pytest.raises(InputError, match="cannot read the trace"): bench_radix(bad)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="no line"): bench_radix(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="cannot read the trace"): bench_radix(path)

def test_the_last_block_of_32_bits_is_one(tmp_path):
    (tmp_path/"t").write_text(GOOD)
    [tokens] = trace_prompts(tmp_path/"t", 9)
    assert tokens.dtype == np.int32 and tokens[-1] == 2**31 - 1 and len(tokens) == 1024

def test_the_long_match_is_of_as_many_nodes_as_it_says():
    assert match_128k_us(64, nodes=3, repeats=1) > 0
    with pytest.raises(ConservationError): match_128k_us(131_072, nodes=2, repeats=1)
