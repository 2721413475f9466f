"""A row's bits are its own: not its place's, its neighbours', its batch's or its thread's

Every check compares with the row *alone*: first in its tile, NaN all round. Rows come in batches of
every size from 1 to 130, each row in many places; and one probe stands in every place of a batch,
with NaN between. The mutants at the end break the law, and the same checks catch them. A mutant
that the library of this machine happens to forgive is skipped and says so.
"""
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from cpkv.ops.rows import RowFormat, read_field
from cpkv.ops.sparse import State
from cpkv.ops.table import REF
from cpkv.pool import FORMATS

MOST, EDGES = 130, (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)
NAN = float("nan")


# ---- rows, batches, and what the law says

def blank(rows: torch.Tensor, n: int) -> torch.Tensor:
    "Rows that stand beside: NaN, or other rows' integers"
    if rows.dtype.is_floating_point: return torch.full((n, *rows.shape[1:]), NAN)
    return rows[torch.arange(n) % len(rows)]

def batch(rows, index, pad=True):
    "Rows at `index` (-1: a blank), whole tiles"
    out = []
    for r in rows:
        t = torch.cat([r, blank(r, 1)])[index]
        out.append(torch.cat([t, blank(r, -len(t) % 32)]) if pad else t)
    return out

def outputs(verb, tensors, n):
    "What a verb makes of the first n rows"
    made = verb(*tensors)
    return [m[:n] for m in (made if isinstance(made, tuple) else (made,))]

def same(a, b):
    "Equal bits: 0.0 is not -0.0"
    if a.dtype != torch.float32: return torch.equal(a, b)
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))

def differences(verb, rows, sizes, *, pad=True, probes=EDGES):
    "Batches in which a row is not what it is alone; alone it must not be NaN"
    n = max(sizes)
    alone = [torch.cat(parts) for parts in
             zip(*(outputs(verb, batch(rows, torch.tensor([i])), 1) for i in range(n)))]
    bad = [("NaN", 1)] if any(bool((a != a).any()) for a in alone) else []
    for T in sizes:
        even = torch.arange(T) % 2 == 0
        cases = {"distinct": (torch.arange(T) + 7 * T) % n}
        if T in probes:
            cases |= {"even": torch.where(even, 3 % n, -1), "odd": torch.where(even, -1, 3 % n)}
        for name, index in cases.items():
            real, got = index >= 0, outputs(verb, batch(rows, index, pad), T)
            equal = all(same(g[real], a[index[real]]) for g, a in zip(got, alone))
            if not equal: bad.append((name, T))
    return bad

def holds(verb, rows, sizes=range(1, MOST + 1)): assert differences(verb, rows, sizes) == []


# ---- every verb

def rand(*shape): return torch.randn(*shape)
WIDTHS = (7, 33, 64, 65, 100)

@pytest.mark.parametrize("I,O", [(7, 33), (33, 7), (64, 2), (65, 65), (100, 1), (1, 100),
                                 (192, 48)])
def test_dense(I, O):
    w = rand(O, I)
    holds(lambda x: REF.dense(x, w), [rand(MOST, I)])

def test_dense_bf16_weights():
    w = rand(40, 33).bfloat16()
    holds(lambda x: REF.dense(x, w), [rand(MOST, 33)], EDGES)

@pytest.mark.parametrize("H,I,O", [(1, 33, 7), (3, 7, 65), (4, 64, 100)])
def test_dense_heads(H, I, O):
    w = rand(H, O, I)
    holds(lambda x: REF.dense_heads(x, w), [rand(MOST, H, I)])

@pytest.mark.parametrize("D", WIDTHS)
def test_norms(D):
    w, b = rand(D), rand(D)
    holds(lambda x: REF.rms_norm(x, w, 1e-6), [rand(MOST, D)])
    holds(lambda x: REF.layer_norm(x, w, b, 1e-6), [rand(MOST, D)])
    holds(lambda x: REF.rms_norm(x, w, 1e-6), [rand(MOST, 3, D)], EDGES)

