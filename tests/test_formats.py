"""Every named format, from the numbers of a token to pages and back: bytes, other dims, queries"""
import pickle

import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.laws import InputError
from cpkv.layout import PageLayout
from cpkv.measure import calc_diff
from cpkv.ops.index import index_logits
from cpkv.ops.quant import SCALES, fp8_index, hadamard
from cpkv.ops.rows import gather_pages, gather_rows, restore_rows, store_rows
from cpkv.ops.sparse import sparse_mla
from cpkv.pool import FORMATS, Format, PayloadDims, Pool, format_of, pool_tokens, rank_bytes, token_bytes, unchanged

GLM, TINY = PayloadDims(latent=512, rope=64, index=128), PayloadDims(latent=32, rope=16, index=32)
SHORT, ODD = PayloadDims(latent=160, rope=2, index=8), PayloadDims(latent=5, rope=3, index=1)
INDEXERS = {"GLM-5": [True] * 78, "GLM-5.2": [True] * 21 + [False] * 57, "DeepSeek-V3.2": [True] * 61}
every_format = pytest.mark.parametrize("name", FORMATS)
every_dims = pytest.mark.parametrize("dims", [GLM, TINY, SHORT, ODD], ids=lambda d: f"{d.latent}+{d.rope}+{d.index}")


def formats_of(name, dims): return FORMATS[name].latent(dims.latent, dims.rope), FORMATS[name].index(dims.index)
def pool(name, dims=TINY, has_index=(True, False, True), local_pages=4, R=2, P=4, scale="fp32"):
    return Pool(PageLayout(cp_size=R, page_size=P), has_index=has_index, dims=dims,
                format=format_of(name, scale), local_pages=local_pages)


# ---- bytes

def test_the_names_and_their_parts():
    assert list(FORMATS) == ["fp32", "bf16", "fp8", "fp8_packed"]
    rows = {n: [f.row_bytes for f in formats_of(n, GLM)] for n in FORMATS}
    assert rows == dict(fp32=[2304, 512], bf16=[1152, 256], fp8=[576, 132], fp8_packed=[656, 132])
    assert [formats_of("fp8_packed", d)[0].row_bytes for d in (TINY, SHORT, ODD)] == [68, 172, 15]
    for name, latent, index in (("fp8", "fp8", "fp8"), ("fp8_packed", "fp8_packed", "fp8")):
        assert [f.name for f in formats_of(name, GLM)] == [latent, index]

@pytest.mark.parametrize("name,model,want", [
    ("fp8_packed", "GLM-5", 61_464), ("fp8_packed", "GLM-5.2", 53_940), ("fp8_packed", "DeepSeek-V3.2", 48_068),
    ("fp8", "GLM-5", 55_224), ("fp8", "DeepSeek-V3.2", 43_188), ("bf16", "GLM-5", 109_824)])
def test_bytes_of_a_token(name, model, want):
    assert sum(token_bytes(GLM, FORMATS[name], INDEXERS[model]).values()) == want

def test_halves_of_two_formats():
    mixed = Format("bf16+fp8", FORMATS["bf16"].latent, fp8_index, hadamard)
    assert sum(token_bytes(GLM, mixed, INDEXERS["DeepSeek-V3.2"]).values()) == 78_324

