"Attention over picked rows against a dense softmax in float64, and states that merge"
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.laws import PageIdError
from cpkv.ops import sparse as s
from cpkv.ops.rows import RowFormat, gather_rows, read_field, store_rows
from cpkv.ops.sparse import State

INF = torch.inf

def plain(dim):
    return RowFormat(name="fp32", dim=dim, fields=(4 * dim,),
                     encode=lambda x: x.contiguous().view(torch.uint8),
                     decode=lambda b: b.view(torch.float32))

def planes(dim):
    "Rows of two fields: bf16 numbers, then a scale of 2 that multiplies them"
    def encode(x): return torch.cat([(x / 2).bfloat16().view(torch.uint8),
                                     torch.full((len(x), 1), 2.).view(torch.uint8)], 1)
    def decode(b):
        scale = read_field(b, 2 * dim, 2 * dim + 4, torch.float32)
        return read_field(b, 0, 2 * dim, torch.bfloat16).float() * scale
    return RowFormat(name="planes", dim=dim, fields=(2 * dim, 4), encode=encode, decode=decode)

def dense_oracle(q, kv, loc, v_dim, scale):
    "One row and head at a time, only the rows that are there, float64"
    T, H, _ = q.shape
    out = torch.zeros(T, H, v_dim, dtype=torch.float64)
    lse = torch.full((T, H), -INF, dtype=torch.float64)
    for t in range(T):
        rows = kv[loc[t][loc[t] >= 0]].double()
        if not len(rows): continue
        score = q[t].double() @ rows.T * scale
        out[t], lse[t] = score.softmax(1) @ rows[:, :v_dim], score.logsumexp(1)
    return out, lse

