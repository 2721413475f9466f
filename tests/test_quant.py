"""8-bit rows against rows made by hand: bytes, zeros, NaN, turned keys, and a row's own bits

What is expected is built with `struct` and plain fp32 arithmetic of numpy, from the table of the
e4m3 numbers written out by the definition; none of it calls torch.
"""
import pickle, struct
from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.laws import InputError
from cpkv.ops import quant as m
from cpkv.ops.rows import gather_rows, store_rows

F32, NAN = np.float32, float("nan")
LATENTS = [(512, 64), (160, 16), (32, 16), (128, 1), (129, 3), (5, 2), (1, 1)]
FORMATS = {f"packed-{r}+{d}": m.packed_latent(r, d) for r, d in LATENTS}
FORMATS |= {f"fp8-{r}+{d}": m.plain_latent(r, d) for r, d in LATENTS[:1] + LATENTS[5:]}
FORMATS |= {f"index-{D}-{s}": m.fp8_index(D, s) for D in (1, 4, 32, 128) for s in m.SCALES}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))


# ---- by hand

def number(byte: int) -> float:
    "e4m3 by its definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa"
    e, f = byte >> 3 & 15, byte & 7
    if byte & 127 == 127: return NAN
    return (-1) ** (byte >> 7) * (f * 2.0**-9 if e == 0 else (8 + f) * 2.0**(e - 10))

UP = [number(b) for b in range(127)]   # 0 to 448, ascending

def nearest(x: float) -> int:
    "The byte of the nearest number, ties to the even byte, never above 448; exact"
    if x != x: return 127
    sign, x = 128 * (np.signbit(x)), abs(float(x))
    i = bisect_left(UP, x)
    if i == len(UP): return sign + 126
    if i == 0: return sign
    low, high = Fraction(x) - Fraction(UP[i - 1]), Fraction(UP[i]) - Fraction(x)
    return sign + (i - 1 if low < high or low == high and i % 2 else i)

def bf16(x: float) -> bytes:
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (u + 0x7FFF + (u >> 16 & 1)) >> 16)

def tile(xs, rule: str) -> tuple[bytes, F32]:
    amax = max(abs(F32(x)) for x in xs)
    if rule == "fp32": s = F32(amax) / F32(448)
    else:
        least = max(Fraction(float(amax)), Fraction(float(F32(1e-4))))
        s = next(F32(2.0**e) for e in range(-22, 128) if Fraction(2)**e * 448 >= least)
    return bytes(nearest(F32(x) / (s or F32(1))) for x in xs), s

def packed(xs, latent: int) -> bytes:
    parts = [tile(xs[i:min(i + 128, latent)], "fp32") for i in range(0, latent, 128)]
    return (b"".join(b for b, _ in parts) + b"".join(struct.pack("<f", s) for _, s in parts)
            + b"".join(bf16(x) for x in xs[latent:]))

def turned(key) -> list:
    "Signed sums by the parity of shared bits, exact for whole numbers; then one product"
    return [F32(s) * F32(len(key)**-.5) for s in signs(len(key)) @ np.array(key, np.int64)]

@lru_cache
def signs(D): return np.array([[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)], np.int64)

def rows_of(fmt, x) -> list[bytes]: return [bytes(r.tolist()) for r in fmt.encode(x)]
def wide(*shape, low=-6, high=6):
    "Numbers of every size, some of them zero"
    return torch.randn(*shape) * 10.0 ** torch.randint(low, high, shape) * (torch.rand(shape) > .1)
def same(a, b): return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- e4m3

def test_the_table_of_numbers():
    got = m.from_e4m3(torch.arange(256, dtype=torch.uint8)).tolist()
    assert struct.pack("<256f", *got[:127], 0, *got[128:255], 0) == \
           struct.pack("<256f", *(0 if b & 127 == 127 else number(b) for b in range(256)))
    assert got[127] != got[127] and got[255] != got[255] and UP[-1] == 448 and UP[1] == 2**-9

def test_every_number_every_tie_and_its_neighbours():
    x = [F32(v) for v in UP] + [F32((a + b) / 2) for a, b in zip(UP, UP[1:])]
    x += [np.nextafter(v, F32(s), dtype=F32) for v in x for s in (0, np.inf)]
    x = np.array(x + [-v for v in x], F32)
    assert m.to_e4m3(torch.from_numpy(x)).tolist() == [nearest(v) for v in x]