@given(st.sampled_from(sorted(FORMATS)), st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from([TINY, SHORT, ODD]),
       st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_tensors_have_the_bytes_of_the_closed_form(name, has_index, dims, local_pages, P, R):
    p = pool(name, dims, has_index, local_pages, R, P)
    one = sum(token_bytes(dims, p.format, has_index).values())
    want = rank_bytes(p.layout, local_pages, one)
    assert want == p.num_bytes() == sum(b.pages.numel() for b in p.buffers)
    assert pool_tokens(p.layout, want, one) == R * P * (local_pages - 1)

def test_a_page_of_a_transfer():
    p = pool("fp8_packed", GLM, [True], P=64)
    assert [b.page_bytes for b in p.buffers] == [41_984, 8_448]


# ---- rows in pages

@every_dims
@every_format
@pytest.mark.parametrize("P", [1, 4, 16, 64])
def test_rows_come_back_as_they_were_stored(name, dims, P):
    for fmt in formats_of(name, dims):
        n = 2 * P + 1
        x = torch.randn(n, fmt.dim)
        rows, loc = fmt.encode(x), torch.randperm(3 * P)[:n] + P   # page 0 is the sink
        pages = torch.full((4, fmt.page_bytes(P)), 255, dtype=torch.uint8)
        store_rows(pages, rows, loc, fmt, P)
        assert torch.equal(gather_rows(pages, loc, fmt, P), rows)
        order = torch.randperm(n)
        y = fmt.decode(gather_rows(pages, torch.cat([loc[order], torch.tensor([-1])]), fmt, P))
        assert torch.equal(y[:-1], fmt.decode(rows)[order]) and y[-1].eq(0).all()
        copied = gather_pages(pages, torch.tensor([3, 2, 1, 0]))
        assert torch.equal(gather_rows(copied, (3 - loc // P) * P + loc % P, fmt, P), rows)
        rest = torch.tensor(sorted(set(range(4 * P)) - set(loc.tolist())))
        assert fmt.decode(gather_rows(pages, rest, fmt, P)).isnan().all()

@every_format
def test_the_sink_is_never_data_and_nothing_else_is_touched(name):
    p = pool(name)
    p.poison(range(4))
    for b in p.buffers:
        if not len(b.pages): continue
        before, loc = b.pages.clone(), torch.tensor([4, 6, 11, 15])
        rows = b.fmt.encode(torch.randn(4, b.fmt.dim))
        store_rows(b.pages, rows, loc, b.fmt, 4)
        owned = {b.first_byte(at, f) + i for at in loc.tolist() for f, w in enumerate(b.fmt.fields) for i in range(w)}
        assert {i for i in (b.pages != before).flatten().nonzero().flatten().tolist()} <= owned
        assert torch.equal(b.pages[0], before[0])
        assert b.fmt.decode(gather_rows(b.pages, torch.arange(4), b.fmt, 4)).isnan().all()

@every_format
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_who_encodes_a_row_and_who_keeps_it_do_not_show(name, ranks):
    "Rows computed by any rank, in blocks of any length, gathered and stored by their owners: one pool's bytes"
    P, n = 4, 37
    lay = PageLayout(cp_size=ranks, page_size=P)
    for fmt in formats_of(name, TINY):
        x, slot = torch.randn(n, fmt.dim), torch.arange(n) + ranks * P
        rank_of = torch.randint(0, ranks, (n,))
        sent = torch.cat([fmt.encode(x[rank_of == r]) for r in range(ranks)])
        rows = restore_rows(sent, torch.argsort(torch.argsort(rank_of, stable=True)))
        assert torch.equal(rows, fmt.encode(x))
        for r in range(ranks):
            mine = lay.owner_of(slot) == r
            pages = torch.zeros(int(lay.loc_of(slot).max()) // P + 1, fmt.page_bytes(P), dtype=torch.uint8)
            store_rows(pages, rows[mine], lay.loc_of(slot[mine]), fmt, P)
            assert torch.equal(gather_rows(pages, lay.loc_of(slot[mine]), fmt, P), fmt.encode(x)[mine])

@every_format
def test_what_both_sides_of_a_transfer_compare(name):
    one = pool(name).signature()
    assert one == pool(name, local_pages=9).signature()
    assert all(one != pool(n).signature() for n in FORMATS if n != name)
    if FORMATS[name].index is fp8_index: assert one != pool(name, scale="ue8m0").signature()


# ---- numbers

@every_format
@every_dims
def test_attention_reads_what_was_decoded(name, dims):
    "Over encoded pages, or over the decoded numbers kept in fp32: the same bits"
    fmt, plain, P = FORMATS[name].latent(dims.latent, dims.rope), FORMATS["fp32"].latent(dims.latent, dims.rope), 4
    kv, q, loc = torch.randn(40, fmt.dim), torch.randn(32, 3, fmt.dim), torch.randint(-1, 40, (32, 24))
    rows = fmt.encode(kv)
    def state(f, rows):
        pages = torch.zeros(10, f.page_bytes(P), dtype=torch.uint8)
        store_rows(pages, rows, torch.arange(40), f, P)
        return sparse_mla(q, pages, loc, f, P, v_dim=dims.latent, scale=.2)
    got, want = state(fmt, rows), state(plain, plain.encode(fmt.decode(rows)))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    exact = state(plain, plain.encode(kv))
    assert calc_diff(got.out, exact.out) < dict(fp32=1e-12, bf16=1e-4).get(name, 2e-3)

@pytest.mark.parametrize("name,scale", [("fp32", "fp32"), ("bf16", "fp32"), *((n, s) for n in ("fp8", "fp8_packed") for s in SCALES)])
@pytest.mark.parametrize("D", [32, 128])
def test_queries_meet_their_keys(name, scale, D):
    f = format_of(name, scale)
    q, w, k = torch.randn(32, 16, D), torch.randn(32, 16), torch.randn(256, D)
    key = f.index(D).decode(f.index(D).encode(k))
    want = index_logits(q, w, k)
    assert calc_diff(index_logits(f.index_query(q), w, key), want) < 1e-3
    if f.index_query is hadamard: assert calc_diff(index_logits(q, w, key), want) > .1   # the turn forgotten

def test_only_turned_keys_have_turned_queries():
    assert [f.index_query for f in FORMATS.values()] == [unchanged, unchanged, hadamard, hadamard]
    q = torch.randn(3, 2, 5)
    assert unchanged(q) is q


# ---- names

def test_a_scale_rule_has_its_own_name():
    for name in ("fp8", "fp8_packed"):
        f = format_of(name, "ue8m0")
        assert f.name == f"{name}.ue8m0" and f.index(8).name == "fp8.ue8m0"
        assert f.index(8) == fp8_index(8, "ue8m0") and f.latent is FORMATS[name].latent
        assert f.index_query is hadamard and format_of(name) is FORMATS[name] and format_of(name).index(8).name == "fp8"
        assert pickle.loads(pickle.dumps(f)) == f
    x = torch.randn(50, 8)
    scale = format_of("fp8", "ue8m0").index(8).encode(x)[:, 8:].clone().view(torch.float32)
    assert torch.equal(scale, 2 ** scale.log2().round())

def test_refusals():
    with pytest.raises(InputError, match="there are fp32, bf16, fp8, fp8_packed"): format_of("fp4")
    with pytest.raises(InputError, match="there are fp32, ue8m0"): format_of("fp8", "e8m0")
    for name in ("fp32", "bf16"):
        with pytest.raises(InputError, match="have no scale"): format_of(name, "ue8m0")
    with pytest.raises(InputError, match="index=24"): pool("fp8", PayloadDims(latent=8, rope=2, index=24))