def fill(fmt, kv, P):
    "Pages of rows; returns what the rows decode to"
    pages = torch.full((-(-len(kv) // P), fmt.page_bytes(P)), 255, dtype=torch.uint8)
    store_rows(pages, fmt.encode(kv), torch.arange(len(kv)), fmt, P)
    return pages, fmt.decode(gather_rows(pages, torch.arange(len(kv)), fmt, P))


# ---- against the oracle

@given(T=st.sampled_from([0, 32, 64]), H=st.integers(1, 4), D=st.integers(1, 40),
       K=st.integers(0, 20), n=st.integers(1, 30),
       P=st.integers(1, 5), make=st.sampled_from([plain, planes]), data=st.data())
def test_sparse_mla_is_a_dense_softmax_over_what_is_there(T, H, D, K, n, P, make, data):
    v_dim = data.draw(st.integers(1, D))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, fmt = torch.randn(T, H, D, generator=g), make(D)
    pages, kv = fill(fmt, torch.randn(n, D, generator=g), P)
    loc = torch.randint(-1, n, (T, K), generator=g)
    state = s.sparse_mla(q, pages, loc, fmt, P, v_dim=v_dim, scale=.4)
    out, lse = dense_oracle(q, kv, loc, v_dim, .4)
    torch.testing.assert_close(state.out.double(), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.lse.double(), lse, rtol=1e-4, atol=1e-4)

def test_scores_far_from_zero_do_not_overflow():
    fmt, q = plain(4), torch.zeros(32, 1, 4)
    pages, kv = fill(fmt, torch.tensor([[1., 0, 0, 0], [1.01, 0, 0, 0], [-1, 0, 0, 0]]), 3)
    for big in (3e4, -3e4):
        q[:, :, 0] = big
        loc = torch.tensor([[0, 1, 2]]).expand(32, 3)
        state = s.sparse_mla(q, pages, loc, fmt, 3, v_dim=4, scale=1.)
        out, lse = dense_oracle(q, kv, loc, 4, 1.)
        assert bool(state.out.isfinite().all()) and bool(state.lse.isfinite().all())
        torch.testing.assert_close(state.out.double(), out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.lse.double(), lse)

def test_rows_with_none_one_and_five_keys_of_eight():
    "Field case 45: NaN in the first, the last and every unused slot; the row of none is zeros"
    fmt, kv, loc = plain(6), torch.full((24, 6), torch.nan), torch.full((32, 8), -1)
    kv[3:8] = torch.randn(5, 6)
    loc[1, 0], loc[2, :5] = 5, torch.arange(3, 8)
    q = torch.randn(32, 2, 6)
    state = s.sparse_mla(q, fmt.encode(kv).view(6, -1), loc, fmt, 4, v_dim=4, scale=.5)
    out, lse = dense_oracle(q, kv, loc, 4, .5)
    assert bool(state.out.isfinite().all())
    assert not state.out[0].any() and (state.lse[0] == -INF).all()
    torch.testing.assert_close(state.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.lse.double(), lse, rtol=1e-5, atol=1e-5)

def test_values_are_the_first_numbers_alone():
    "What follows the value may be anything finite in a key; it does not come out"
    fmt, kv, q = plain(5), torch.randn(4, 5), torch.randn(32, 1, 5)
    q[..., 3:] = 0
    loc = torch.arange(4).expand(32, 4)
    outs = []
    for tail in (0., 1e6):
        kv[:, 3:] = tail
        outs.append(s.sparse_mla(q, fmt.encode(kv).view(1, -1), loc, fmt, 4, v_dim=3, scale=1.).out)
    assert torch.equal(*outs)

def test_a_row_read_twice_counts_twice():
    fmt, kv, q = plain(3), torch.randn(2, 3), torch.randn(32, 1, 3)
    loc = torch.tensor([[0, 1, 1]]).expand(32, 3)
    state = s.sparse_mla(q, fmt.encode(kv).view(2, -1), loc, fmt, 1, v_dim=3, scale=1.)
    want = dense_oracle(q, kv, loc, 3, 1.)[0]
    torch.testing.assert_close(state.out.double(), want, rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize("K,D,part", [(5, 8, 32), (2048, 576, 2), (256, 96, 32),
                                      (1 << 20, 576, 1), (1024, 256, 16)])
def test_a_tile_is_taken_in_parts_that_the_shape_decides(K, D, part):
    assert s._part(K, D) == part and 32 % part == 0

def test_pages_are_not_written():
    fmt, kv = plain(3), torch.randn(4, 3)
    pages = fmt.encode(kv).view(2, -1)
    before = pages.clone()
    s.sparse_mla(torch.randn(32, 1, 3), pages, torch.randint(-1, 4, (32, 3)), fmt, 2, v_dim=2,
                 scale=1.)
    assert torch.equal(pages, before)


# ---- merging

def states(seed, n=3):
    g = torch.Generator().manual_seed(seed)
    def rand(*shape): return torch.randn(*shape, generator=g)
    made = [State(rand(32, 2, 5), 10 * rand(32, 2)) for _ in range(n)]
    for a in made:   # some are empty, some rows in all
        gone = torch.rand(32, 2, generator=g) < .3
        gone[0] = True
        a.out[gone], a.lse[gone] = 0, -INF
    return made

def bits(a): return a.contiguous().view(torch.int32)
def equal(a, b): return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b))
EMPTY = State(torch.zeros(32, 2, 5), torch.full((32, 2), -INF))

@given(st.integers(0, 999))
def test_merge_is_associative_to_rounding_and_commutative_to_the_bit(seed):
    a, b, c = states(seed)
    left, right = s.merge_states(s.merge_states(a, b), c), s.merge_states(a, s.merge_states(b, c))
    torch.testing.assert_close(left.out, right.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left.lse, right.lse, rtol=1e-6, atol=1e-6)
    assert equal(s.merge_states(a, b), s.merge_states(b, a))

@given(st.integers(0, 999))
def test_the_empty_state_is_the_exact_identity(seed):
    a = states(seed, 1)[0]
    a.out[1, 0], a.lse[1, 0] = -0., 1.   # even the sign of a zero stays
    assert equal(s.merge_states(a, EMPTY), a) and equal(s.merge_states(EMPTY, a), a)
    assert equal(s.merge_states(EMPTY, EMPTY), EMPTY)

def test_merged_parts_are_the_whole():
    fmt, kv, q = plain(9), torch.randn(40, 9), torch.randn(32, 3, 9)
    pages = fmt.encode(kv).view(10, -1)
    loc = torch.stack([torch.randperm(40)[:12] for _ in range(32)])
    loc[0] = -1
    owner = torch.where(loc >= 0, loc // 4 % 3, -1)
    parts = [s.sparse_mla(q, pages, torch.where(owner == r, loc, -1), fmt, 4, v_dim=7, scale=.5)
             for r in range(3)]
    merged = s.merge_states(s.merge_states(parts[2], parts[0]), parts[1])
    out, lse = dense_oracle(q, kv, loc, 7, .5)
    torch.testing.assert_close(merged.out.double(), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.lse.double(), lse, rtol=1e-5, atol=1e-5)

def test_merging_states_whose_sums_are_far_apart():
    a = State(torch.ones(1, 1, 2), torch.tensor([[200.]]))
    b = State(torch.full((1, 1, 2), 9.), torch.tensor([[-200.]]))
    assert equal(s.merge_states(a, b), a)
    two = s.merge_states(a, a)
    assert two.out.tolist() == a.out.tolist() and two.lse.item() == pytest.approx(200 + .6931472)


# ---- costs and refusals

def test_costs():
    assert s.sparse_mla_flops(3, 2, 3, 5, 4) == 2 * 3 * 3 * 2 * 9
    assert s.sparse_mla_bytes(32, 2, 3, 5, 4, 20) == 32 * (3 * 28 + 4 * 2 * 10)

def call(T=32, D=4, loc=((0, 1),), v_dim=2, rows=0, **kw):
    fmt = plain(4)
    return s.sparse_mla(torch.zeros(T, 1, D), torch.zeros(2, 32, dtype=torch.uint8),
                        torch.tensor(loc).expand(rows or T, -1), fmt, 2,
                        v_dim=v_dim, scale=1., **kw)

def test_the_refused_calls_would_else_be_fine(): assert call().out.shape == (32, 1, 2)

@pytest.mark.parametrize("bad,error", [
    (dict(T=31, rows=32), ValueError), (dict(D=5), ValueError), (dict(v_dim=5), ValueError),
    (dict(v_dim=0), ValueError),
    (dict(loc=((0, 4),)), PageIdError), (dict(loc=((0, -2),)), PageIdError)])
def test_refuses(bad, error):
    with pytest.raises(error): call(**bad)