@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_number(xs):
    for b, x in zip(m.to_e4m3(torch.tensor(xs)).tolist(), xs):
        assert b & 127 == 127 if x != x else b == nearest(x)

def test_beyond_the_largest():
    x = torch.tensor([448, 449, 463.9, 464, 465, 480, 1e4, 3.4e38, torch.inf])
    for n in range(1, 40):   # also in the tail of a vector
        assert m.to_e4m3(x.repeat(n)).tolist() == [126] * 9 * n
        assert m.to_e4m3(-x.repeat(n)).tolist() == [254] * 9 * n
        assert m.from_e4m3(m.to_e4m3(torch.full((n,), NAN))).isnan().all()
    assert m.to_e4m3(torch.tensor([465.], dtype=torch.bfloat16)).item() == 126

@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 100])
def test_the_place_in_a_vector_does_not_show(n):
    x = wide(n)
    assert m.to_e4m3(x).tolist() == [nearest(v) for v in x.numpy()]


# ---- scales

@given(st.floats(0, 2.0**127, width=32))
def test_a_power_of_two_is_the_least_that_holds_the_tile(amax):
    s = Fraction(m.ue8m0_scale(torch.tensor([amax])).item())
    a = max(Fraction(amax), Fraction(float(F32(1e-4))))
    assert 224 * s < a <= 448 * s and (s.numerator == 1 or s.denominator == 1)
    assert bin(s.numerator * s.denominator).count("1") == 1

def test_powers_of_two_at_their_borders():
    for k in (-20, -3, 0, 1, 9, 100):
        a = F32(448 * 2.0**k)
        x = torch.tensor([np.nextafter(a, F32(0)), a, np.nextafter(a, F32(np.inf))])
        assert m.ue8m0_scale(x).tolist() == [2.0**k, 2.0**k, 2.0**(k + 1)]
    assert m.ue8m0_scale(torch.tensor([0, 1e-30, 1e-4])).tolist() == [2.0**-22] * 3
    assert m.ue8m0_scale(torch.tensor([NAN, torch.inf])).isnan().all()

@given(st.floats(0, 2.0**127, width=32))
def test_a_scale_is_one_division(amax):
    assert m.fp32_scale(torch.tensor([amax])).item() == F32(amax) / F32(448)


# ---- latent rows

def test_a_row_written_out():
    fmt = m.packed_latent(4, 2)
    assert rows_of(fmt, torch.tensor([[896., -2, 1, 0, 1, -0.5]])) == [bytes.fromhex(
        "7e b8 30 00"          # 448, -1, 0.5, 0
        "00 00 00 40"          # 2.0
        "80 3f 00 bf")]        # 1, -0.5
    assert m.plain_latent(3, 1).encode(torch.tensor([[1., -448, 2**-9, 600]])).tolist() == [[0x38, 0xFE, 1, 0x7E]]

