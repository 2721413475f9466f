"Bytes in pages: planes, addresses, holes"
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.laws import PageIdError
from cpkv.ops import rows as r
from cpkv.ops.rows import RowFormat


def raw(*fields):
    "A format whose numbers are its bytes"
    return RowFormat(name="raw", dim=sum(fields), fields=fields,
                     encode=lambda x: x.to(torch.uint8), decode=lambda b: b.float())

def encode(x):
    scale = x.abs().amax(1, keepdim=True) / 127
    value = (x / scale.masked_fill(scale == 0, 1)).round().to(torch.int8)
    return torch.cat([value.view(torch.uint8), scale.view(torch.uint8)], 1)
def decode(b): return r.read_field(b, 0, 8, torch.int8) * r.read_field(b, 8, 12, torch.float32)
TOY = RowFormat(name="toy", dim=8, fields=(8, 4), encode=encode, decode=decode)

def slow_read(pages, loc, fields, page_size):
    "The row at a loc, byte by byte, from the layout's definition"
    page, offset, start, out = loc // page_size, loc % page_size, 0, []
    for w in fields:
        out += pages[page][start + offset * w:start + (offset + 1) * w]
        start += page_size * w
    return out

def random_bytes(*shape): return torch.randint(0, 256, shape, dtype=torch.uint8)


# ---- planes

def test_a_page_of_four_tokens_has_its_scales_last():
    "Field case 46: values at 0, 8, 16, 24, scales at 32, 36, 40, 44; interleaved 0, 12, 24, 36"
    assert TOY.page_bytes(4) == 48 and TOY.row_bytes == 12
    assert r.row_offsets(torch.arange(4), TOY, 4).T.tolist() == [[0, 8, 16, 24], [32, 36, 40, 44]]
    pages = torch.zeros(2, 48, dtype=torch.uint8)
    scale = torch.tensor([1., 2, 4, 8])
    x = scale[:, None] * torch.tensor([127., 1, -2, 3, -4, 5, 6, 0])
    r.store_rows(pages, TOY.encode(x), torch.arange(4, 8), TOY, 4)
    assert pages[1, 32:].clone().view(torch.float32).tolist() == scale.tolist()
    assert pages[1, 8:16].tolist() == [127, 1, 254, 3, 252, 5, 6, 0] and not pages[0].any()
    assert torch.equal(TOY.decode(r.gather_rows(pages, torch.arange(4, 8), TOY, 4)), x)
    copied = r.gather_pages(pages, torch.tensor([1]))
    assert torch.equal(TOY.decode(r.gather_rows(copied, torch.arange(4), TOY, 4)), x)

WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 24])
FIELDS = st.lists(WIDTHS, min_size=1, max_size=4).map(tuple)

@given(fields=FIELDS, P=st.integers(1, 9), num_pages=st.integers(1, 5), data=st.data())
def test_rows_are_read_where_the_layout_says(fields, P, num_pages, data):
    fmt, pages = raw(*fields), random_bytes(num_pages, P * sum(fields))
    loc = data.draw(st.lists(st.integers(-1, num_pages * P - 1), max_size=12))
    want = [slow_read(pages.tolist(), l, fields, P) if l >= 0 else [0] * sum(fields) for l in loc]
    assert r.gather_rows(pages, torch.tensor(loc, dtype=torch.int64), fmt, P).tolist() == want

@given(fields=FIELDS, P=st.integers(1, 9), num_pages=st.integers(1, 5), data=st.data())
def test_stored_rows_come_back_and_no_other_byte_changes(fields, P, num_pages, data):
    fmt, pages = raw(*fields), random_bytes(num_pages, P * sum(fields))
    loc = data.draw(st.lists(st.integers(0, num_pages * P - 1), unique=True, max_size=12))
    before, rows = pages.clone(), random_bytes(len(loc), sum(fields))
    loc = torch.tensor(loc, dtype=torch.int64)
    r.store_rows(pages, rows, loc, fmt, P)
    assert torch.equal(r.gather_rows(pages, loc, fmt, P), rows)
    rest = torch.tensor(sorted({*range(num_pages * P)} - {*loc.tolist()}), dtype=torch.int64)
    assert torch.equal(r.gather_rows(pages, rest, fmt, P), r.gather_rows(before, rest, fmt, P))

