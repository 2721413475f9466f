"The page number is the address, one bijection for every kind of integer"
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.laws import InputError, PageIdError
from cpkv.layout import PageLayout, byte_offset, check_pages, check_slots, owner_loc_ms

GOLD = json.loads((Path(__file__).parent / "data/upstream_golden.json").read_text())
LAYOUTS = [(1, 1), (3, 5), (7, 1), (1, 64), (2, 48), (8, 64), (5, 64), (16, 16)]
KINDS = [int, np.int32, np.int64, torch.int32, torch.int64]
layouts = st.builds(PageLayout, cp_size=st.integers(1, 17), page_size=st.integers(1, 130))


def boundary(cp_size: int, page_size: int, chunk: int = 96) -> list[int]:
    "Lengths around every edge, and each after one page of history"
    P, R = page_size, cp_size
    edges = [0, 1, P-1, P, P+1, 2*P, R*P-1, R*P, R*P+1, 2*R*P, chunk-1, chunk, chunk+1]
    return sorted({n for e in edges for n in (e, e + P)})


def cast(ids: list[int], kind):
    "The ids as an array or tensor of a dtype; a list of one for plain integers"
    return torch.tensor(ids, dtype=kind) if isinstance(kind, torch.dtype) else np.array(ids, kind)


def plain(layout: PageLayout, slot: int) -> tuple[int, int]:
    "The definition, in words of arithmetic"
    page, offset = divmod(slot, layout.page_size)
    return page % layout.cp_size, page // layout.cp_size * layout.page_size + offset


@pytest.mark.parametrize("cp_size,page_size", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_definition_and_keeps_its_dtype(cp_size, page_size, kind):
    lay = PageLayout(cp_size=cp_size, page_size=page_size)
    slots = [-1, *boundary(cp_size, page_size), 2**31 - 1]
    want = [plain(lay, s) for s in slots]
    if kind is int:
        assert [lay.owner_loc(s) for s in slots] == want
        assert [(lay.owner_of(s), lay.loc_of(s)) for s in slots] == want
        assert [lay.slot_of(*w) for w in want] == slots
        assert all(type(v) is int for s in slots for v in lay.owner_loc(s))
        return
    x = cast(slots, kind)
    owner, loc = lay.owner_loc(x)
    pages = x // page_size
    made = dict(owner=owner, loc=loc, owner_of=lay.owner_of(x), loc_of=lay.loc_of(x),
                slot=lay.slot_of(owner, loc), page=lay.owner_of_page(pages),
                local=lay.local_page_of(pages), back=lay.page_of(owner, lay.local_page_of(pages)))
    assert {name: v.dtype for name, v in made.items()} == {name: x.dtype for name in made}
    got = {name: v.tolist() for name, v in made.items()}
    assert list(zip(got["owner"], got["loc"])) == want
    assert (got["owner_of"], got["loc_of"]) == (got["owner"], got["loc"])
    assert got["slot"] == slots and got["page"] == got["owner"]
    assert got["back"] == pages.tolist()


@given(lay=layouts, local_pages=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_slots_and_homes_are_one_to_one(lay, local_pages):
    S = local_pages * lay.page_size
    slots = np.arange(lay.cp_size * S, dtype=np.int32)
    owner, loc = lay.owner_loc(slots)
    assert np.array_equal(np.sort(owner.astype(np.int64) * S + loc), slots)
    assert np.array_equal(lay.slot_of(owner, loc), slots)
    for rank in range(lay.cp_size):
        mine = lay.slot_of(rank, np.arange(S))
        assert np.array_equal(slots[owner == rank], np.sort(mine))
        assert np.array_equal(loc[owner == rank], np.arange(S))


@given(lay=layouts, slot=st.integers(-2**40, 2**40))
@settings(max_examples=200, deadline=None)
def test_the_map_is_a_bijection_of_all_integers(lay, slot):
    owner, loc = lay.owner_loc(slot)
    assert (owner, loc) == plain(lay, slot)
    assert 0 <= owner < lay.cp_size and lay.slot_of(owner, loc) == slot
    assert (loc == -1) <= (slot < 0) and lay.loc_of(-1) == -1


def test_placement_equals_the_golden_vectors():
    gold, lay = GOLD["placement_N8_ps64"], PageLayout(cp_size=8, page_size=64)
    assert len(gold["loc"]) == 12
    for kind in (np.int32, np.int64, torch.int32, torch.int64):
        owner, loc = lay.owner_loc(cast(gold["loc"], kind))
        assert (owner.tolist(), loc.tolist()) == (gold["owner"], gold["local"])
    assert [lay.owner_loc(s) for s in gold["loc"]] == list(zip(gold["owner"], gold["local"]))


@pytest.mark.parametrize("cp_size,page_size", LAYOUTS)
def test_page_counts_come_from_tokens_and_not_from_ranks(cp_size, page_size):
    lay = PageLayout(cp_size=cp_size, page_size=page_size)
    for n in boundary(cp_size, page_size):
        pages = lay.num_pages(n)
        assert (pages - 1) * page_size < n <= pages * page_size or n == pages == 0
        assert pages == PageLayout(cp_size=1, page_size=page_size).num_pages(n)


def test_sinks_are_local_page_zero_of_each_rank_and_nothing_else():
    for R, P in LAYOUTS:
        lay = PageLayout(cp_size=R, page_size=P)
        pages = np.arange(5 * R)
        assert np.array_equal(lay.is_sink_page(pages), lay.local_page_of(pages) == 0)
        assert lay.num_sinks == R == lay.is_sink_page(torch.arange(5 * R)).sum()
        assert [lay.page_of(r, 0) for r in range(R)] == list(range(lay.num_sinks))


@given(lay=layouts, start=st.integers(0, 300), n=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_a_run_of_pages_is_balanced_to_within_one(lay, start, n):
    counts = lay.count_by_owner(np.arange(start, start + n))
    assert counts.shape == (lay.cp_size,) and counts.sum() == n
    assert counts.max() == -(-n // lay.cp_size) and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("shared,by_rank", [(15, [0, 0, 0, 0]), (16, [16, 0, 0, 0]),
                                            (48, [16, 16, 16, 0]), (65, [17, 16, 16, 16])])
def test_a_prefix_changes_ranks_at_each_page_and_not_at_each_row_of_pages(shared, by_rank):
    "Field case 51: 4 ranks, pages of 16; the unit is 16, never 64"
    lay = PageLayout(cp_size=4, page_size=16)
    owner = lay.owner_of(np.arange(64, 64 + shared)) if shared > 15 else np.zeros(0, np.int64)
    assert np.bincount(owner, minlength=4).tolist() == by_rank
    assert lay.num_pages(shared) == -(-shared // 16)


@pytest.mark.parametrize("tokens,kept,freed", [(700, 576, 2), (700, 640, 1), (700, 512, 3)])
def test_a_tail_is_cut_between_pages_and_no_page_is_on_both_sides(tokens, kept, freed):
    "Field case 52: the unit of a free is one page, also with 8 ranks"
    lay = PageLayout(cp_size=8, page_size=64)
    pages = list(range(8, 8 + lay.num_pages(tokens)))
    keep, tail = pages[:kept // 64], pages[kept // 64:]
    assert len(tail) == freed and keep + tail == pages and kept % 64 == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row,size,want", [(3_728_271, 576, 2_147_484_096),
                                           (2_066, 1_039_680, 2_147_978_880),
                                           (1_000_000, 16_384, 16_384_000_000)])
def test_byte_offsets_are_exact_beyond_32_bits(kind, row, size, want):
    "Field case 63"
    assert byte_offset(row, size) == want
    if kind is not int:
        at = byte_offset(cast([row, 0], kind), size)
        assert at.tolist() == [want, 0] and at.dtype in (np.int64, torch.int64)
        assert byte_offset(cast([row], kind)[0], size) == want


def test_rows_beyond_two_gigabytes_are_written_and_read_back(tmp_path):
    "Field case 63, in a sparse file: neighbours stay as they were"
    with open(tmp_path / "pool", "w+b") as f:
        f.truncate(16_384 * 1_000_002)
        for row, size in ((3_728_271, 576), (2_066, 1_039_680), (1_000_000, 16_384)):
            at = int(byte_offset(np.int32(row), size))
            f.seek(at)
            f.write(b"\x07" * size)
            f.seek(at - 1)
            around = f.read(size + 2)
            assert around == b"\0" + b"\x07" * size + b"\0"
            f.seek(at)
            f.write(b"\0" * size)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "8", True, None, np.int64(8)])