@pytest.mark.parametrize("latent,rope", LATENTS)
def test_packed_rows_are_those_made_by_hand(latent, rope):
    fmt, x = m.packed_latent(latent, rope), wide(5, latent + rope)
    x[1, :latent] = 0
    x[2] *= 1e-30
    want = [packed(r, latent) for r in x.numpy()]
    assert rows_of(fmt, x) == want
    assert fmt.fields == (len(want[0]),) == (latent + 4 * -(-latent // 128) + 2 * rope,)

def test_quotients_that_are_ties():
    "A true division; the product with one over the scale lands beside some of them"
    ties = [(a + b) / 2 for a, b in zip(UP[8:], UP[9:])]
    for s in range(3, 99, 2):
        x = torch.tensor([448.0 * s, *(s * t for t in ties)])[None]
        value, scale = m.encode_tiles(x, 128, m.fp32_scale)
        assert scale.item() == s and value[0].tolist() == [126, *map(nearest, ties)]

@pytest.mark.parametrize("latent,rope", LATENTS)
def test_decoded_rows_are_products_of_what_is_stored(latent, rope):
    fmt, N = m.packed_latent(latent, rope), -(-latent // 128)
    value = torch.randint(0, 127, (6, latent), dtype=torch.uint8)
    scale = np.exp(np.random.randn(6, N)).astype(F32)
    tail = np.random.randn(6, rope).astype(F32)
    rows = [bytes(v.tolist()) + struct.pack(f"<{N}f", *s) + b"".join(map(bf16, t)) for v, s, t in zip(value, scale, tail)]
    got = fmt.decode(torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(6, -1)).numpy()
    for i in range(6):
        assert got[i, :latent].tolist() == [F32(number(int(b))) * scale[i, j // 128] for j, b in enumerate(value[i])]
        assert [bf16(v) for v in got[i, latent:]] == [bf16(v) for v in tail[i]]

def test_the_656_bytes():
    fmt, x = m.packed_latent(512, 64), torch.zeros(1, 576)
    for t in range(4): x[0, 128 * t:128 * t + 2] = torch.tensor([448., -1]) * 2.0**t
    x[0, 512], x[0, 575] = 1, -2
    row = fmt.encode(x)[0].tolist()
    values, rest = [0x7E, 0xB8, *[0] * 126], row[530:654]
    assert len(row) == 656 and row[:512] == values * 4 and not any(rest)
    assert struct.unpack("<4f", bytes(row[512:528])) == (1, 2, 4, 8)
    assert row[528:530] == [0x80, 0x3F] and row[654:] == [0, 0xC0]

@pytest.mark.parametrize("latent,rope", LATENTS)
def test_plain_rows_are_those_made_by_hand(latent, rope):
    x = wide(4, latent + rope)
    assert rows_of(m.plain_latent(latent, rope), x) == [bytes(map(nearest, r)) for r in x.numpy()]


# ---- turned keys

@pytest.mark.parametrize("D", [1, 2, 8, 32, 128, 256])
def test_the_rotation(D):
    key = torch.randint(-50, 50, (7, D)).float()
    assert m.hadamard(key).tolist() == [turned([int(v) for v in k]) for k in key]
    q, k = torch.randn(3, 5, D), torch.randn(5, D)
    torch.testing.assert_close((m.hadamard(q) * m.hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(m.hadamard(m.hadamard(q)), q, rtol=1e-5, atol=1e-5)
    assert m.hadamard(q[:0]).shape == (0, 5, D) and m.hadamard(q).is_contiguous()

def test_the_rotation_changes_nothing_of_what_it_is_given():
    x = torch.randn(4, 8)
    for given_ in (x, x.bfloat16()):
        before = given_.clone()
        m.hadamard(given_)
        assert torch.equal(given_, before)
    assert m.hadamard(x.bfloat16()).dtype is torch.float32

def test_rotated_bits_are_a_rows_own():
    x = torch.randn(130, 3, 32)
    whole = m.hadamard(x)
    for n in range(1, 131): assert same(m.hadamard(x[130 - n:]), whole[130 - n:])
    alone = torch.full((9, 3, 32), NAN)
    alone[4] = x[77]
    assert same(m.hadamard(alone)[4], whole[77])
    assert same(m.hadamard(x.transpose(0, 1)), whole.transpose(0, 1))

@pytest.mark.parametrize("D", [0, 3, 12, 96])
def test_other_widths_are_refused(D):
    with pytest.raises(ValueError, match="power of two"): m.hadamard(torch.zeros(2, D))
    with pytest.raises(InputError, match=f"index={D}"): m.fp8_index(D)


# ---- index rows and their pages

@pytest.mark.parametrize("scale", m.SCALES)
@pytest.mark.parametrize("P,D", [(1, 32), (4, 8), (16, 128), (64, 128), (3, 1)])
def test_index_pages_are_those_made_by_hand(P, D, scale):
    n, fmt = 2 * P + 1, m.fp8_index(D, scale)   # the last page is begun only
    key = torch.randint(-99, 99, (n, D)).float()
    key[0] = 0
    pages = torch.full((4, fmt.page_bytes(P)), 255, dtype=torch.uint8)
    store_rows(pages, fmt.encode(key), torch.arange(P, P + n), fmt, P)
    want = bytearray(b"\xff" * 4 * P * (D + 4))
    for i, k in enumerate(key):
        page, offset = divmod(P + i, P)
        at = page * P * (D + 4)
        value, s = tile(turned([int(v) for v in k]), scale)
        want[at + offset * D:at + offset * D + D] = value
        want[at + P * D + 4 * offset:at + P * D + 4 * offset + 4] = struct.pack("<f", s)
    assert bytes(pages.flatten().tolist()) == bytes(want)
    got = fmt.decode(gather_rows(pages, torch.arange(P, P + n), fmt, P))
    assert same(got, fmt.decode(fmt.encode(key))) and got[0].eq(0).all()
    assert fmt.decode(gather_rows(pages, torch.tensor([-1, 0]), fmt, P))[0].eq(0).all()

def test_values_first_and_scales_after():
    "Four tokens of eight numbers, scales 1, 2, 4, 8: read as pairs, the same 48 bytes say something else"
    fmt = m.fp8_index(8)
    value = torch.randint(0, 120, (4, 8), dtype=torch.uint8)
    page = bytes(value.flatten().tolist()) + struct.pack("<4f", 1, 2, 4, 8)
    pages = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(1, 48)
    got = fmt.decode(gather_rows(pages, torch.arange(4), fmt, 4))
    assert got.tolist() == [[number(b) * 2**i for b in v.tolist()] for i, v in enumerate(value)]
    assert not same(fmt.decode(pages.view(4, 12)), got)

def test_a_token_moves_with_its_key_and_its_scale():
    "From 5 to 70: the bytes lie apart, and the neighbours stay"
    fmt, key = m.fp8_index(128), torch.randn(128, 128)
    pages = torch.zeros(2, 8448, dtype=torch.uint8)
    store_rows(pages, fmt.encode(key), torch.arange(128), fmt, 64)
    before = pages.clone()
    store_rows(pages, gather_rows(pages, torch.tensor([5]), fmt, 64), torch.tensor([70]), fmt, 64)
    changed = (pages != before).flatten().nonzero().flatten().tolist()
    key_bytes, scale_bytes = range(8448 + 768, 8448 + 896), range(8448 + 8216, 8448 + 8220)
    assert changed and all(c in key_bytes or c in scale_bytes for c in changed)
    assert torch.equal(pages[1, 768:896], pages[0, 640:768]) and torch.equal(pages[1, 8216:8220], pages[0, 8212:8216])


# ---- laws of all of them

@every_format
def test_zeros_are_zeros(fmt):
    for zero in (torch.zeros(3, fmt.dim), -torch.zeros(3, fmt.dim)):
        assert fmt.decode(fmt.encode(zero)).eq(0).all()
    assert fmt.decode(torch.zeros(2, fmt.row_bytes, dtype=torch.uint8)).eq(0).all()

@pytest.mark.parametrize("t", range(4))
def test_a_tile_of_zeros_among_others(t):
    fmt, x = m.packed_latent(512, 64), torch.randn(2, 576)
    x[1, 128 * t:128 * t + 128] = 0
    y = fmt.decode(fmt.encode(x))
    assert y.isfinite().all() and y[1, 128 * t:128 * t + 128].eq(0).all()
    assert y.eq(0).sum() <= 128 + 8

@every_format
def test_poison_is_seen(fmt):
    assert fmt.decode(torch.full((2, fmt.row_bytes), 255, dtype=torch.uint8)).isnan().all()
    x = torch.randn(3, fmt.dim)
    x[1] = NAN
    assert fmt.decode(fmt.encode(x)).isnan().all(1).tolist() == [False, True, False]

@pytest.mark.parametrize("bad", [NAN, torch.inf, -torch.inf])
def test_what_is_not_finite_takes_its_tile_and_no_other(bad):
    fmt, x = m.packed_latent(160, 4), torch.randn(4, 164)
    x[0, 3] = x[1, 159] = x[2, 163] = bad
    y = fmt.decode(fmt.encode(x))
    gone = [~r.isfinite() for r in y]
    assert [g.nonzero().flatten().tolist() for g in gone] == [[*range(128)], [*range(128, 160)], [163], []]
    for scale in m.SCALES:
        k = torch.randn(3, 32)
        k[1, 9] = bad
        y = m.fp8_index(32, scale).decode(m.fp8_index(32, scale).encode(k))
        assert y.isnan().all(1).tolist() == [False, True, False] and y[[0, 2]].isfinite().all()

@every_format
def test_a_rows_bytes_are_its_own(fmt):
    x = wide(130, fmt.dim)
    alone = torch.cat([fmt.encode(x[i:i + 1]) for i in range(130)])
    decoded = torch.cat([fmt.decode(alone[i:i + 1]) for i in range(130)])
    for n in range(1, 131):
        order = (torch.arange(n) * 7 + n) % 130
        assert torch.equal(fmt.encode(x[order]), alone[order])
        assert same(fmt.decode(alone[order]), decoded[order])
    for place in (0, 1, 15, 31, 32, 63):
        among = torch.full((64, fmt.dim), NAN)
        among[place] = x[77]
        assert torch.equal(fmt.encode(among)[place], alone[77])

@every_format
def test_strides_and_borders_do_not_show(fmt):
    x = wide(6, fmt.dim)
    rows = fmt.encode(x)
    y = fmt.decode(rows)
    big = torch.full((6, fmt.dim + 3), NAN)
    big[:, 2:2 + fmt.dim] = x
    for other in (big[:, 2:2 + fmt.dim], x.t().contiguous().t(), x.repeat_interleave(2, 0)[::2]):
        assert torch.equal(fmt.encode(other), rows)
    wider = torch.full((6, fmt.row_bytes + 3), 255, dtype=torch.uint8)
    wider[:, 1:1 + fmt.row_bytes] = rows
    for n in (0, 1, 6):
        assert same(fmt.decode(wider[:n, 1:1 + fmt.row_bytes]), y[:n])
        assert fmt.encode(x[:n]).shape == (n, fmt.row_bytes) and fmt.decode(rows[:n]).shape == (n, fmt.dim)
    assert torch.equal(fmt.encode(x.bfloat16()), fmt.encode(x.bfloat16().float()))

@every_format
def test_equal_dims_are_equal_formats_in_another_process_too(fmt):
    assert pickle.loads(pickle.dumps(fmt)) == fmt
    assert m.packed_latent(5, 2) == m.packed_latent(5, 2) != m.packed_latent(4, 3)
    assert m.fp8_index(4) == m.fp8_index(4, "fp32") != m.fp8_index(4, "ue8m0")

@pytest.mark.parametrize("latent,rope", LATENTS)
def test_encoding_what_was_decoded_gives_the_same_bytes(latent, rope):
    for fmt in (m.packed_latent(latent, rope), m.plain_latent(latent, rope)):
        rows = fmt.encode(wide(200, latent + rope))
        assert torch.equal(fmt.encode(fmt.decode(rows)), rows)

def test_a_power_of_two_keeps_the_numbers_and_settles_at_once():
    x = wide(4000, 8, low=-1, high=1)
    once = m.encode_tiles(x, 8, m.ue8m0_scale)
    twice = m.encode_tiles(m.decode_tiles(*once, 8), 8, m.ue8m0_scale)
    third = m.encode_tiles(m.decode_tiles(*twice, 8), 8, m.ue8m0_scale)
    assert torch.equal(m.decode_tiles(*once, 8), m.decode_tiles(*twice, 8))
    assert all(torch.equal(a, b) for a, b in zip(twice, third))
    moved = (once[1] != twice[1]).flatten()
    assert 0 < moved.sum() < 1000 and torch.equal(moved, (once[0] & 127).amax(1).eq(nearest(224)))

@pytest.mark.parametrize("rule", m.SCALES)
def test_the_error_of_a_number(rule):
    x = wide(2000, 128)
    b, s = m.encode_tiles(x, 128, m.SCALES[rule])
    err = (m.decode_tiles(b, s, 128).double() - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, s.double() / 1024) * (1 + 2**-20)
    assert (err <= bound).all() and (err > .9 * bound).any()

def test_what_a_scale_rule_is_called():
    with pytest.raises(InputError, match="there are fp32, ue8m0"): m.fp8_index(8, "int8")
    with pytest.raises(TypeError): m.SCALES["x"] = None
    assert [m.fp8_index(8, s).name for s in m.SCALES] == ["fp8", "fp8.ue8m0"]
    assert {m.num_tiles(n) for n in (1, 127, 128)} == {1} and m.num_tiles(129) == 2
    assert m.hadamard_flops(3, 128) == 3 * 128 * 7 and m.hadamard_flops(1, 1) == 0

@pytest.mark.cuda
@every_format
def test_a_gpu_makes_the_same_bytes(fmt):
    x = wide(33, fmt.dim)
    rows = fmt.encode(x)
    assert torch.equal(fmt.encode(x.cuda()).cpu(), rows)
    assert same(fmt.decode(rows.cuda()).cpu(), fmt.decode(rows))