@pytest.mark.parametrize("fields", [(8,), (8, 4), (2304,), (3, 5)])
@pytest.mark.parametrize("lead,skip", [(0, 0), (1, 0), (3, 1), (0, 2)])
def test_pages_and_rows_that_are_views_are_written_in_place(fields, lead, skip):
    "Some pages of a larger buffer, rows that start at an odd byte"
    fmt, w = raw(*fields), sum(fields)
    big, flat = random_bytes(lead + 4, 2 * w), random_bytes(3 * w + skip)
    rows, loc, before = flat[skip:].view(3, w), torch.tensor([7, 0, 2]), big.clone()
    r.store_rows(big[lead:], rows, loc, fmt, 2)
    assert torch.equal(r.gather_rows(big[lead:], loc, fmt, 2), rows)
    assert torch.equal(big[:lead], before[:lead])

def test_a_token_moves_with_its_scale():
    "Field trap 12: token 5 to 70, key and scale, neighbours untouched"
    fmt, P = raw(128, 4), 64
    pages = random_bytes(2, 64 * 132)
    before = pages.clone()
    r.store_rows(pages, r.gather_rows(pages, torch.tensor([5]), fmt, P), torch.tensor([70]), fmt, P)
    changed = (pages != before).nonzero().tolist()
    assert {p for p, _ in changed} <= {1}
    assert {b for _, b in changed} <= {*range(6 * 128, 7 * 128), *range(8192 + 24, 8192 + 28)}
    assert torch.equal(pages[1, 768:896], before[0, 640:768])
    assert torch.equal(pages[1, 8216:8220], before[0, 8212:8216])

def test_the_scale_of_token_64_is_at_the_start_of_the_next_pages_scales():
    "Field trap 13: length 65"
    at = r.row_offsets(torch.tensor([63, 64]), raw(128, 4), 64)
    assert at.tolist() == [[63 * 128, 8192 + 63 * 4], [8448, 8448 + 8192]]


# ---- large addresses

@pytest.mark.parametrize("loc,fields,P,want", [
    (3_728_271, (576,), 1, [2_147_484_096]),
    (2_066, (1_039_680,), 1, [2_147_978_880]),
    (1_000_000, (16_384,), 1, [16_384_000_000]),
    (3_728_271, (576,), 64, [2_147_484_096]),
    (70_400_063, (128, 4), 64, [1_100_000 * 8448 + 63 * 128, 1_100_000 * 8448 + 8192 + 63 * 4]),
    ((1 << 40) + 1, (7,), 1, [7 * (1 << 40) + 7])])
def test_addresses_are_64_bit(loc, fields, P, want):
    "Field case 63"
    at = r.row_offsets(torch.tensor([loc]), raw(*fields), P)
    assert at.dtype == torch.int64 and at[0].tolist() == want

@pytest.mark.parametrize("fields,P,loc", [((576,), 64, 3_728_271), ((128, 4), 64, 70_400_063)])
def test_rows_past_two_gigabytes_round_trip(tmp_path, fields, P, loc):
    "A pool in a sparse file: only the pages that are touched exist"
    fmt = raw(*fields)
    num_pages = loc // P + 2
    path, size = tmp_path / "pool", num_pages * fmt.page_bytes(P)
    try:
        with open(path, "wb") as f: f.truncate(size)
        pages = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        pages = pages.view(num_pages, -1)
    except (OSError, RuntimeError) as e: pytest.skip(f"no sparse file of {size} bytes here: {e}")
    near = torch.tensor([loc - 1, loc, loc + 1, 0])
    rows = random_bytes(1, sum(fields)).clamp_min(1)
    r.store_rows(pages, rows, torch.tensor([loc]), fmt, P)
    got = r.gather_rows(pages, near, fmt, P)
    assert size > 1 << 31 and torch.equal(got[1], rows[0]) and not got[[0, 2, 3]].any()


# ---- holes, zero sizes, order

def test_a_hole_reads_zeros_over_old_scratch():
    pages = torch.full((1, 24), 255, dtype=torch.uint8)
    scratch = torch.full((3, 12), 77, dtype=torch.uint8)
    out = r.gather_rows(pages, torch.tensor([-1, 0, -1]), TOY, 2, out=scratch)
    assert out.data_ptr() == scratch.data_ptr() and out.sum(1).tolist() == [0, 255 * 12, 0]

def test_zero_is_a_size():
    none, pages = torch.empty(0, dtype=torch.int64), random_bytes(2, 24)
    for P in (pages, pages[:0]):
        r.store_rows(P, random_bytes(0, 12), none, TOY, 2)
        assert r.gather_rows(P, none, TOY, 2).shape == (0, 12)
        assert r.gather_pages(P, none).shape == (0, 24)
    assert not r.gather_rows(pages[:0], torch.tensor([-1, -1]), TOY, 2).any()
    assert r.restore_rows(pages[:0], none).shape == (0, 24)

