"All about a row moves with it, each row is stored once, and every rank has the same plan"
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import extends_of, golden, lengths, new_tokens, pairs_of, ranks, splits
from cpkv.all_gather import (ForwardPlan, chunk_bytes, direct_rows, fit_rows, flat_tables,
                             owned_rows, upload)
from cpkv.laws import ConservationError, InputError, OwnershipError, PageIdError
from cpkv.layout import PageLayout
from cpkv.split import SPLITS, Extend, interleave_split, zigzag_of, zigzag_split



def pages_of(extends, lay, seed=0):
    "Pages of each request, shuffled over all owners"
    need = [lay.num_pages(e.stop) for e in extends]
    ids = np.random.default_rng(seed).permutation(sum(need)) + lay.num_sinks
    return tuple(np.split(ids.astype(np.int32), np.cumsum(need)[:-1]))

def plans_of(pairs, R, cp=None, P=4, split=zigzag_split, **change):
    "The plan of a batch on each rank"
    ext, lay = extends_of(pairs), PageLayout(cp_size=cp or R, page_size=P)
    facts = dict(split=split(ext, R), page_tables=pages_of(ext, lay), layout=lay,
                 tokens=tuple(np.arange(e.stop) * 3 + e.request for e in ext),
                 samples=(True,) * len(ext)) | change
    return [ForwardPlan(rank=r, owner=r % lay.cp_size, **facts) for r in range(R)]

def lies(plans):
    "Request and position of each row of the gathered buffer; filler -7"
    buffer = np.full((len(plans), plans[0].split.max_rows, 2), -7)
    for p in plans:
        n = p.rows.num
        buffer[p.rank, :n] = np.stack([p.rows.index[:n], p.rows.position[:n]], 1)
    return buffer.reshape(-1, 2)


@splits
@given(lengths, ranks, st.integers(1, 9))
def test_rows_over_ranks_partition_the_batch(split, pairs, R, P):
    seen = []
    for plan in plans_of(pairs, R, P=P, split=split):
        rows = plan.rows
        padded = len(rows.index)
        assert padded % 32 == 0 and padded - rows.num < 32
        assert rows.num == plan.split.rows_by_rank[plan.rank]
        assert all(len(x) == padded for x in (rows.position, rows.visible, rows.token))
        real, fill = slice(0, rows.num), slice(rows.num, None)
        assert (rows.visible[real] == rows.position[real] + 1).all()
        assert (rows.token[real] == rows.position[real] * 3 + 100 + rows.index[real]).all()
        assert (rows.index[fill] == -1).all()
        assert not rows.visible[fill].any() and not rows.position[fill].any()
        seen += zip(rows.index[real].tolist(), rows.position[real].tolist())
    assert len(seen) == len(set(seen)) and sorted(seen) == new_tokens(plan.split.extends)


@splits
@given(lengths, ranks, st.integers(1, 9))
def test_order_is_the_inverse_of_the_gather(split, pairs, R, P):
    plans = plans_of(pairs, R, P=P, split=split)
    buffer, order, ext = lies(plans), plans[0].order, plans[0].split.extends
    assert buffer[order].tolist() == [[*t] for t in new_tokens(ext)]
    assert len(set(order.tolist())) == len(order)
    assert all((p.order == order).all() for p in plans)
    assert len(buffer) - len(order) == (buffer[:, 0] == -7).sum()        # filler is nowhere