@pytest.mark.parametrize("name", ["cp_size", "page_size"])
def test_a_layout_of_anything_but_positive_integers_is_refused(name, bad):
    with pytest.raises(InputError, match=name) as e:
        PageLayout(**{**dict(cp_size=8, page_size=64), name: bad})
    assert e.value.exit_code == 2


@pytest.mark.parametrize("wrap", [list, np.array, torch.tensor])
def test_ids_that_no_table_may_hold_are_refused_with_their_place(wrap):
    lay = PageLayout(cp_size=4, page_size=16)
    check_pages(wrap([4, 5, 39]), lay, 10)
    check_slots(wrap([64, 639]), lay, 10)
    for bad in (-1, 0, 3, 40, 2**31 - 1):
        with pytest.raises(PageIdError) as e: check_pages(wrap([4, bad, -7]), lay, 10)
        assert (e.value.facts["page"], e.value.facts["index"]) == (bad, 1)
        assert (e.value.facts["first"], e.value.facts["stop"]) == (4, 40)
    for bad in (-1, 0, 63, 640):
        with pytest.raises(PageIdError, match=f"slot={bad}"): check_slots(wrap([bad]), lay, 10)
    with pytest.raises(PageIdError, match="integer"): check_pages(wrap([4.0]), lay, 10)


def test_no_ids_are_fine_and_one_bare_id_is_looked_at():
    lay = PageLayout(cp_size=4, page_size=16)
    for nothing in ([], np.zeros(0, np.int32), torch.zeros(0, dtype=torch.int32)):
        check_pages(nothing, lay, 1)
    check_pages(4, lay, 2)
    with pytest.raises(PageIdError): check_pages(4, lay, 1)  # a pool of sinks only
    with pytest.raises(PageIdError): check_slots(np.int32(-1), lay, 2)


@pytest.mark.cuda
def test_ids_on_cuda_are_looked_at_under_debug_only():
    lay, ids = PageLayout(cp_size=4, page_size=16), torch.tensor([-1], device="cuda")
    check_pages(ids, lay, 10)
    with pytest.raises(PageIdError): check_pages(ids, lay, 10, debug=True)


def test_the_benchmark_of_the_map_returns_a_time():
    assert 0 < owner_loc_ms(num_slots=64) < 1e3
