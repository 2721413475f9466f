"""One holder a page, a free list for each owner: recorded traces, a slow model, every refusal"""
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpkv.alloc import Holder, PageAllocator, cyclic_classes, cyclic_need, pick_base
from cpkv.laws import CapacityError, ConservationError, InputError, OwnershipError, PageIdError
from cpkv.layout import PageLayout

GOLDEN = json.loads((Path(__file__).parent / "data/upstream_golden.json").read_text())


def make(R=2, local=6, P=64): return PageAllocator(PageLayout(cp_size=R, page_size=P), local)
def state(a): return deepcopy((a._holder.tolist(), a._free.tolist(), a._top.tolist()))


@pytest.mark.parametrize("trace", GOLDEN["page_interleave_alloc"],
                         ids=lambda t: f"N{t['N']}-{len(t['steps'])}")
def test_recorded_traces(trace):
    R, P = trace["N"], trace["ps"]
    a = make(R, trace["pages_per_rank"] + 1, P)
    for step in trace["steps"]:
        if step["op"] == "free": a.free(step["pages"])
        else:
            assert pick_base(a.free_by_class) == step["base"]
            chain = cyclic_classes(0, a.layout.num_pages(step["seq"]), step["base"], R)
            if step["pages"] is None:
                before = state(a)
                with pytest.raises(CapacityError): a.take([chain])
                assert state(a) == before
            else: assert a.take([chain])[0].tolist() == step["pages"]
        assert (a.free_by_class, a.available_tokens) == (step["counts"], step["avail"])
        a.check()


def test_worked_example_strands_a_page():
    a = make(2, 7)
    got = []
    for tokens in (242, 49, 200):
        base = pick_base(a.free_by_class)
        got.append(a.take([cyclic_classes(0, a.layout.num_pages(tokens), base, 2)])[0].tolist())
    assert got == [[2, 3, 4, 5], [6], [7, 8, 9, 10]]
    assert a.available_tokens == 128 and sum(a.free_by_class) * 64 == 192


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40), st.data())
def test_shares_of_a_cyclic_chain_differ_by_one(R, start, n, data):
    base = data.draw(st.integers(0, R - 1))
    classes = cyclic_classes(start, n, base, R)
    assert np.bincount(classes, minlength=R).tolist() == cyclic_need(start, n, base, R)
    assert max(cyclic_need(start, n, base, R)) - min(cyclic_need(start, n, base, R)) <= 1
    assert n == 0 or classes[0] == (base + start) % R
    whole = cyclic_classes(0, start + n, base, R)  # an extension goes on where the chain ended
    assert classes.tolist() == whole[start:].tolist()


@pytest.mark.parametrize("R,P", [(1, 1), (2, 4), (3, 5), (8, 64)])
def test_every_boundary_length_is_taken_and_given_back(R, P):
    lengths = {0, 1, P - 1, P, P + 1, 2 * P, R * P - 1, R * P, R * P + 1, 2 * R * P}
    for history in (0, P):
        for n in sorted(lengths):
            a = make(R, 8, P)
            [old] = a.take([cyclic_classes(0, a.layout.num_pages(history), 0, R)])
            first = a.layout.num_pages(history)
            [new] = a.take([cyclic_classes(first, a.layout.num_pages(n), 0, R)])
            assert len(new) == -(-n // P) and (a.layout.owner_of_page(new) ==
                                               (first + np.arange(len(new))) % R).all()
            a.check()
            a.free(np.concatenate([old, new]))
            a.check()
            assert sum(a.free_by_class) == a.num_pages - R


@pytest.mark.parametrize("cap", [512, 576, 640])
def test_tail_beside_the_cacheable_part_is_freed_once(cap):
    a = make(8, 4, 64)  # 700 tokens are 11 pages; the tree keeps whole pages up to cap
    [pages] = a.take([cyclic_classes(0, a.layout.num_pages(700), 0, 8)])
    keep = cap // 64
    a.move(pages[:keep], Holder.REQUEST, Holder.TREE)
    a.free(pages[keep:])
    a.check()
    assert sum(a.count(Holder.TREE)) == keep and sum(a.free_by_class) == 24 - keep
    with pytest.raises(ConservationError): a.free(pages[keep - 1:])


