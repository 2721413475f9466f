"""Bytes of rows and pages: exact codecs, one order of buffers, sinks never data, wide addresses"""
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.laws import CapacityError, InputError, PageIdError
from cpkv.layout import PageLayout
from cpkv.ops.rows import RowFormat, gather_rows, store_rows
from cpkv.pool import (FORMATS, POISON, Buffer, PayloadDims, Pool, build_buffers, decode_bf16,
                       decode_fp32, encode_bf16, encode_fp32, format_of, pool_tokens, rank_bytes,
                       token_bytes)

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)
GLM = PayloadDims(latent=512, rope=64, index=128)
TINY = PayloadDims(latent=5, rope=2, index=3)  # odd on purpose
PLAIN = ("fp32", "bf16")                       # those of 8 bits: test_formats.py


def floats(bits): return torch.from_numpy(np.array([bits], np.uint32).view(np.float32).copy())
def as_bits(x): return x.contiguous().numpy().view(np.uint32)
def pool(fmt="bf16", has_index=(True, False, True), local_pages=4, R=2, P=3, dims=TINY):
    return Pool(PageLayout(cp_size=R, page_size=P), has_index=has_index, dims=dims,
                format=format_of(fmt), local_pages=local_pages)
def pages_of(fmt, P, n): return torch.zeros(n, fmt.page_bytes(P), dtype=torch.uint8)
def buffer(fmt, P, pages):
    return Buffer(component="index", layer=0, fmt=fmt, page_size=P, pages=pages)
def no_codec(name, fields, dim):
    return RowFormat(name=name, dim=dim, fields=fields, encode=None,
                     decode=lambda r: torch.zeros(len(r), dim))


@given(BITS)
def test_fp32_keeps_every_bit_pattern(bits):
    x = floats(bits)
    assert as_bits(decode_fp32(encode_fp32(x))).tolist() == [bits]


@given(BITS)
def test_bf16_is_nearest_even_for_every_bit_pattern(bits):
    got = as_bits(decode_bf16(encode_bf16(floats(bits))))[0]
    for u, v in zip(bits, got.tolist()):
        if u & 0x7FFFFFFF > 0x7F800000: assert v & 0x7FFFFFFF > 0x7F800000  # NaN stays NaN
        else: assert v == (u + 0x7FFF + (u >> 16 & 1)) >> 16 << 16


def test_bf16_ties_go_to_even():
    x = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]])
    assert decode_bf16(encode_bf16(x)).tolist() == [[1.0, 1 + 2**-6, -1.0, 1 + 2**-7]]
    assert encode_bf16(torch.tensor([[1.0, -2.0]])).tolist() == [[0x80, 0x3F, 0x00, 0xC0]]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("T", [0, 1, 31, 63, 64, 65, 1000])
def test_decoded_rows_encode_to_themselves(name, T):
    for D in (1, 3, 576):
        fmt = format_of(name).index(D)
        wide = torch.randn(T, 2 * D)
        x = wide[:, ::2]  # not contiguous
        rows = fmt.encode(x)
        assert rows.shape == (T, fmt.row_bytes) and rows.dtype is torch.uint8
        y = fmt.decode(rows)
        assert y.shape == (T, D) and y.dtype is torch.float32
        assert torch.equal(fmt.encode(y), rows)
        wider = torch.cat([rows, rows], 1)  # a slice of it decodes alike
        assert torch.equal(fmt.decode(wider[:, fmt.row_bytes:]), y)


@pytest.mark.parametrize("name,width", [("fp32", 4), ("bf16", 2)])
def test_a_latent_row_is_latent_then_rope(name, width):
    latent, rope = torch.randn(3, 512), torch.randn(3, 64)
    rows = format_of(name).latent(512, 64).encode(torch.cat([latent, rope], 1))
    enc, cut = format_of(name).index(1).encode, 512 * width
    assert torch.equal(rows[:, :cut], enc(latent)) and torch.equal(rows[:, cut:], enc(rope))


def test_bytes_of_the_real_models():
    bf16, fp32 = format_of("bf16"), format_of("fp32")
    assert (bf16.latent(512, 64).row_bytes, bf16.index(128).row_bytes) == (1152, 256)
    assert sum(token_bytes(GLM, bf16, [True] * 78).values()) == 78 * 1408 == 109_824
    assert sum(token_bytes(GLM, bf16, [True] * 61).values()) == 85_888
    assert token_bytes(GLM, bf16, [True] * 21 + [False] * 57) == dict(latent=89_856, index=5_376)
    assert sum(token_bytes(GLM, fp32, [True] * 78).values()) == 2 * 109_824
    assert token_bytes(GLM, bf16, []) == dict(latent=0, index=0)


