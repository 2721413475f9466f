"Each page has one computing rank, unless the batch says otherwise; the remainder goes where pages are free"
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.all_gather import ForwardPlan, chunk_bytes
from cpkv.launch import run_ranks
from cpkv.laws import InputError, OwnershipError
from cpkv.layout import PageLayout
from cpkv.page_split import computed_by, deal_left, draw_pages, page_rows, page_split
from cpkv.reader import Reader
from cpkv.shared_kv import READERS, ChunkReuse, FullView, probe_reader
from cpkv.split import Extend, zigzag_split


def extends_of(*pairs):
    "Extends of (history, new tokens) pairs, request ids unlike places"
    return tuple(Extend(request=100 + i, start=h, stop=h + n) for i, (h, n) in enumerate(pairs))

def plan_of(split, rank, P):
    "A plan on this rank; pages in order"
    lay, at, tables = PageLayout(cp_size=split.ranks, page_size=P), split.ranks, []
    for e in split.extends:
        tables.append(np.arange(at, at + lay.num_pages(e.stop)))
        at += len(tables[-1])
    return ForwardPlan(split=split, page_tables=tuple(tables), layout=lay, rank=rank, owner=rank,
                       tokens=tuple(np.arange(e.stop) for e in split.extends), samples=(False,) * len(tables))

