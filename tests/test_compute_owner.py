"Pages live where they are computed, are stored once, and the pool stays even"
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.all_gather import direct_rows, owned_rows
from cpkv.alloc import Holder, PageAllocator, pick_base
from cpkv.compute_owner import (NO_BASE, PLACEMENTS, SPLITTERS, Chain, blind, blind_split, check_choice, fullest,
                                classes, computing_ranks, counted, deal, fill, grow, hit_pages, split_batch,
                                stale, trial)
from cpkv.launch import run_ranks
from cpkv.laws import (CapacityError, ConfigError, ConservationError, InputError, OwnershipError,
                       PageIdError)
from cpkv.layout import PageLayout
from cpkv.page_split import page_split
from cpkv.reader import Reader
from cpkv.shared_kv import PROBE_LAYERS, ChunkReuse, FullView, probe_plan, probe_reader, reuse_pages
from cpkv.split import Extend, interleave_split, zigzag_split


@st.composite
def conversation(draw):
    "Ranks, page size, and batches in which up to three requests grow by 0 to 40 pages at a time"
    R, P = draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 16, 64]))
    odd = st.sampled_from(sorted({0, 1, P - 1, P // 2}))
    borders = st.sampled_from([0, 1, 2, R - 1, R, R + 1, 2 * R - 1, 2 * R, 2 * R + 1])
    pages = st.one_of(st.integers(2 * R, 40), borders, st.integers(0, 40))
    at, batches = {}, []
    for _ in range(draw(st.integers(1, 3))):
        batch = []
        for q in draw(st.sampled_from([[0], [1, 0], [0, 1, 2]])):
            start = at.get(q, 0)
            at[q] = start + max(draw(pages) * P + draw(odd) - draw(odd), 1)
            batch.append((q, start, at[q]))
        batches.append(batch)
    return R, P, batches

def each_row(plans):
    "Stored rows of all ranks, as (token of the batch, owner, loc)"
    token_of = np.full(plans[0].split.ranks * plans[0].split.max_rows, -1)
    token_of[plans[0].order] = np.arange(len(plans[0].order))
    out = []
    for p in plans:
        (own, own_loc), (row, loc) = direct_rows(p), owned_rows(p)
        rows = np.append(own + p.rank * p.split.max_rows, row)
        out.append(np.stack([token_of[rows], np.full(len(rows), p.owner), np.append(own_loc, loc)], 1))
    return np.concatenate(out)

def wanted(plan):
    "What must be stored: each new token at its page's owner and loc"
    P, R, out = plan.layout.page_size, plan.layout.cp_size, []
    for e, table in zip(plan.split.extends, plan.page_tables):
        t = np.arange(e.start, e.stop)
        page = np.asarray(table)[t // P]
        out.append(np.stack([page % R, page // R * P + t % P], 1))
    both = np.concatenate(out)
    return np.column_stack([np.arange(len(both)), both])

@settings(max_examples=1000)
@given(conversation(), st.sampled_from(["compute_owner", "compute_owner", "cyclic"]))
def test_every_row_is_stored_once_at_the_owner_of_its_page(case, placement):
    "Split, classes, take, plan; chains go on over batches; the plan accepts what `classes` calls direct"
    R, P, batches = case
    lay = PageLayout(cp_size=R, page_size=P)
    alloc, chains, pages = PageAllocator(lay, 400), {}, {}
    for batch in batches:
        ext, free = tuple(Extend(request=q, start=a, stop=b) for q, a, b in batch), alloc.free_by_class
        held = [chains.get(e.request, Chain(NO_BASE, 0)) for e in ext]
        made = page_split(ext, R, P, free)
        got = classes(made, held, placement, lay, free)
        assert got.direct == (placement == "compute_owner" and made.aligned)
        for e, c, base, new in zip(ext, held, got.bases, got.classes):
            assert len(new) == lay.num_pages(e.stop) - c.num_pages and new.dtype == np.int64
            assert base == c.base or (c.base == NO_BASE and 0 <= base < R)
        taken = alloc.take(got.classes)
        total = np.bincount(np.concatenate(got.classes), minlength=R)   # class totals are what was taken
        assert alloc.free_by_class == (np.array(free) - total).tolist()
        for e, base, mine in zip(ext, got.bases, taken):
            pages[e.request] = np.append(pages.get(e.request, np.zeros(0, np.int64)), mine)
            chains[e.request] = Chain(base, len(pages[e.request]))
        plans = [probe_plan(batch, pages, lay, r, R, split=lambda *_, made=made: made, direct=got.direct)
                 for r in range(R)]
        assert all(p.direct == got.direct for p in plans) and len({p.digest for p in plans}) == 1
        rows = each_row(plans)
        assert (rows[np.argsort(rows[:, 0], kind="stable")] == wanted(plans[0])).all()
        if got.direct:                                                  # begun pages alone go by the filter; one rank has none
            begun = (R > 1) * sum(min(e.stop, -(-e.start // P) * P) - e.start for e in ext)
            assert sum(len(owned_rows(p)[0]) for p in plans) == begun
    alloc.check()

@given(conversation())
def test_a_page_belongs_to_the_rank_that_computes_it(case):
    R, P, batches = case
    for batch in batches:
        ext = tuple(Extend(request=q, start=a, stop=b) for q, a, b in batch)
        made = page_split(ext, R, P, [9] * R)
        if not made.aligned: continue
        who = {(s.index, t): s.rank for s in made.segments for t in range(s.start, s.stop)}
        for i, (e, got) in enumerate(zip(ext, computing_ranks(made, P))):
            fresh = range(-(-e.start // P), -(-e.stop // P))
            assert got.tolist() == [who[i, j * P] for j in fresh]

@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 8))
def test_cyclic_deals_any_chain_evenly_from_its_base(steps, R):
    lay, chains, dealt, at = PageLayout(cp_size=R, page_size=4), {}, {}, {}
    for q, n in steps:
        start = at.get(q, 0)
        at[q] = start + n
        made = page_split([Extend(request=q, start=start, stop=start + n)], R, 4, [9] * R)
        c = chains.get(q, Chain(NO_BASE, 0))
        got = classes(made, [c], "cyclic", lay, [9] * R)
        assert not got.direct and (c.base == NO_BASE or got.bases == (c.base,))
        dealt[q] = [*dealt.get(q, []), *got.classes[0].tolist()]
        chains[q] = Chain(got.bases[0], len(dealt[q]))
        assert dealt[q] == [(chains[q].base + j) % R for j in range(len(dealt[q]))]
        assert max(np.bincount(dealt[q], minlength=R)) - min(np.bincount(dealt[q], minlength=R)) <= 1


# -- bases and known traps


def test_new_chains_begin_with_the_fullest_class_of_the_batch_so_far():
    lay, ext = PageLayout(cp_size=3, page_size=4), [Extend(request=i, start=0, stop=n) for i, n in enumerate((4, 8, 4, 4))]
    made = zigzag_split(ext, 3)
    got = classes(made, [Chain(NO_BASE, 0)] * 4, "cyclic", lay, [5, 7, 5])
    assert got.bases == (1, 1, 0, 1)                                    # 5 7 5, 5 6 5, 5 5 4, 4 5 4
    free = [5, 7, 5]
    for base, new in zip(got.bases, got.classes):
        assert base == pick_base(free)
        for c in new: free[c] -= 1

@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trap_a_chain_without_a_tree_has_a_base_too(placement):
    "No prefix cache, no node to inherit from: the base is defined, under either placement, also with no new page"
    lay = PageLayout(cp_size=2, page_size=4)
    made = page_split([Extend(request=0, start=0, stop=16)], 2, 4, [3, 9])
    assert classes(made, [Chain(NO_BASE, 0)], placement, lay, [3, 9]).bases == (1,)
    last = page_split([Extend(request=0, start=5, stop=6)], 2, 4, [3, 9])
    got = classes(last, [Chain(0, 2)], placement, lay, [3, 9])
    assert got.bases == (0,) and [len(c) for c in got.classes] == [0]

def test_trap_a_base_is_kept_through_direct_chunks_and_fallbacks():
    "Chunks of 4 pages, 1 token, 1 page, 4 pages on two ranks: what falls back takes the fullest class"
    lay, chain, seen = PageLayout(cp_size=2, page_size=4), Chain(1, 0), []
    for a, b in itertools.pairwise([0, 16, 17, 20, 24, 40]):
        made = page_split([Extend(request=0, start=a, stop=b)], 2, 4, [8, 9])
        got = classes(made, [chain], "compute_owner", lay, [8, 9])
        assert got.bases == (1,)
        if not got.direct: assert got.classes[0].tolist() == [1] * len(got.classes[0])
        chain = Chain(1, chain.num_pages + len(got.classes[0]))
        seen.append((got.direct, len(got.classes[0])))
    assert seen == [(True, 4), (False, 1), (False, 0), (False, 1), (True, 4)]

def test_trap_one_class_is_empty_and_the_sum_is_not():
    lay = PageLayout(cp_size=4, page_size=4)
    alloc = PageAllocator(lay, 11)
    full = alloc.take([np.full(10, 3)])[0]
    assert sum(alloc.free_by_class) == 30 and alloc.available_tokens == 0
    made = page_split([Extend(request=0, start=0, stop=32)], 4, 4, alloc.free_by_class)
    for placement in PLACEMENTS:                                        # aligned: a page on each segment
        got = classes(made, [Chain(NO_BASE, 0)], placement, lay, alloc.free_by_class)
        before = [alloc.free_by_class, alloc.count(Holder.REQUEST)]
        with pytest.raises(CapacityError, match="short of pages.*need=.*free="): alloc.take(got.classes)
        assert [alloc.free_by_class, alloc.count(Holder.REQUEST)] == before    # and nothing is half taken
        alloc.check()
    alloc.free(full[:2])                                                # two pages of class 3: it fits
    got = classes(made, [Chain(NO_BASE, 0)], "compute_owner", lay, alloc.free_by_class)
    assert [len(t) for t in alloc.take(got.classes)] == [8]

def test_trap_a_second_request_of_the_batch_is_short():
    "The first alone would fit; the batch is refused whole"
    lay = PageLayout(cp_size=2, page_size=4)
    alloc = PageAllocator(lay, 4)
    ext = [Extend(request=i, start=0, stop=16) for i in range(2)]
    got = classes(page_split(ext, 2, 4, alloc.free_by_class), [Chain(NO_BASE, 0)] * 2, "compute_owner", lay, alloc.free_by_class)
    with pytest.raises(CapacityError): alloc.take(got.classes)
    assert alloc.free_by_class == [3, 3]
    alloc.take(got.classes[:1])

def test_trap_pages_held_ahead_are_not_written_directly():
    "They were drawn before anybody knew who computes them: the rest comes from wherever most is free"
    lay, pool = PageLayout(cp_size=2, page_size=4), PageAllocator(PageLayout(cp_size=2, page_size=4), 20)
    made = page_split([Extend(request=0, start=0, stop=32)], 2, 4, [9, 9])
    ahead = pool.take([np.arange(5) % 2])[0]
    got = classes(made, [Chain(0, 5)], "compute_owner", lay, [9, 9])
    assert not got.direct and got.classes[0].tolist() == [0, 1, 0]
    pages = {0: np.append(ahead, pool.take(got.classes)[0])}
    probe_plan([(0, 0, 32)], pages, lay, 0, 2, split=lambda *_: made)
    with pytest.raises(OwnershipError):
        probe_plan([(0, 0, 32)], pages, lay, 0, 2, split=lambda *_: made, direct=True)

def test_trap_more_pages_than_needed_ask_for_none():
    lay = PageLayout(cp_size=2, page_size=4)
    made = page_split([Extend(request=0, start=3, stop=4)], 2, 4, [9, 9])
    for placement in PLACEMENTS:
        assert [c.tolist() for c in classes(made, [Chain(1, 6)], placement, lay, [9, 9]).classes] == [[]]

def test_trap_local_pages_are_no_logical_pages():
    "Ids that were translated already are refused, not translated again"
    pages, split = trial([[(0, 0, 64)]], 4, 4, "compute_owner")
    lay = PageLayout(cp_size=4, page_size=4)
    with pytest.raises((OwnershipError, PageIdError, ConservationError)):
        probe_plan([(0, 0, 64)], {0: lay.local_page_of(pages[0])}, lay, 0, 4, split=split, direct=True)
    with pytest.raises((OwnershipError, PageIdError, ConservationError)):   # slots are none either
        probe_plan([(0, 0, 64)], {0: pages[0] * 4}, lay, 0, 4, split=split, direct=True)

def test_a_direct_write_to_anothers_page_names_rank_and_page():
    lay = PageLayout(cp_size=4, page_size=4)
    pages, split = trial([[(0, 0, 64)]], 4, 4, "compute_owner")
    moved, said = pages[0].copy(), set()
    moved[5] = 401
    for rank in range(4):
        with pytest.raises(OwnershipError, match=r"page=401, owner=1, rank=2, request=0") as e:
            probe_plan([(0, 0, 64)], {0: moved}, lay, rank, 4, split=split, direct=True)
        said.add(str(e.value))
    assert len(said) == 1

@pytest.mark.parametrize("chains,error,message", [
    ([], InputError, "each request has a chain"), ([Chain(0, 2), Chain(0, 2)], InputError, "each request has a chain"),
    ([Chain(0, 1)], InputError, "lacks pages.*request=7"), ([Chain(NO_BASE, 0)], InputError, "lacks pages"),
    ([Chain(NO_BASE, 2)], OwnershipError, "base is no rank.*request=7"), ([Chain(2, 2)], OwnershipError, "base is no rank"),
    ([Chain(-2, 2)], OwnershipError, "base is no rank")])
def test_chains_that_cannot_be_are_refused(chains, error, message):
    lay = PageLayout(cp_size=2, page_size=4)
    made = page_split([Extend(request=7, start=5, stop=40)], 2, 4, [9, 9])
    for placement in PLACEMENTS:
        with pytest.raises(error, match=message): classes(made, chains, placement, lay, [9, 9])

def test_a_replicated_cache_is_never_direct():
    lay = PageLayout(cp_size=1, page_size=4)
    made = page_split([Extend(request=0, start=0, stop=64)], 4, 4, [99])
    got = classes(made, [Chain(NO_BASE, 0)], "compute_owner", lay, [99])
    assert made.aligned and not got.direct and got.bases == (0,) and not got.classes[0].any()


# -- splits by name, choices


def test_a_split_by_name_is_that_split():
    ext, free = [Extend(request=0, start=3, stop=90), Extend(request=1, start=0, stop=44)], [4, 9, 4]
    same = {"page": page_split(ext, 3, 4, free), "zigzag": zigzag_split(ext, 3), "interleave": interleave_split(ext, 3)}
    assert same.keys() == SPLITTERS.keys()
    for name, want in same.items():
        got = split_batch(name, ext, 3, 4, free)
        assert got.name == name and got.aligned == want.aligned and got.step == want.step
        assert got.start.tolist() == want.start.tolist() and got.size.tolist() == want.size.tolist()
    with pytest.raises(ConfigError, match="no such split.*contiguous"): split_batch("contiguous", ext, 3, 4, free)
    made = page_split(ext, 3, 4, free)
    with pytest.raises(ConfigError, match="no such placement.*by_hand"):
        classes(made, [Chain(0, 1), Chain(NO_BASE, 0)], "by_hand", PageLayout(cp_size=3, page_size=4), free)

def test_every_choice_is_allowed_or_says_what_to_choose():
    for split, placement, R in itertools.product(SPLITTERS, PLACEMENTS, (1, 2, 8)):
        for shards in {1, R}:
            if placement == "cyclic" or R == 1 or (split == "page" and shards == R):
                check_choice(split, placement, shards, R)
                continue
            with pytest.raises(ConfigError, match="choose .*or placement cyclic") as e:
                check_choice(split, placement, shards, R)
            assert e.value.exit_code == 2 and e.value.facts == dict(split=split, placement=placement, shards=shards, ranks=R)
    for split, placement in (("even", "cyclic"), ("page", "owner")):
        with pytest.raises(ConfigError, match="no such.*known="): check_choice(split, placement, 1, 1)


# -- the pool over time


@pytest.mark.parametrize("R,n", [*itertools.product((2, 4, 8), (9, 17, 33))])
def test_a_hundred_chunks_leave_the_pool_even_and_blind_they_do_not(R, n):
    even, odd = grow(n, 100, R), grow(n, 100, R, blind_split)
    assert sum(even) == sum(odd) == 100 * n and max(even) - min(even) <= 1
    if n >= 2 * R: assert odd == [100 * (n // (2 * R)) * 2 + 100 * (r == 0) for r in range(R)]
    else: assert max(odd) - min(odd) <= 1                               # dealt round: fell back

def test_a_pool_is_full_when_it_refuses():
    lay = PageLayout(cp_size=8, page_size=1)
    def share(rule, n=17, batch=64, local=500):
        return fill([n] * 8 * local, batch, PageAllocator(lay, local + 1), rule)
    assert share(counted) > .99
    assert .70 < share(blind) < .72                                     # (2 + 1/8) / 3
    assert share(blind) < share(stale) < share(counted)
    assert share(counted, n=31) > .98
    with pytest.raises(InputError, match="no prompt was refused"): fill([17] * 3, 2, PageAllocator(lay, 500), counted)

def test_deal_is_law_abiding_and_deterministic():
    lay, batches = PageLayout(cp_size=3, page_size=4), [[(0, 0, 50), (1, 0, 3)], [(0, 50, 90)], [(1, 3, 70), (0, 90, 91)]]
    for placement in PLACEMENTS:
        alloc = PageAllocator(lay, 30)
        pages = deal(batches, alloc, placement)
        alloc.check()
        assert {q: len(p) for q, p in pages.items()} == {0: 23, 1: 18}
        assert sum(alloc.count(Holder.REQUEST)) == 41
        again = deal(batches, PageAllocator(lay, 30), placement)
        assert all(again[q].tolist() == pages[q].tolist() for q in pages)


# -- what a hit costs


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=40), st.integers(0, 40))
def test_a_hit_costs_the_fullest_owner_times_the_others(R, owners, h):
    owners = np.array(owners, np.int64) % R
    most = max(([*owners[:h]].count(r) for r in range(R)), default=0)
    assert hit_pages(owners, h, R) == (R - 1) * most

def test_a_short_hit_is_on_one_rank():
    "Eight pages of a prompt of 128 on eight ranks: 56 pages for every rank against 7; one page: 7 either way"
    lay = PageLayout(cp_size=8, page_size=1)
    for placement, cost in (("compute_owner", 56), ("cyclic", 7)):
        pages, split = trial([[(0, 0, 128)]], 8, 1, placement)
        pages[1] = np.append(pages[0][:8], pages[0].max() + 1)
        plan = probe_plan([(1, 8, 9)], pages, lay, 0, 8, split=split)
        assert 7 * reuse_pages(plan).max_pages == hit_pages(pages[0] % 8, 8, 8) == cost
        assert hit_pages(pages[0] % 8, 1, 8) == 7
        args = [[(0, 0, 128)], [(1, 8, 9)]], "fp32", 1, frozenset(), pages, split, placement == "compute_owner"
        for _, received, predicted in run_ranks(probe_reader, 8, ChunkReuse, *args, backend="local"):
            assert received == predicted and received[1][0] == 96 * (cost + 7)   # rows of 64 + 32 bytes; 7 of the chunk


# -- readers


def over(R, kind, batches, fmt="fp32", P=4, placement="compute_owner", free=(0,), stores=frozenset(), backend="local", **how):
    "What all ranks say together, and bytes by layer of each batch; ledgers hold what was predicted"
    pages, split = trial(batches, R, P, placement, free)
    got = run_ranks(probe_reader, R, kind, batches, fmt, P, stores, pages, split, placement == "compute_owner",
                    backend=backend, **how)
    got = [(said, [{n: b.get(n, 0) for n in range(3)} for b in received], predicted) for said, received, predicted in got]
    for _, received, predicted in got: assert received == predicted == got[0][1]
    return {k: v for said, *_ in got for k, v in said.items()}, got[0][1]

def alone(batches, *args):
    stops, out = {q: b for batch in batches for q, _, b in batch}, {}
    for q, n in stops.items(): out |= over(1, Reader, [[(q, 0, n)]], *args, placement="cyclic")[0]
    return out

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k]))

BATCHES = [[(0, 0, 64)], [(0, 64, 131)], [(0, 131, 133), (1, 0, 5)], [(0, 133, 200), (1, 5, 72)], [(0, 200, 265)]]

@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_same_bits_over_ranks_and_readers(fmt):
    "Direct from a border, direct from inside a page, a fallback, two requests that grow"
    oracle = alone(BATCHES, fmt)
    for R, kind in ((1, FullView), (2, FullView), (2, ChunkReuse), (3, FullView), (4, ChunkReuse), (8, FullView), (8, ChunkReuse)):
        free = [(5 * r) % 7 for r in range(R)]
        assert same(over(R, kind, BATCHES, fmt, free=free)[0], oracle), (R, kind.name)

@settings(max_examples=8)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.sampled_from([2, 3, 4]), st.sampled_from([1, 4]),
       st.integers(0, 99))
def test_any_chunks_equal_one(sizes, R, P, seed):
    cuts = [0, *np.cumsum(sizes).tolist()]
    batches = [[(0, a, b)] for a, b in itertools.pairwise(cuts)]
    free = np.random.default_rng(seed).integers(0, 9, R).tolist()
    got = over(R, (FullView, ChunkReuse)[seed % 2], batches, P=P, free=free)[0]
    assert same(got, alone(batches, "fp32", P))

def test_trap_pages_that_hold_anothers_content_by_now():
    "Request 1 is computed into the pages that request 0 left behind: direct, nothing of it shows"
    lay = PageLayout(cp_size=2, page_size=4)
    for kind in (FullView, ChunkReuse):
        pages, split = trial([[(0, 0, 40)]], 2, 4, "compute_owner")
        both, args = {0: pages[0], 1: pages[0]}, ("fp32", 4, frozenset())
        got = run_ranks(probe_reader, 2, kind, [[(0, 0, 40)], [(1, 0, 38)]], *args, both, split, True, backend="local")
        assert same({k: v for said, *_ in got for k, v in said.items()}, alone([[(0, 0, 40), (1, 0, 38)]]))
    assert set(lay.owner_of_page(pages[0])) == {0, 1}

def tags(peers, kind, batches, stores=frozenset()):
    "Tags of the gathers of each batch"
    world, out = peers.world(), []
    class Once:
        def world(self): return world
    pages, split = trial(batches, world.size, 4, "compute_owner")
    probe_reader(Once(), kind, batches, "fp32", 4, stores, pages, split, True)
    entries, it = world.ledger.entries, None
    for e in entries:
        if e.digest != it: out, it = [*out, []], e.digest
        out[-1].append((e.layer, e.tag))
    return out

def test_the_full_view_gathers_no_chunk_of_a_batch_that_begins_on_a_border():
    "And does as soon as one request begins inside a page: its rows are others' to store"
    batches = [[(0, 0, 64)], [(0, 64, 130)], [(0, 130, 200), (1, 0, 33)]]
    view = [(n, f"view.{c}") for n, has in enumerate(PROBE_LAYERS) for c in ("index", "latent") if has or c == "latent"]
    for R in (2, 3):
        first, second, third = run_ranks(tags, R, FullView, batches, backend="local")[0]
        assert first == second == view and [t for t in third if "chunk" not in t[1]] == view
        assert sum("chunk" in t for _, t in third) == len(view)
        reuse = run_ranks(tags, R, ChunkReuse, batches, backend="local")[0]
        assert all(sum("chunk" in t for _, t in b) == len(view) for b in reuse)   # they need the rows anyway

def test_what_vanishes_is_the_chunk_to_the_byte():
    direct = over(4, FullView, [[(0, 0, 64)]])[1][0]
    through = over(4, FullView, [[(0, 0, 64)]], placement="cyclic")[1][0]
    assert [through[n] - direct[n] for n in range(3)] == [3 * 16 * 4 * (16 + 8 * has) for has in PROBE_LAYERS]

def test_a_layer_that_only_stores_moves_nothing_when_direct():
    for kind in (FullView, ChunkReuse):
        said, received = over(2, kind, [[(0, 0, 40)], [(0, 40, 83)], [(0, 83, 120)]], stores=frozenset({2}))
        assert [b[2] for b in received[:2]] == [0, 0] and received[2][2] > 0   # 83 is inside a page
        assert {n for n, *_ in said} == {0, 1}

def test_ranks_in_another_order_and_real_processes_say_the_same():
    oracle = alone(BATCHES)
    for seed in (1, 2): assert same(over(3, ChunkReuse, BATCHES, seed=seed)[0], oracle)
    assert same(over(2, FullView, BATCHES, backend="gloo", debug=True)[0], oracle)

def test_the_digest_tells_placements_apart():
    pages, split = trial([[(0, 0, 64)]], 2, 4, "compute_owner")
    lay = PageLayout(cp_size=2, page_size=4)
    plan = probe_plan([(0, 0, 64)], pages, lay, 0, 2, split=split, direct=True)
    assert plan.digest != dataclasses.replace(plan, direct=False).digest

@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 30))
def test_what_is_not_written_directly_takes_each_page_from_the_fullest_class(free, num):
    left, want = list(free), []
    for _ in range(num):
        want.append(left.index(max(left)))
        left[want[-1]] -= 1
    assert fullest(np.array(free), num).tolist() == want
    if num <= sum(free): assert min(left) >= 0                          # no class is short while another has pages

@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.parametrize("R", [1, 2, 8])
def test_a_batch_of_nobody_is_split_too(name, R):
    "Zero is a normal size"
    made = split_batch(name, [], R, 4, [9] * R)
    assert made.rows_by_rank == (0,) * R and made.segments == () and made.max_rows == 0
    for placement in PLACEMENTS:
        got = classes(made, [], placement, PageLayout(cp_size=R, page_size=4), [9] * R)
        assert got.bases == got.classes == ()