@splits
@given(lengths, ranks, ranks, st.integers(1, 9))
def test_owned_rows_partition_and_land_in_the_owners_pool(split, pairs, R, cp, P):
    plans, stored = plans_of(pairs, R, cp=cp, P=P, split=split), {}
    buffer, lay = lies(plans), plans[0].layout
    for plan in plans[cp:]:                                          # ranks that keep the same shard
        twin = plans[plan.owner]
        assert [x.tolist() for x in owned_rows(plan)] == [x.tolist() for x in owned_rows(twin)]
    for plan in plans[:cp]:
        for row, loc in zip(*(x.tolist() for x in owned_rows(plan)), strict=True):
            i, p = buffer[row]
            assert row not in stored and i >= 0
            stored[row] = lay.slot_of(plan.owner, loc)
            assert stored[row] == plan.page_tables[i][p // P] * P + p % P
    if R >= cp: assert sorted(stored) == sorted(plans[0].order.tolist())


@splits
@given(lengths, ranks)
def test_the_digest_is_the_same_on_every_rank_and_sees_every_change(split, pairs, R):
    plans = plans_of(pairs, R, split=split)
    one, i = plans[0], len(pairs) - 1
    assert len({p.digest for p in plans}) == 1 and 0 <= one.digest < 2**63
    e, t, tok = one.split.extends[i], one.page_tables[i], one.tokens[i]
    def other(**change): return dataclasses.replace(one, **change).digest
    def swap(values, value): return (*values[:i], value, *values[i + 1:])
    changed = {one.digest}
    for at in range(len(t)):
        page = t.copy()
        page[at] = 10_000
        changed.add(other(page_tables=swap(one.page_tables, page)))
    for at in range(e.start, e.stop):
        token = tok.copy()
        token[at] += 1
        changed.add(other(tokens=swap(one.tokens, token)))
    changed.add(other(samples=swap(one.samples, False)))
    changed.add(other(captures=(False,) * i + (True,)))
    changed.add(other(split=dataclasses.replace(one.split, name="other")))
    changed.add(other(layout=PageLayout(cp_size=R, page_size=5)))
    moved = swap(one.split.extends, Extend(request=7, start=e.start, stop=e.stop))
    changed.add(other(split=split(moved, R)))
    assert len(changed) == 1 + len(t) + e.num_tokens + 5
    s = one.split
    mirrored = dataclasses.replace(s, index=s.index[::-1], start=s.start[::-1], size=s.size[::-1])
    if R > 1: assert other(split=mirrored) != one.digest


def test_a_cut_elsewhere_is_another_digest():
    split, lay = zigzag_split(extends_of([(0, 8)]), 1), PageLayout(cp_size=1, page_size=4)
    moved = dataclasses.replace(split, start=np.array([[0, 5]]), size=np.array([[5, 3]]))
    def digest(s):
        return ForwardPlan(split=s, page_tables=(np.array([1, 2]),), layout=lay, rank=0, owner=0,
                           tokens=(np.arange(8),), samples=(True,)).digest
    assert split.start.tolist() == [[0, 4]] and digest(split) != digest(moved)


def test_tables_that_share_their_bytes_differ():
    "Pages 4, 5 and 6 with token 5 in between: cut after 4 or after 5, the bytes are the same"
    ext = extends_of([(0, 1), (0, 1)])
    def digest(*tables):
        return ForwardPlan(split=zigzag_split(ext, 2), page_tables=tuple(map(np.array, tables)),
                           layout=PageLayout(cp_size=2, page_size=4), rank=0, owner=0,
                           tokens=(np.array([5]),) * 2, samples=(True,) * 2).digest
    assert digest([4, 5], [6]) != digest([4], [5, 6])


# -- cases from the field


def test_two_uneven_requests_are_cut_where_their_heads_end():
    "Lengths 5 and 9 on two ranks: 2,1,1,1 and 3,2,2,2; rank 0 holds 5 + 3 rows and its heads end at 5"
    a, b = plans_of([(0, 5), (0, 9)], 2)
    sizes = {(s.index, s.start): s.stop - s.start for s in a.split.segments}
    assert [n for _, n in sorted(sizes.items())] == [2, 1, 1, 1, 3, 2, 2, 2]
    heads = [sum(s.stop - s.start for s in p.split.of_rank(p.rank)[:2]) for p in (a, b)]
    assert heads == [5, 3] and a.split.rows_by_rank == (8, 6)
    assert a.rows.position[:8].tolist() == [0, 1, 0, 1, 2, 4, 7, 8]
    assert a.rows.index[:8].tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert lies([a, b])[a.order][:, 1].tolist() == [*range(5), *range(9)]


def test_causal_lengths_move_with_their_queries():
    "Two ranks, 8 new tokens after 4"
    plans = plans_of([(4, 8)], 2)
    assert [p.rows.position[:4].tolist() for p in plans] == [[4, 5, 10, 11], [6, 7, 8, 9]]
    assert [p.rows.visible[:4].tolist() for p in plans] == [[5, 6, 11, 12], [7, 8, 9, 10]]


def test_positions_are_global():
    "Rank 0 of 2 holds tokens 0, 1, 6, 7 of 8; after a history of 6 they stand at 6, 7, 12, 13"
    for history in (0, 6):
        plan = plans_of([(history, 8)], 2)[0]
        assert (plan.rows.position[:4] - history).tolist() == [0, 1, 6, 7]
        dealt = plans_of([(history, 10)], 4, split=interleave_split)[1]
        assert (dealt.rows.position[:3] - history).tolist() == [1, 5, 9] and dealt.rows.num == 3


def test_visible_keys_after_a_history_of_five():
    plans = plans_of([(5, 2)], 1)
    assert plans[0].rows.visible[:2].tolist() == [6, 7]


@pytest.mark.parametrize("pairs,rows", [
    ([(0, 5)], [1, 1, 1, 1, 1, 0, 0, 0]),
    ([(0, 5), (0, 100)], [14, 14, 14, 14, 13, 12, 12, 12]),
    ([(63, 1)], [1, 0, 0, 0, 0, 0, 0, 0])], ids=["five alone", "five and a hundred", "one after 63"])
def test_fewer_tokens_than_ranks(pairs, rows):
    plans = plans_of(pairs, 8, P=64)
    assert list(plans[0].split.rows_by_rank) == rows
    assert [len(p.rows.index) for p in plans] == [32 * (n > 0) for n in rows]


# -- another engine's numbers


@golden
def test_golden_rows(case):
    "A plan's rows end where the other engine says that keys end, heads first"
    plan = plans_of(pairs_of(case), case["cp"], P=64)[case["rank"]]
    heads, last = sum(case["q_prev"]), np.cumsum(case["q_prev"] + case["q_next"]) - 1
    assert plan.rows.visible[last].tolist() == case["kv_prev"] + case["kv_next"]
    assert plan.rows.index[:heads].tolist() == np.repeat(np.arange(len(case["q_prev"])), case["q_prev"]).tolist()


# -- what a plan refuses, and its tables


def plan_of(tables, pairs=((0, 16),), tokens=None, **change):
    ext = extends_of(pairs)
    facts = dict(split=zigzag_split(ext, 4), page_tables=tuple(map(np.array, tables)), rank=0, owner=0,
                 layout=PageLayout(cp_size=4, page_size=8), samples=(True,) * len(ext),
                 tokens=tuple(np.arange(e.stop) for e in ext) if tokens is None else tokens)
    return ForwardPlan(**(facts | change))

@pytest.mark.parametrize("error,message,args", [
    (PageIdError, "too short", dict(tables=[[4]])),
    (PageIdError, "sink", dict(tables=[[4, 3]])), (PageIdError, "sink", dict(tables=[[4, 5, -1]])),
    (PageIdError, "twice", dict(tables=[[4, 4]])),
    (PageIdError, "twice.*request=101", dict(tables=[[4, 5], [6, 6]], pairs=[(0, 16), (0, 16)])),
    (ConservationError, "another holds", dict(tables=[[4, 5], [6, 5]], pairs=[(0, 16), (0, 16)])),
    (ConservationError, "another holds", dict(tables=[[4, 5], [4, 6]], pairs=[(7, 9), (8, 8)])),
    (ConservationError, "another holds", dict(tables=[[4, 5], [4, 6]], pairs=[(8, 8), (7, 9)])),
    (InputError, "too few tokens", dict(tables=[[4, 5]], tokens=(np.arange(15),))),
    (InputError, "each request", dict(tables=[[4, 5]], tokens=())),
    (InputError, "each request", dict(tables=[], tokens=())),
    (InputError, "each request", dict(tables=[[4, 5]], samples=())),
    (InputError, "captures", dict(tables=[[4, 5]], captures=(True, True))),
    (InputError, "no such rank", dict(tables=[[4, 5]], rank=4)),
    (InputError, "no such rank", dict(tables=[[4, 5]], owner=-1))])
def test_bad_plans_are_refused(error, message, args):
    with pytest.raises(error, match=message): plan_of(**args)

def test_what_is_only_read_may_be_shared():
    plan_of([[4, 5], [4, 6]], [(8, 8), (8, 8)])
    plan_of([[4, 5, 9]])                                             # pages beyond the stop are fine

def test_slots_are_wide():
    "A page number of 32 bits times 64 rows does not wrap"
    ext, lay = extends_of([(0, 65)]), PageLayout(cp_size=2, page_size=64)
    table = np.array([8, 40_000_001], np.int32)
    plan = ForwardPlan(split=zigzag_split(ext, 2), page_tables=(table,), layout=lay, rank=1, owner=1,
                       tokens=(np.zeros(65),), samples=(True,))
    assert owned_rows(plan)[1].tolist() == [20_000_000 * 64] and owned_rows(plan)[1].dtype == np.int64
    assert flat_tables(plan.page_tables)[0].dtype == np.int64

def test_upload_is_one_buffer():
    tables = dict(a=np.arange(6, dtype=np.int32).reshape(2, 3), none=np.zeros(0, np.int64), b=np.array([2**40]))
    got = upload(tables)
    assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in tables.items()}
    assert all(v.dtype is torch.int64 for v in got.values())
    assert len({v.untyped_storage().data_ptr() for v in got.values()}) == 1
    assert upload({}) == {}