def cells(split, P):
    "Pages of each segment of each request in token order, a begun first page counted, [2R, B]"
    B, R = len(split.extends), split.ranks
    start, size = split.start.reshape(R, 2, B), split.size.reshape(R, 2, B)
    num = -(-(start + size) // P) - start // P
    return np.concatenate([num[:, 0], num[::-1, 1]])

def by_hand(extends, R, P, free):
    "Pages of each segment: the rule in words, one page at a time"
    free, out = [*free], []
    for e in extends:
        if e.start % P: free[0] += 1                                 # begun: taken long ago
        base = (-(-e.stop // P) - e.start // P) // (2 * R)
        out.append([base] * (2 * R))
    free = [f - 2 * sum(segments[0] for segments in out) for f in free]
    for e, segments in zip(extends, out):
        taken = [0] * R
        for _ in range((-(-e.stop // P) - e.start // P) % (2 * R)):
            r = max((r for r in range(R) if taken[r] < 2), key=lambda r: (free[r], -r))
            segments[(r, 2 * R - 1 - r)[taken[r]]] += 1
            taken[r], free[r] = taken[r] + 1, free[r] - 1
    return np.array(out, np.int64).reshape(-1, 2 * R).T

@st.composite
def batch(draw):
    "Ranks, page size, extends of 0 to 40 pages at and beside page borders, free pages"
    R, P = draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 16, 64]))
    odd = st.sampled_from(sorted({0, 1, P - 1, P // 2}))
    borders = [0, 1, 2, R - 1, R, R + 1, 2 * R - 1, 2 * R, 2 * R + 1, 3 * R, 4 * R]
    pages = st.one_of(st.sampled_from(borders), st.integers(0, 40), st.integers(2 * R + 1, 40))
    ext = []
    for i in range(draw(st.integers(1, 4))):
        start = draw(st.sampled_from([0, 1, 2, 2 * R])) * P + draw(odd)
        ext.append(Extend(request=i, start=start, stop=start + max(draw(pages) * P + draw(odd) - draw(odd), 1)))
    spread = draw(st.sampled_from([0, 1, 3, 50]))
    free = [100 + draw(st.integers(0, spread)) for _ in range(R)]
    return R, P, tuple(ext), free


@settings(max_examples=1000)
@given(batch())
def test_every_token_once_and_every_page_by_one_rank(case):
    R, P, ext, free = case
    made, B = page_split(ext, R, P, free), len(ext)
    num = [-(-e.stop // P) - e.start // P for e in ext]
    assert made.aligned == (min(num) >= 2 * R) and made.name == "page" and made.ranks == R
    start, size = made.start.reshape(R, 2, B), made.size.reshape(R, 2, B)
    begin, length = np.concatenate([start[:, 0], start[::-1, 1]]), np.concatenate([size[:, 0], size[::-1, 1]])
    assert (begin[0] == [e.start for e in ext]).all() and (begin[1:] == (begin + length)[:-1]).all()
    assert ((begin + length)[-1] == [e.stop for e in ext]).all() and (length >= 0).all()
    assert (made.index.reshape(R, 2, B) == np.arange(B)).all()
    assert made.max_rows == max(length[r].sum() + length[-1 - r].sum() for r in range(R))
    if not made.aligned:
        plain = zigzag_split(ext, R)
        return np.testing.assert_array_equal(np.stack([made.start, made.size]), np.stack([plain.start, plain.size]))
    assert (begin[1:] % P == 0).all() and (length > 0).all()
    assert (cells(made, P).sum(0) == num).all()
    np.testing.assert_array_equal(cells(made, P), by_hand(ext, R, P, free))
    assert made.max_rows <= sum(page_rows(n, R, P) for n in num)

@given(batch())
def test_restore_is_the_inverse_and_visible_lengths_move_with_their_rows(case):
    R, P, ext, free = case
    plans = [plan_of(page_split(ext, R, P, free), r, P) for r in range(R)]
    buffer = np.full((R, plans[0].split.max_rows, 2), -7)
    for p in plans:
        n = p.rows.num
        assert n == p.split.rows_by_rank[p.rank] and len(p.rows.index) % 32 == 0
        buffer[p.rank, :n] = np.stack([p.rows.index[:n], p.rows.position[:n]], 1)
        assert (p.rows.visible[:n] == p.rows.position[:n] + 1).all()
        assert not p.rows.visible[n:].any() and (p.rows.index[n:] == -1).all()
    got = buffer.reshape(-1, 2)[plans[0].order].tolist()
    assert got == [[i, t] for i, e in enumerate(ext) for t in range(e.start, e.stop)]
    assert len({p.digest for p in plans}) == 1

@given(batch())
def test_a_page_is_computed_by_the_rank_that_the_picture_says(case):
    R, P, ext, free = case
    made = page_split(ext, R, P, free)
    for i, e in enumerate(ext):
        who = {}
        for s in made.segments:
            if s.index == i: who |= dict.fromkeys(range(s.start, s.stop), s.rank)
        sets = [{who[t] for t in range(j * P, min(j * P + P, e.stop)) if t in who} for j in range(-(-e.stop // P))]
        assert computed_by(made, P, i).tolist() == [next(iter(s)) if len(s) == 1 else -1 for s in sets]
        if made.aligned: assert all(len(s) == 1 for s in sets[e.start // P:])


@given(st.integers(1, 8), st.lists(st.integers(0, 15), max_size=6), st.integers(0, 99))
def test_the_remainder_goes_to_the_ranks_with_most_free_pages(R, left, seed):
    free = np.random.default_rng(seed).integers(0, 9, R).tolist()
    left, after = [n % (2 * R) for n in left], [*free]
    got, at = deal_left(left, free).tolist(), 0
    assert len(got) == sum(left)
    for n in left:
        mine, at = got[at:at + n], at + n
        for k, d in enumerate(mine):
            r = d // 2
            able = [x for x in range(R) if sum(y // 2 == x for y in mine[:k]) < 2]
            assert r in able and d % 2 == sum(y // 2 == r for y in mine[:k])   # head first
            assert (after[r], -r) == max((after[x], -x) for x in able)
            after[r] -= 1

def test_a_batch_counts_what_it_takes():
    "64 prompts of 2R + 1 pages in one batch leave a pool even to within a page"
    for R in (2, 3, 8):
        made = page_split(extends_of(*[(0, 4 * (2 * R + 1))] * 64), R, 4, [500] * R)
        pages = [n // 4 for n in made.rows_by_rank]
        assert max(pages) - min(pages) <= 1 and sum(pages) == 64 * (2 * R + 1)

def test_an_uneven_pool_becomes_even():
    free = np.array([40, 10, 30, 20])
    made = page_split(extends_of(*[(0, 10)] * 40), 4, 1, free)       # 2 each, 2 left of each request
    after = free + 200 - made.rows_by_rank
    assert max(after) - min(after) <= 1

def test_worked_example_of_ten_and_nine_pages():
    "Two ranks: 3, 3, 2, 2 and 3, 2, 2, 2"
    for n, sizes in ((10, [3, 3, 2, 2]), (9, [3, 2, 2, 2])):
        made = page_split(extends_of((0, 64 * n)), 2, 64, [7, 7])
        assert cells(made, 64).ravel().tolist() == sizes
    assert [n // 64 for n in page_split(extends_of((0, 640)), 2, 64, [7, 7]).rows_by_rank] == [5, 5]
    assert [n // 64 for n in page_split(extends_of((0, 576)), 2, 64, [7, 8]).rows_by_rank] == [4, 5]

def test_a_begun_page_counts_as_a_cell_and_takes_no_new_page():
    "Five pages touched, one begun: rank 0 has a page less to give, so with equal counts it takes the rest"
    made = page_split(extends_of((3, 17)), 2, 4, [9, 9])
    assert cells(made, 4).ravel().tolist() == [2, 1, 1, 1]
    made = page_split(extends_of((3, 17), (0, 20)), 2, 4, [9, 9])
    assert cells(made, 4).T.tolist() == [[2, 1, 1, 1], [2, 1, 1, 1]]
    made = page_split(extends_of((0, 20), (0, 20)), 2, 4, [9, 9])
    assert cells(made, 4).T.tolist() == [[2, 1, 1, 1], [1, 2, 1, 1]]
    made = page_split(extends_of((0, 20)), 2, 4, [9, 10])
    assert cells(made, 4).ravel().tolist() == [1, 2, 1, 1]

def test_a_replicated_cache_has_one_class():
    ext = extends_of((0, 90), (5, 77))
    one, many = page_split(ext, 4, 4, [17]), page_split(ext, 4, 4, [17] * 4)
    assert one.start.tolist() == many.start.tolist() and one.size.tolist() == many.size.tolist()

@pytest.mark.parametrize("free", [[], [1, 2], [1] * 5])
def test_counts_of_another_layout_are_refused(free):
    with pytest.raises(InputError, match="counted by rank"): page_split(extends_of((0, 90)), 4, 4, free)

def test_numpy_counts_do_not_change_the_split():
    ext = extends_of((0, 90), (7, 60))
    a, b = (page_split(ext, 3, 4, f) for f in (np.array([3, 9, 4]), [3, 9, 4]))
    assert a.start.tolist() == b.start.tolist() and a.start.dtype == b.start.dtype == np.int64


# -- known traps


def test_trap_halves_are_not_cut_in_the_middle():
    "Lengths 20 and 36 on two ranks, pages of four: heads end after 20 of 32 and after 12 of 24 rows"
    made = page_split(extends_of((0, 20), (0, 36)), 2, 4, [9, 8])
    heads = [sum(s.stop - s.start for s in made.of_rank(r)[:2]) for r in (0, 1)]
    assert heads == [20, 12] and made.rows_by_rank == (32, 24)
    position = plan_of(made, 0, 4).rows.position
    assert position[:20].tolist() == [*range(8), *range(12)] and position[20:32].tolist() == [*range(16, 20), *range(28, 36)]
    one = page_split(extends_of((0, 20)), 2, 4, [9, 9])              # one request: 8 + 4, not 6 + 6
    assert [s.stop - s.start for s in one.of_rank(0)] == [8, 4]

def test_trap_the_even_share_is_too_small_a_block():
    for R, n in ((4, 9), (8, 17), (2, 5)):
        made = page_split(extends_of((0, 64 * n)), R, 64, [5] * R)
        assert made.max_rows == 3 * 64 > -(-64 * n // R)
        assert chunk_bytes(made, 10) == (R - 1) * 3 * 64 * 10

@pytest.mark.parametrize("history", [0, 1, 63, 64, 65])
def test_trap_the_prefix_counts_once_and_unpadded(history):
    "Each row of each rank sees the history and the chunk up to itself"
    made = page_split(extends_of((history, 3670)), 4, 64, [99] * 4)
    assert made.aligned
    seen = {}
    for r in range(4):
        rows = plan_of(made, r, 64).rows
        seen |= dict(zip(rows.position[:rows.num].tolist(), rows.visible[:rows.num].tolist()))
    assert seen == {t: t + 1 for t in range(history, history + 3670)}
    assert sum(s.stop % 64 > 0 for s in made.segments) == ((history + 3670) % 64 > 0)   # the last alone

def test_trap_a_row_of_no_rank():
    "A request of one token: the batch falls back, and ranks without a row of it have their stores all the same"
    made = page_split(extends_of((0, 640), (63, 1)), 4, 64, [9] * 4)
    assert not made.aligned
    assert [sum(s.index == 1 and s.stop > s.start for s in made.of_rank(r)) for r in range(4)] == [1, 0, 0, 0]
    assert len(plan_of(made, 3, 64).order) == 641

def test_trap_lengths_of_one_to_seven_on_eight_ranks():
    ext = extends_of(*[(i, n) for i, n in enumerate(range(1, 8))])
    for P in (1, 4, 64):
        made = page_split(ext, 8, P, [3] * 8)
        got = sorted((s.index, t) for s in made.segments for t in range(s.start, s.stop))
        assert got == [(i, t) for i, e in enumerate(ext) for t in range(e.start, e.stop)] and not made.aligned

@pytest.mark.parametrize("R", range(1, 9))
def test_trap_every_total_is_covered(R):
    for n in range(1, 4 * R + 2):
        made = page_split(extends_of((3, n)), R, 1, [5] * R)
        assert sorted(t for s in made.segments for t in range(s.start, s.stop)) == [*range(3, 3 + n)]
        assert made.aligned == (n >= 2 * R)

def test_trap_the_fallback_is_the_batchs():
    "One short request and nobody is aligned; the plan refuses to write such a batch directly"
    long = extends_of((0, 200))
    assert page_split(long, 2, 4, [9, 9]).aligned
    fell = page_split((*long, Extend(request=7, start=4, stop=16)), 2, 4, [9, 9])
    assert not fell.aligned and fell.name == "page"
    for r in (0, 1):
        with pytest.raises(OwnershipError, match="page-aligned"):
            dataclasses.replace(plan_of(fell, r, 4), direct=True)

def test_trap_ranks_that_counted_differently_are_found():
    "The digest of the plans differs, so the first gather says so"
    ext = extends_of((0, 36))
    mine, other = (plan_of(page_split(ext, 2, 4, f), 0, 4) for f in ([9, 9], [8, 9]))
    assert mine.split.max_rows == other.split.max_rows and mine.digest != other.digest

def test_trap_a_page_that_prefix_and_chunk_share():
    "History 70 on pages of 64: the begun page is rank 0's cell, its first new token is 70"
    made = page_split(extends_of((70, 700)), 2, 64, [9, 9])
    assert made.aligned and made.of_rank(0)[0].start == 70 and made.of_rank(0)[0].stop % 64 == 0
    assert computed_by(made, 64)[1] == 0 and computed_by(made, 64)[0] == -1


# -- readers


def over(R, kind, batches, split=zigzag_split, fmt="fp32", P=4, backend="local"):
    got = run_ranks(probe_reader, R, kind, batches, fmt, P, frozenset(), None, split, backend=backend)
    for _, received, predicted in got: assert received == predicted
    return {k: v for said, *_ in got for k, v in said.items()}

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k]))

def test_every_reader_says_the_same_whatever_the_cuts():
    batches = [[(0, 0, 61)], [(0, 61, 83), (1, 0, 23)], [(0, 83, 84)]]
    oracle = {}
    for q, n in ((0, 84), (1, 23)): oracle |= over(1, Reader, [[(q, 0, n)]])
    for R, kind, free in ((2, FullView, [0, 9]), (2, ChunkReuse, [3, 3]), (3, FullView, [0, 5, 5]), (3, ChunkReuse, [9, 0, 0]),
                          (4, Reader, [1]), (8, ChunkReuse, [*range(8)])):
        split = partial(page_split, page_size=4, free_by_class=free)
        assert same(over(R, kind, batches, split), oracle), (R, kind.name)

@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), min_size=1, max_size=3), st.sampled_from([2, 3, 4]),
       st.sampled_from([1, 4]), st.integers(0, 99))
def test_padding_and_filler_never_show(pairs, R, P, seed):
    "Padding rows, scratch and pool are NaN; states are those of one rank"
    free = np.random.default_rng(seed).integers(0, 9, R).tolist()
    batches = [[(i, 0, h) for i, (h, _) in enumerate(pairs) if h], [(i, h, h + n) for i, (h, n) in enumerate(pairs)]]
    batches = [b for b in batches if b]
    kind = list(READERS.values())[seed % 3]
    got = over(R, kind, batches, partial(page_split, page_size=P, free_by_class=free), P=P)
    oracle = {}
    for i, (h, n) in enumerate(pairs): oracle |= over(1, Reader, [[(i, 0, h + n)]], P=P)
    assert same(got, oracle)
    assert all(torch.isfinite(out).all() for _, out, _ in got.values())

def test_the_picture_colours_pages():
    made = page_split(extends_of((0, 70)), 4, 4, [10] * 4)
    assert "17:r0" in draw_pages(made, 4).text and "2:-" in draw_pages(zigzag_split(extends_of((0, 70)), 4), 4).text