@given(st.sampled_from(PLAIN), st.lists(st.booleans(), min_size=1, max_size=5),
       st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_tensors_have_the_bytes_of_the_closed_form(name, has_index, local_pages, P, R):
    p = pool(name, has_index, local_pages, R, P)
    one = sum(token_bytes(TINY, p.format, has_index).values())
    want = rank_bytes(p.layout, local_pages, one)
    assert want == p.num_bytes() == sum(b.pages.numel() for b in p.buffers)
    assert pool_tokens(p.layout, want, one) == R * P * (local_pages - 1)
    assert pool_tokens(p.layout, want - 1, one) == R * P * max(local_pages - 2, 0)
    assert pool_tokens(p.layout, 0, one) == 0


def test_layers_without_an_indexer_keep_their_place():
    has_index = [i % 4 == 0 or i == 1 for i in range(78)]
    assert sum(has_index) == 21
    p = pool("bf16", has_index, local_pages=2)
    order = [(c, i) for c in ("latent", "index") for i in range(78)]
    assert [(b.component, b.layer) for b in p.buffers] == order
    assert [len(b.pages) for b in p.index] == [2 * h for h in has_index]
    assert all(len(b.pages) == 2 for b in p.latent)
    assert [b.layer for b in p.index] == list(range(78)) and p.index[77] is p.buffers[-1]
    assert p.page_bytes() == sum(b.pages[0].numel() for b in p.buffers if len(b.pages))
    assert len(p.signature().splitlines()) == 156
    assert p.signature() == pool("bf16", has_index, local_pages=9).signature()
    assert p.signature() != pool("fp32", has_index).signature()
    assert p.signature() != pool("bf16", has_index[::-1]).signature()
    assert p.signature() != pool("bf16", has_index, P=4).signature()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_layers_of_another_rank_keep_their_place_and_take_no_memory(layers):
    has_index, holds = zip(*layers)
    p, whole = (Pool(PageLayout(cp_size=1, page_size=3), has_index=has_index, dims=TINY, holds=h,
                     format=format_of("bf16"), local_pages=4) for h in (holds, None))
    assert whole.holds == (True,) * len(layers) and p.holds == holds and p.has_index == has_index
    assert [(b.component, b.layer, b.fmt) for b in p.buffers] == \
           [(b.component, b.layer, b.fmt) for b in whole.buffers]
    assert [len(b.pages) for b in p.latent] == [4 * h for h in holds]
    assert [len(b.pages) for b in p.index] == [4 * (h and i) for i, h in layers]
    assert p.num_bytes() == sum(b.pages.numel() for b in p.buffers)
    p.poison(range(4))
    assert all((b.pages == POISON).all() for b in p.buffers)
    assert (p.signature() == whole.signature()) == all(holds)

def test_holds_has_a_flag_a_layer():
    for holds in ((), (True,), (True,) * 4):
        with pytest.raises(InputError, match="a flag a layer"):
            build_buffers(PageLayout(cp_size=1, page_size=3), has_index=(True,) * 3, dims=TINY,
                          format=format_of("bf16"), local_pages=4, holds=holds)


def test_one_function_makes_the_list():
    p = pool()
    other = build_buffers(p.layout, has_index=p.has_index, dims=TINY, format=p.format,
                          local_pages=4)
    assert [(b.component, b.layer, b.fmt, b.pages.shape) for b in other] == \
           [(b.component, b.layer, b.fmt, b.pages.shape) for b in p.buffers]


@pytest.mark.parametrize("name", PLAIN)
def test_the_sink_is_never_data_and_nothing_else_is_touched(name):
    p = pool(name)
    p.poison(range(4))
    for b in p.buffers:
        if not len(b.pages): continue
        fmt, before = b.fmt, b.pages.clone()
        loc, x = torch.tensor([3, 5, 8, 11]), torch.randn(4, fmt.dim)
        store_rows(b.pages, fmt.encode(x), loc, fmt, 3)
        y = fmt.decode(gather_rows(b.pages, torch.tensor([-1, 3, 5, -1, 8, 11]), fmt, 3))
        assert torch.equal(fmt.encode(y[[1, 2, 4, 5]]), fmt.encode(x)) and (y[[0, 3]] == 0).all()
        changed = (b.pages != before).view(12, -1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {3, 5, 8, 11} and torch.equal(b.pages[0], before[0])
        rest = torch.tensor([0, 1, 2, 4, 6, 7, 9, 10])
        assert fmt.decode(gather_rows(b.pages, rest, fmt, 3)).isnan().all()


def test_poison_is_nan_in_every_format_also_those_to_come():
    p = pool()
    p.poison()
    for b in p.buffers:
        assert (b.pages[:1] == 255).all() and (b.pages[1:] == 0).all()
    byte = torch.full((4,), 255, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert byte.view(dtype).float().isnan().all()
    for bad in ([4], [-1], [0, 99]):
        with pytest.raises(PageIdError): p.poison(bad)
    assert (p.latent[0].pages[1:] == 0).all()


def test_fresh_pools_are_zeros_although_fresh_memory_is_poisoned():
    assert all((b.pages == 0).all() for b in pool("fp32").buffers)


PAGED = no_codec("paged", (128, 4), 128)

@pytest.mark.parametrize("fmt,P", [
    (PAGED, 64), (no_codec("odd", (5, 3, 2), 5), 3), (format_of("bf16").index(7), 1)],
    ids=["paged", "odd", "plain"])
def test_fields_tile_the_pages_and_the_verbs_agree(fmt, P):
    b = buffer(fmt, P, pages_of(fmt, P, 3))
    seen = [b.first_byte(loc, f) + i for loc in range(3 * P)
            for f, w in enumerate(fmt.fields) for i in range(w)]
    assert sorted(seen) == list(range(3 * fmt.page_bytes(P)))
    rows = torch.randint(0, 256, (3 * P, fmt.row_bytes), dtype=torch.uint8)
    store_rows(b.pages, rows, torch.arange(3 * P), fmt, P)
    assert b.pages.flatten()[torch.tensor(seen)].equal(rows.flatten())


def test_a_paged_token_is_not_contiguous():
    b = buffer(PAGED, 64, pages_of(PAGED, 64, 2))
    assert [b.first_byte(70, f) for f in (0, 1)] == [8448 + 6 * 128, 8448 + 8192 + 4 * 6]


WIDE = [(576, 64, 3_728_271, 2_147_484_096), (16_245, 64, 2_066 * 64, 2_147_978_880),
        (256, 64, 64_000_000, 16_384_000_000)]  # row bytes, page size, loc, its first byte

@pytest.mark.parametrize("row,P,loc,want", WIDE)
def test_addresses_do_not_wrap(row, P, loc, want):
    b = buffer(no_codec("wide", (row,), 1), P, torch.zeros(1, 1))
    for kind in (int, np.int32, np.int64, lambda v: np.array([v], np.int32),
                 lambda v: torch.tensor([v], dtype=torch.int32)):
        got = b.first_byte(kind(loc))
        assert int(np.ravel(got)[0]) == want
    assert b.first_byte(torch.tensor([loc], dtype=torch.int32)).dtype is torch.int64


@pytest.mark.parametrize("row,P,loc,want", WIDE)
def test_rows_far_out_in_a_sparse_pool(tmp_path, row, P, loc, want):
    page, pages = row * P, (loc + P) // P + 1
    file = tmp_path / "pool"
    with open(file, "wb") as f: f.truncate(pages * page)  # holes: takes no room until written
    flat = torch.from_file(str(file), shared=True, size=pages * page, dtype=torch.uint8)
    x = flat.view(pages, page)
    fmt = no_codec("wide", (row,), 1)
    locs = torch.tensor([loc - 1, loc, loc + 1])
    rows = torch.randint(1, 256, (3, row), dtype=torch.uint8)
    store_rows(x, rows[1:2], locs[1:2], fmt, P)
    got = gather_rows(x, locs, fmt, P)
    assert torch.equal(got[1], rows[1]) and not got[[0, 2]].any()
    assert torch.equal(flat[want:want + row], rows[1])


def test_refusals():
    with pytest.raises(InputError, match="there are fp32, bf16"): format_of("fp16")
    for bad in ((0, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(InputError): PayloadDims(**dict(zip(("latent", "rope", "index"), bad)))
    with pytest.raises(InputError): pool(local_pages=0)
    with pytest.raises(InputError): pool(has_index=[])
    huge = PayloadDims(latent=1023, rope=1, index=1)
    with pytest.raises(CapacityError) as e: pool("fp32", [True], 2**48, dims=huge, P=1)
    assert e.value.facts["bytes"] == 2**60 and e.value.exit_code == 2


def test_row_formats_travel_between_processes():
    for f in FORMATS.values():
        fmt = f.latent(512, 64)
        assert pickle.loads(pickle.dumps(fmt)) == fmt == f.latent(512, 64)
    with pytest.raises(TypeError): FORMATS["x"] = None


def test_it_draws_itself():
    assert pool()._repr_html_() == pool()._repr_html_() and "latent" in pool()._repr_html_()
    assert repr(pool()) == "Pool(3 layers, 2 with an indexer, bf16, 4 pages of 162 bytes)"