def test_small_things():
    x = torch.arange(6.).view(3, 2)
    assert fit_rows(x, 2).tolist() == x[:2].tolist() and fit_rows(x, 3).tolist() == x.tolist()
    assert fit_rows(x, 5).tolist() == x.tolist() + [[0, 0]] * 2 and fit_rows(x[:0], 2).shape == (2, 2)
    assert chunk_bytes(zigzag_split(extends_of([(0, 9)]), 4), 10) == 3 * 3 * 10
    assert chunk_bytes(zigzag_split(extends_of([(0, 9)]), 1), 10) == 0
    plan = plans_of([(0, 3)], 2)[0]
    assert plan != plans_of([(0, 3)], 2)[0] and plan == plan and hash(plan)         # identity, not arrays


# -- direct writes


def by_pages(ext, R, P, rng):
    "Cuts on borders of pages, anywhere; segments may be empty"
    cut = []
    for e in ext:
        inner = np.sort(rng.integers(e.start // P, e.stop // P + 1, 2 * R - 1)) * P
        cut.append([e.start, *np.clip(inner, e.start, e.stop), e.stop])
    return zigzag_of("page", ext, np.array(cut).T, aligned=True)

def direct_plans(pairs, R, P, rng, **change):
    "A plan a rank whose new pages are where they are computed; begun pages are anybody's"
    ext, lay = extends_of(pairs), PageLayout(cp_size=R, page_size=P)
    split, free = by_pages(ext, R, P, rng), iter(range(1, 10**6))
    tables = [np.full(lay.num_pages(e.stop), -1) for e in ext]
    for s in split.segments:
        fresh = max(s.start, -(-ext[s.index].start // P) * P)
        for j in range(fresh // P, -(-s.stop // P)): tables[s.index][j] = next(free) * R + s.rank
    for t in tables: t[t < 0] = [next(free) * R + rng.integers(R) for _ in range((t < 0).sum())]
    return [ForwardPlan(split=split, page_tables=tuple(tables), layout=lay, rank=r, owner=r, direct=True,
                        tokens=tuple(np.arange(e.stop) for e in ext), samples=(False,) * len(ext), **change)
            for r in range(R)]

@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=4), st.integers(1, 8),
       st.sampled_from([1, 2, 4, 16]), st.integers(0, 99))
def test_direct_and_filtered_rows_store_each_row_once(pairs, R, P, seed):
    "By the owner of its page; begun pages come from the gathered chunk, all others from their computer"
    plans = direct_plans(pairs, R, P, np.random.default_rng(seed))
    ext, stored = plans[0].split.extends, []
    token_of = {int(g): t for t, g in enumerate(plans[0].order)}
    for p in plans:
        assert p.filters == (R > 1 and any(e.start % P for e in ext))
        own, own_loc = direct_rows(p)
        row, loc = owned_rows(p)
        gathered = [*(own + p.rank * p.split.max_rows).tolist(), *row.tolist()]
        stored += [(token_of[g], p.owner, l) for g, l in zip(gathered, [*own_loc.tolist(), *loc.tolist()])]
        begun = {(i, e.start // P) for i, e in enumerate(ext) if e.start % P}
        for g in row.tolist():
            t = token_of[g]
            i = int(np.searchsorted(p.split.begin, t, side="right")) - 1
            assert (i, (ext[i].start + t - p.split.begin[i]) // P) in begun
    want, t = [], 0
    for e, table in zip(ext, plans[0].page_tables):
        for pos in range(e.start, e.stop):
            page = int(table[pos // P])
            want.append((t, page % R, page // R * P + pos % P))
            t += 1
    assert sorted(stored) == want

def test_one_rank_gathers_nothing():
    "It computes and owns all there is, also in a begun page and without aligned cuts"
    for split in SPLITS.values():
        for pairs in ([(3, 1)], [(0, 9), (7, 12)]):
            plan = plans_of(pairs, 1, P=4, split=split)[0]
            alone = dataclasses.replace(plan, direct=True)
            assert not alone.filters and len(owned_rows(alone)[0]) == 0
            assert sorted(direct_rows(alone)[1].tolist()) == sorted(owned_rows(plan)[1].tolist())

def test_plans_that_are_not_direct_have_no_direct_rows():
    for plan in plans_of([(3, 40), (0, 9)], 4):
        assert [len(x) for x in direct_rows(plan)] == [0, 0] and plan.filters

def test_a_direct_write_needs_aligned_segments_and_a_shard_a_rank():
    rng = np.random.default_rng(0)
    plan = direct_plans([(0, 16)], 2, 4, rng)[0]
    for change in (dict(split=zigzag_split(plan.split.extends, 2)), dict(split=interleave_split(plan.split.extends, 2)),
                   dict(layout=PageLayout(cp_size=1, page_size=4), owner=0),
                   dict(split=dataclasses.replace(plan.split, aligned=False))):
        with pytest.raises(OwnershipError, match="page-aligned"): dataclasses.replace(plan, **change)

def test_a_direct_write_to_another_ranks_page_is_refused_alike_on_all_ranks():
    said = set()
    for plan in direct_plans([(0, 32), (5, 9)], 2, 4, np.random.default_rng(1)):
        tables = [t.copy() for t in plan.page_tables]
        tables[1][-1] ^= 1
        with pytest.raises(OwnershipError, match="does not own its page") as e:
            dataclasses.replace(plan, page_tables=tuple(tables))
        said.add(str(e.value))
        assert "request=1" in str(e.value) and f"page={tables[1][-1]}" in str(e.value)
    assert len(said) == 1

def test_the_digest_sees_direct_and_aligned():
    plan = direct_plans([(0, 32)], 2, 4, np.random.default_rng(2))[0]
    other = dataclasses.replace(plan, direct=False)
    third = dataclasses.replace(other, split=dataclasses.replace(plan.split, aligned=False))
    assert len({plan.digest, other.digest, third.digest}) == 3