@given(st.permutations(range(7)))
def test_restore_undoes_an_order(order):
    rows, order = random_bytes(7, 3), torch.tensor(order)
    assert torch.equal(r.restore_rows(rows[order], order.argsort()), rows)

def test_pages_are_gathered_into_scratch_as_they_lie():
    pages, scratch = random_bytes(5, 24), random_bytes(3, 24)
    out = r.gather_pages(pages, torch.tensor([4, 0, 4]), out=scratch)
    assert out.data_ptr() == scratch.data_ptr() and torch.equal(out, pages[[4, 0, 4]])

def test_rows_of_any_width_are_restored():
    x = torch.randn(4, 2, 3)
    assert torch.equal(r.restore_rows(x, torch.tensor([3, 1])), x[[3, 1]])


# ---- formats and refusals

@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_field_is_read_as_numbers_wherever_it_starts(n):
    x, tags = torch.randn(n, 3), random_bytes(n, 1)
    rows = torch.cat([tags, x.view(torch.uint8)], 1)
    assert torch.equal(r.read_field(rows, 1, 13, torch.float32), x)
    assert torch.equal(r.read_field(rows, 0, 1, torch.uint8), tags)

def test_a_format_that_reads_zero_bytes_as_something_is_refused():
    one, nan, short = (lambda b: b.float() + 1, lambda b: b * float("nan"),
                       lambda b: b.float()[:, :3])
    for bad in (one, nan, short):
        with pytest.raises(ValueError, match="zero bytes"):
            RowFormat(name="bad", dim=4, fields=(4,), encode=None, decode=bad)

@pytest.mark.parametrize("dim,fields", [(0, (4,)), (4, ()), (4, (4, 0)), (4, (-1, 5))])
def test_a_format_without_bytes_is_refused(dim, fields):
    with pytest.raises(ValueError):
        RowFormat(name="bad", dim=dim, fields=fields, encode=None, decode=lambda b: b)

@pytest.mark.parametrize("loc", [[-1], [0, 20], [-2, 3], [1 << 40], [-(1 << 62)]])
def test_a_store_outside_is_refused_and_writes_nothing(loc):
    pages = random_bytes(5, 48)
    before = pages.clone()
    with pytest.raises(PageIdError):
        r.store_rows(pages, random_bytes(len(loc), 12), torch.tensor(loc), TOY, 4)
    assert torch.equal(pages, before)

@pytest.mark.parametrize("loc", [-2, 20, 1 << 40])
def test_a_gather_outside_is_refused_and_says_where(loc):
    with pytest.raises(PageIdError) as e:
        r.gather_rows(random_bytes(5, 48), torch.tensor([0, loc]), TOY, 4)
    assert e.value.facts["id"] == loc and e.value.facts["stop"] == 20

def test_pages_and_orders_outside_are_refused():
    pages = random_bytes(5, 48)
    for ids in ([-1], [5]):
        with pytest.raises(PageIdError): r.gather_pages(pages, torch.tensor(ids))
        with pytest.raises(PageIdError): r.restore_rows(pages, torch.tensor(ids))

BAD = {
    "32-bit locs": lambda p, n: r.gather_rows(p, n.int(), TOY, 4),
    "32-bit pages": lambda p, n: r.gather_pages(p, n.int()),
    "another page size": lambda p, n: r.gather_rows(p, n, TOY, 3),
    "pages that do not lie together": lambda p, n: r.gather_rows(p[:, :24], n, TOY, 2),
    "pages of words": lambda p, n: r.gather_rows(p.view(torch.int32), n, TOY, 4),
    "rows of another width": lambda p, n: r.store_rows(p, random_bytes(1, 11), n, TOY, 4),
    "more rows than locs": lambda p, n: r.store_rows(p, random_bytes(2, 12), n, TOY, 4),
    "rows of floats": lambda p, n: r.store_rows(p, torch.zeros(1, 12), n, TOY, 4),
}

@pytest.mark.parametrize("what", BAD)
def test_refuses(what):
    with pytest.raises(ValueError): BAD[what](random_bytes(5, 48), torch.tensor([1]))

def test_moving_costs_a_read_a_write_and_an_id():
    assert r.move_bytes(10, 576) == 10 * (2 * 576 + 8) and not r.move_bytes(0, 576)