def test_admission_is_by_the_tightest_class():
    a = make(4, 9)
    [hog] = a.take([np.full(8, 3)])
    assert a.available_tokens == 0 and sum(a.free_by_class) == 24
    before = state(a)
    with pytest.raises(CapacityError) as e: a.take([[0, 1, 2], [3]])
    assert (e.value.facts["need"], e.value.facts["free"]) == ([1, 1, 1, 1], [8, 8, 8, 0])
    assert state(a) == before and e.value.exit_code == 2
    a.free(hog[:1])
    a.take([[0, 1, 2], [3]])


def test_pages_are_taken_for_somebody():
    a = make(2, 4)
    for holder in (Holder.REQUEST, Holder.TREE, Holder.TRANSFER):
        [pages] = a.take([[0, 1]], holder)
        assert a.count(holder) == [1, 1]
        a.check()
        a.free(pages, holder)
    before = state(a)
    for holder in (Holder.SINK, Holder.FREE):
        with pytest.raises(ConservationError, match=holder.name): a.take([[0, 1]], holder)
        assert state(a) == before

@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_refused_batch_leaves_no_trace(R, local, data):
    a = make(R, local)
    chains = data.draw(st.lists(st.lists(st.integers(0, R - 1), max_size=8), max_size=5))
    need, before = np.bincount(sum(chains, []), minlength=R), state(a)
    if (need <= local - 1).all():
        got = a.take(chains)
        assert [len(g) for g in got] == [len(c) for c in chains]
        for pages, classes in zip(got, chains):
            assert pages.dtype == np.int32 and a.layout.owner_of_page(pages).tolist() == classes
        a.free(np.concatenate([np.zeros(0, int), *got]))
    else:
        with pytest.raises(CapacityError): a.take(chains)
        assert state(a) == before
    a.check()


@given(st.integers(2, 4), st.data(),
       st.sampled_from(["sink", "past", "negative", "twice", "free", "tree"]))
def test_a_bad_id_anywhere_stops_the_whole_move(R, data, fault):
    a = make(R, 6)
    mine, tree = a.take([cyclic_classes(0, 2 * R, 0, R), cyclic_classes(0, R, 0, R)])
    a.move(tree, Holder.REQUEST, Holder.TREE)
    unused = int(np.flatnonzero(a._holder == Holder.FREE)[0])
    bad = dict(sink=R - 1, past=a.num_pages, negative=-1, twice=int(mine[0]), free=unused,
               tree=int(tree[0]))[fault]
    pages = data.draw(st.permutations([*mine.tolist(), bad]))
    before = state(a)
    err = PageIdError if fault in ("sink", "past", "negative") else ConservationError
    for call in (lambda: a.free(pages), lambda: a.move(pages, Holder.REQUEST, Holder.TREE),
                 lambda: a.move(pages, Holder.REQUEST, Holder.TRANSFER)):
        with pytest.raises(err): call()
        assert state(a) == before
    a.free(mine)


@pytest.mark.parametrize("src,dst", [
    (Holder.FREE, Holder.TREE), (Holder.FREE, Holder.REQUEST), (Holder.SINK, Holder.FREE),
    (Holder.REQUEST, Holder.SINK), (Holder.FREE, Holder.FREE)])
def test_sinks_stay_and_free_pages_leave_by_take(src, dst):
    a = make()
    with pytest.raises(ConservationError): a.move([4], src, dst)
    with pytest.raises(ConservationError): a.move([], src, dst)