@pytest.mark.parametrize("verb", ["rope_interleaved", "rope_half"])
@pytest.mark.parametrize("H,D", [(1, 2), (3, 14), (2, 66)])
def test_rope(verb, H, D):
    angle = rand(MOST, D // 2)
    holds(getattr(REF, verb), [rand(MOST, H, D), angle.cos(), angle.sin()])

@pytest.mark.parametrize("D", WIDTHS)
def test_silu_mul(D):
    holds(REF.silu_mul, [rand(MOST, D), rand(MOST, D)])
    holds(lambda x: REF.silu_mul(*x.chunk(2, 1)), [rand(MOST, 2 * D)], EDGES)

@pytest.mark.parametrize("E,k,groups,open_groups", [(7, 3, 1, 1), (12, 4, 4, 2), (33, 8, 3, 2),
                                                    (100, 8, 1, 1)])
def test_route(E, k, groups, open_groups):
    bias = rand(E) / 4
    holds(lambda x: REF.route(x, bias, k=k, num_groups=groups, topk_groups=open_groups,
                              normalize=True, scale=2.5),
          [rand(MOST, E)])

@pytest.mark.parametrize("E,K,D,width", [(5, 2, 33, 7), (8, 3, 64, 24), (2, 1, 100, 65)])
def test_experts(E, K, D, width):
    gate_up, down = rand(E, 2 * width, D), rand(E, D, width)
    picked = rand(MOST, E).topk(K).indices
    holds(lambda x, p, w: REF.experts(x, p, w, gate_up, down),
          [rand(MOST, D), picked, rand(MOST, K)])

@pytest.mark.parametrize("H,D", [(1, 33), (3, 7), (16, 32), (7, 100)])
def test_index_logits(H, D):
    "Rows of the sparse path are their own tiles: padded or not, the same"
    k, rows = rand(512, D), [rand(MOST, H, D), rand(MOST, H)]
    holds(lambda q, w: REF.index_logits(q, w, k), rows)
    assert differences(lambda q, w: REF.index_logits(q, w, k), rows, EDGES, pad=False) == []

@pytest.mark.parametrize("H,D", [(1, 33), (3, 7), (16, 32), (64, 128)])
def test_index_logits_of_a_key_do_not_see_how_many_there_are(H, D):
    q, w, k = rand(3, H, D), rand(3, H), rand(80 * 256, D)
    want = REF.index_logits(q, w, k)
    for tiles in (1, 2, 3, 15, 16, 17, 63, 64, 65, 79):
        assert torch.equal(REF.index_logits(q, w, k[-tiles * 256:]), want[:, -tiles * 256:])

def test_index_logits_of_a_key_do_not_see_its_neighbours_or_its_place():
    q, w, k = rand(32, 3, 33), rand(32, 3), rand(512, 33)
    want = REF.index_logits(q, w, k)
    for place in (0, 1, 17, 255, 256, 300, 511):
        other = torch.full((512, 33), NAN)
        other[place] = k[77]
        assert torch.equal(REF.index_logits(q, w, other)[:, place], want[:, 77])

@pytest.mark.parametrize("N,k", [(1, 5), (33, 8), (300, 65)])
def test_topk(N, k):
    rows = [torch.randint(-1, 2, (MOST, N)).float(), torch.randint(0, N + 1, (MOST,))]
    holds(lambda x, v: REF.topk(x, v, k), rows)
    assert differences(lambda x, v: REF.topk(x, v, k), rows, EDGES, pad=False) == []

@pytest.mark.parametrize("H,D,V,K", [(1, 7, 5, 5), (3, 33, 17, 33), (4, 96, 64, 64),
                                     (2, 65, 65, 100)])
def test_sparse_mla(H, D, V, K):
    fmt, P, n = FORMATS["fp32"].latent(D - 2, 2), 4, 40
    kv = rand(n, D)
    kv[0] = kv[-1] = NAN  # the sink, and what -1 would be
    pages = fmt.encode(kv).view(n // P, -1)
    loc = torch.randint(1, n - 1, (MOST, K)).sort(1).values
    loc = torch.where(torch.arange(K) < torch.randint(0, K + 1, (MOST, 1)), loc, -1)
    def verb(q, l): return REF.sparse_mla(q, pages, l, fmt, P, v_dim=V, scale=.3)
    rows = [rand(MOST, H, D), loc]
    holds(verb, rows)
    assert differences(verb, rows, EDGES, pad=False) == []

def test_sparse_mla_in_parts_of_a_tile():
    "Long and wide selections are gathered some rows at a time; where a part ends does not show"
    fmt, P, n = FORMATS["bf16"].latent(512, 64), 64, 128
    pages = fmt.encode(rand(n, 576)).view(n // P, -1)
    rows = [rand(33, 2, 576), torch.randint(0, n, (33, 1000))]
    def verb(q, loc): return tuple(REF.sparse_mla(q, pages, loc, fmt, P, v_dim=512, scale=.04))
    whole = outputs(verb, batch(rows, torch.arange(33)), 33)
    for i in (0, 1, 3, 4, 30, 31, 32):
        alone = outputs(verb, batch(rows, torch.tensor([i])), 1)
        assert all(same(a[0], w[i]) for a, w in zip(alone, whole))

def test_merge_states():
    a, b = State(rand(MOST, 3, 7), 9 * rand(MOST, 3)), State(rand(MOST, 3, 7), 9 * rand(MOST, 3))
    b.lse[::5] = -torch.inf
    holds(lambda *t: tuple(REF.merge_states(State(*t[:2]), State(*t[2:]))), [*a, *b])

def _encode(x):  # eight whole numbers and their scale: two planes
    scale = x.abs().amax(1, keepdim=True) / 127
    value = (x / scale.masked_fill(scale == 0, 1)).round().to(torch.int8)
    return torch.cat([value.view(torch.uint8), scale.view(torch.uint8)], 1)
def _decode(b): return read_field(b, 0, 8, torch.int8) * read_field(b, 8, 12, torch.float32)
TOY = RowFormat(name="toy", dim=8, fields=(8, 4), encode=_encode, decode=_decode)

@pytest.mark.parametrize("fmt", [FORMATS["fp32"].latent(5, 2), FORMATS["bf16"].latent(31, 2),
                                 FORMATS["bf16"].index(7), TOY],
                         ids=["fp32-7", "bf16-33", "bf16-index-7", "planes"])
def test_encode_store_gather_decode(fmt):
    "Rows at other locs, read in another order: the same numbers"
    P = 4
    def through(x):
        n = len(x)
        loc = (torch.arange(n) * 5 + 3) % 193   # 193 is prime: all differ
        pages = torch.full((49, fmt.page_bytes(P)), 255, dtype=torch.uint8)
        REF.store_rows(pages, fmt.encode(x), loc, fmt, P)
        order = torch.arange(n).flip(0)
        rows = REF.restore_rows(REF.gather_rows(pages, loc[order], fmt, P), order)
        copied = REF.gather_pages(pages, torch.arange(49).flip(0))
        again = REF.gather_rows(copied, (48 - loc // P) * P + loc % P, fmt, P)
        assert torch.equal(again, rows)
        return fmt.decode(rows)
    holds(through, [rand(MOST, fmt.dim)])


# ---- a whole layer

@lru_cache
def layer(ops=REF, D=36, H=3, nope=9, rope=6, latent=13, k=24, E=6):
    "Norms, RoPE, indexer, sparse MLA and a mixture of experts over a context of 60 rows"
    g = torch.Generator().manual_seed(1)
    def w(*shape): return torch.randn(*shape, generator=g) / shape[-1] ** .5
    wq, wo = w(H * (nope + rope), D), w(D, H * 11)
    absorb, value = w(H, latent, nope), w(H, 11, latent)
    iq, iw, keys = w(4 * rope, D), w(4, D), torch.randn(256, rope, generator=g)
    gate, gate_up, down, norm, b = w(E, D), w(E, 2 * 21, D), w(E, D, 21), w(D), w(D)
    fmt, P = FORMATS["fp32"].latent(latent, rope), 4
    kv = torch.randn(60, latent + rope, generator=g)
    kv[0], keys[60:] = NAN, NAN
    pages = fmt.encode(kv).view(15, -1)
    def run(x, cos, sin, visible):
        h = ops.rms_norm(x, norm, 1e-6)
        iq_THD = ops.rope_half(ops.dense(h, iq).view(-1, 4, rope), cos, sin)
        picked = ops.topk(ops.index_logits(iq_THD, ops.dense(h, iw), keys), visible, k)
        q = ops.dense(h, wq).view(-1, H, nope + rope)
        q = torch.cat([ops.dense_heads(q[..., :nope], absorb),
                       ops.rope_interleaved(q[..., nope:], cos, sin)], 2)
        loc = torch.where(picked > 0, picked.long(), -1)
        s = [ops.sparse_mla(q, pages, torch.where(part, loc, -1), fmt, P, v_dim=latent, scale=.3)
             for part in (loc % 2 == 0, loc % 2 == 1)]
        out = ops.dense_heads(ops.merge_states(*s).out, value).flatten(1)
        x = x + ops.dense(out, wo)
        h = ops.layer_norm(x, norm, b, 1e-6)
        chosen = ops.route(ops.dense(h, gate), b[:E], k=2, num_groups=3, topk_groups=2,
                           normalize=True, scale=1.5)
        shared = ops.dense(ops.silu_mul(*ops.dense(h, gate_up[0]).chunk(2, 1)), down[0])
        return x + ops.experts(h, *chosen, gate_up, down) + shared
    return run

def layer_rows(n=MOST, D=36, rope=6):
    angle = rand(n, rope // 2)
    return [rand(n, D), angle.cos(), angle.sin(), torch.randint(0, 61, (n,))]

def test_a_whole_layer_in_every_batch(): holds(layer(), layer_rows())

def test_a_whole_layer_is_finite_and_every_row_its_own():
    rows = layer_rows()
    whole = layer()(*batch(rows, torch.arange(MOST)))[:MOST]
    assert bool(whole.isfinite().all()) and len(whole.unique(dim=0)) == MOST

def test_twenty_runs_are_one():
    rows = batch(layer_rows(), torch.arange(100))
    first = layer()(*rows)[:100]
    for _ in range(20): assert same(layer()(*rows)[:100], first)


# ---- inputs that lie otherwise in memory

@pytest.mark.parametrize("D", WIDTHS)
def test_strides_and_borders_do_not_show(D):
    x, ws = rand(64, D), [rand(O, D) for O in (1, 2, 7, 33)]
    def lay(x, offset):
        big = torch.full((x.numel() + 16,), NAN)
        there = big[offset:offset + x.numel()].view(x.shape)
        return there.copy_(x)
    wide = torch.full((64, D + 3), NAN)
    wide[:, 2:2 + D] = x
    for other in (lay(x, 1), lay(x, 5), wide[:, 2:2 + D], x.t().contiguous().t()):
        for w in ws:
            assert torch.equal(REF.dense(other, w), REF.dense(x, w))
            assert torch.equal(REF.dense(x, lay(w, 3)), REF.dense(x, w))
            assert torch.equal(REF.dense_heads(other[:, None], w[None]),
                               REF.dense_heads(x[:, None], w[None]))
        assert torch.equal(REF.rms_norm(other, x[0], 1e-6), REF.rms_norm(x, x[0], 1e-6))
        assert torch.equal(REF.layer_norm(other, x[0], x[1], 1e-6),
                           REF.layer_norm(x, x[0], x[1], 1e-6))
        assert torch.equal(REF.silu_mul(other, other), REF.silu_mul(x, x))
        assert torch.equal(REF.index_logits(other[:, None], x[:, :1], rand(256, D).copy_(x[:1])),
                           REF.index_logits(x[:, None], x[:, :1], x[:1].expand(256, D)))


# ---- mutants: each breaks the law, and the checks above see it

FORGIVEN = "this machine's library gives the same bits here, so no test can see the mutant"

def caught(cases, **kw):
    "The checks find a difference in one of the cases"
    for verb, rows, sizes in cases:
        if differences(verb, rows, sizes, **kw): return
    pytest.skip(FORGIVEN)

def plain_dense(x, w): return x @ w.T

def test_mutant_a_plain_product_of_the_whole_batch():
    "Unpadded: one row takes another kernel than many"
    cases = []
    for I, O in ((192, 48), (33, 7), (65, 100), (577, 64)):
        w = rand(O, I)
        cases.append((lambda x, w=w: plain_dense(x, w), [rand(40, I)], (1, 2, 5, 33, 40)))
    caught(cases, pad=False)

def test_mutant_a_tile_whose_rows_start_anywhere():
    "Padded and tiled, but of odd width: the place in the tile shows"
    def tiled(x, w): return torch.cat([x[t:t + 32] @ w.T for t in range(0, len(x), 32)])
    cases = []
    for I, O in ((33, 7), (65, 2), (577, 7), (7, 7)):
        w = rand(O, I)
        cases.append((lambda x, w=w: tiled(x, w), [rand(40, I)], (1, 2, 5, 33, 40)))
    caught(cases)

@pytest.mark.parametrize("fn", [torch.sigmoid, F.silu])
def test_mutant_a_pointwise_verb_on_unpadded_rows(fn):
    "A vector's tail takes another formula"
    caught([(fn, [rand(MOST, D)], range(1, MOST + 1)) for D in (7, 33, 65, 100)], pad=False,
           probes=())

@pytest.mark.parametrize("threads", [2, 3])
def test_mutant_another_thread_count(threads):
    "The pieces that threads take end elsewhere, each with a tail of its own"
    rows = [rand(*shape) for shape in ((96, 1001), (160, 1003)) for _ in range(6)]
    one = [REF.silu_mul(x, torch.ones_like(x)) for x in rows]
    try:
        torch.set_num_threads(threads)
        more = [REF.silu_mul(x, torch.ones_like(x)) for x in rows]
    finally:
        torch.set_num_threads(1)
    again = [REF.silu_mul(x, torch.ones_like(x)) for x in rows]
    assert all(map(same, one, again))
    if all(map(same, one, more)): pytest.skip(FORGIVEN)

def test_mutant_a_selection_as_narrow_as_its_batch():
    "The longest row of a batch would choose the width of all"
    cases = []
    for n, wide, D, H in ((300, 512, 96, 4), (500, 1024, 192, 4), (100, 2048, 576, 2)):
        fmt = FORMATS["fp32"].latent(D - 32, 32)
        pages = fmt.encode(rand(wide, D)).view(wide // 64, -1)
        def narrow(q, loc, pages=pages, fmt=fmt, D=D):
            width = max(1, int((loc >= 0).sum(1).max()))
            return tuple(REF.sparse_mla(q, pages, loc[:, :width], fmt, 64, v_dim=D - 32, scale=.3))
        loc = torch.where(torch.arange(wide) < torch.tensor([[n], [wide]]), torch.arange(wide), -1)
        cases.append((narrow, rand(2, H, D), loc))
    for verb, q, loc in cases:   # row 0 among its like, and beside a long row
        alike, mixed = torch.tensor([0] * 32), torch.tensor([0] + [1] * 31)
        alone, company = verb(q[alike], loc[alike]), verb(q[mixed], loc[mixed])
        if not same(alone[0][0], company[0][0]): return
    pytest.skip(FORGIVEN)

def test_mutant_experts_combined_by_a_matrix_of_weights():
    "Weight zero times NaN is NaN: one bad row spoils all"
    def combine(x, picked, weight):
        gates = torch.zeros(len(x), 4).scatter(1, picked, weight)
        slots = (gates.T[:, :, None] * x).sum(1)          # each expert's input, mixed over rows
        return gates @ slots
    assert differences(combine, [rand(40, 8), rand(40, 4).topk(2).indices, rand(40, 2)], (1, 2, 33))

def test_mutant_holes_that_read_the_last_row():
    "-1 as an index is the last row; weight zero does not hide its NaN"
    kv = rand(8, 4)
    kv[-1] = NAN
    loc = torch.tensor([0, 3, -1])
    p = torch.softmax(torch.tensor([.1, .2, -torch.inf]), 0)
    assert bool((p @ kv[loc]).isnan().all())
    fmt = FORMATS["fp32"].latent(2, 2)
    rows = fmt.decode(REF.gather_rows(fmt.encode(kv).view(2, -1), loc, fmt, 4))
    assert bool((p @ rows).isfinite().all())