def test_odd_inputs_are_refused_before_any_effect():
    a = make()
    [mine] = a.take([[0, 1]])
    before = state(a)
    for pages in ([2.0], [[2, 3]], ["2"], np.array([True])):
        with pytest.raises(PageIdError): a.free(pages)
    for classes in ([2], [-1]):
        with pytest.raises(OwnershipError): a.take([[0], classes])
    for base in (-1, 2):
        with pytest.raises(OwnershipError): cyclic_classes(0, 1, base, 2)
    for local in (0, -1, 2.0):
        with pytest.raises(InputError): make(local=local)
    with pytest.raises(PageIdError): a.holder_of(1)
    with pytest.raises(PageIdError): a.holder_of(12)
    assert state(a) == before
    assert a.take([]) == [] and [p.tolist() for p in a.take([[], []])] == [[], []]
    a.free([])
    assert state(a) == before and mine.tolist() == [2, 3]


def _swap(a): a._free[0, 2], a._free[1, 2] = a._free[1, 2], a._free[0, 2]
FAULTS = {
    "holder lost": lambda a: a._holder.__setitem__(4, Holder.TREE),
    "no such holder": lambda a: a._holder.__setitem__(2, 9),
    "listed twice": lambda a: a._free.__setitem__((0, 3), a._free[0, 2]),
    "popped, not held": lambda a: a._top.__setitem__(1, a._top[1] + 1),
    "other owner's list": _swap,
    "sink handed out": lambda a: a._holder.__setitem__(1, Holder.REQUEST)}

@pytest.mark.parametrize("fault", FAULTS)
def test_the_recount_finds_each_fault(fault):
    a = make()
    a.take([[0, 1]])
    a.check()
    FAULTS[fault](a)
    with pytest.raises(ConservationError): a.check()


def test_it_draws_itself_and_counts_by_holder():
    a, b = make(), make()
    for x in (a, b): x.move(x.take([[0, 1, 0]])[0][:1], Holder.REQUEST, Holder.TREE)
    assert a._repr_html_() == b._repr_html_() and "class 1" in a._repr_html_()
    assert repr(a) == "PageAllocator(2 x 6 pages: sink 2, free 7, tree 1, request 2, transfer 0)"
    assert a.count(Holder.REQUEST) == [1, 1] and a.count(Holder.TREE) == [1, 0]


class AgainstLists(RuleBasedStateMachine):
    "The allocator against one Python list a class and a dict of holders"
    @initialize(R=st.integers(1, 4), local=st.integers(1, 7))
    def begin(self, R, local):
        self.R, self.a = R, make(R, local)
        self.free = [[p for p in range(R, R * local) if p % R == c] for c in range(R)]
        self.held = {}

    @rule(data=st.data())
    def take(self, data):
        chains = data.draw(st.lists(st.lists(st.integers(0, self.R - 1), max_size=5), max_size=3))
        if any(sum(ch.count(c) for ch in chains) > len(self.free[c]) for c in range(self.R)):
            with pytest.raises(CapacityError): self.a.take(chains)
            return
        want = [[self.free[c].pop(0) for c in chain] for chain in chains]
        assert [g.tolist() for g in self.a.take(chains)] == want
        self.held |= {p: Holder.REQUEST for chain in want for p in chain}

    @rule(data=st.data(), dst=st.sampled_from([h for h in Holder if h is not Holder.SINK]))
    def move(self, data, dst):
        if not self.held: return
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=6))
        src = self.held[pages[0]] if pages else Holder.REQUEST
        if any(self.held[p] is not src for p in pages):
            with pytest.raises(ConservationError): self.a.move(pages, src, dst)
            return
        self.a.move(pages, src, dst)
        for p in pages:
            if dst is Holder.FREE: del self.held[p]
            else: self.held[p] = dst
        if dst is Holder.FREE:
            for c in range(self.R):
                self.free[c] = sorted(p for p in pages if p % self.R == c) + self.free[c]

    @invariant()
    def agrees(self):
        if not hasattr(self, "a"): return
        self.a.check()
        assert [f[t:].tolist() for f, t in zip(self.a._free, self.a._top)] == self.free
        assert all(self.a.holder_of(p) is h for p, h in self.held.items())
        assert sum(sum(self.a.count(h)) for h in Holder) == self.a.num_pages

TestAgainstLists = AgainstLists.TestCase
