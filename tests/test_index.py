"Scores of the indexer against float64, and the exact top-k against a slow one"
import math

import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.ops import index as ix

NAN, INF = math.nan, math.inf


# ---- scores

def slow_logits(q, w, k):
    product = torch.einsum("thd,nd->thn", q.double(), k.double())
    return torch.einsum("th,thn->tn", w.double(), product.relu())

@pytest.mark.parametrize("T,N,H,D", [(0, 256, 2, 4), (32, 0, 2, 4), (32, 256, 1, 1),
                                     (32, 512, 3, 7), (64, 256, 16, 33), (96, 768, 2, 128)])
def test_scores_are_the_definition(T, N, H, D):
    q, w, k = torch.randn(T, H, D), torch.randn(T, H), torch.randn(N, D)
    got = ix.index_logits(q, w, k)
    assert got.shape == (T, N) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), slow_logits(q, w, k), rtol=1e-4, atol=1e-4)

def test_heads_are_clipped_one_by_one():
    "relu before the sum: two heads of opposite sign do not cancel"
    q, w, k = torch.zeros(32, 2, 1), torch.ones(32, 2), torch.zeros(256, 1)
    q[:, 0], q[:, 1], k[0] = 1, -1, 3
    assert ix.index_logits(q, w, k)[0, :2].tolist() == [3, 0]

def test_a_nan_key_spoils_its_column_alone():
    q, w, k = torch.randn(32, 3, 9), torch.randn(32, 3), torch.randn(256, 9)
    clean = ix.index_logits(q, w, k)
    k[100] = NAN
    dirty = ix.index_logits(q, w, k)
    keep = torch.arange(256) != 100
    assert torch.equal(dirty[:, keep], clean[:, keep]) and bool(dirty[:, 100].isnan().all())

def test_queries_and_weights_in_bf16_or_strided_are_the_same_numbers():
    q, w = torch.randn(32, 3, 20).bfloat16(), torch.randn(3, 32).t()
    k = torch.randn(256, 40)[:, ::2]
    assert torch.equal(ix.index_logits(q, w, k),
                       ix.index_logits(q.float(), w.contiguous(), k.contiguous()))


# ---- top-k

def slow_topk(row, visible, k):
    "Sort by (score descending, position ascending), take k, sort by position"
    seen = [-INF if math.isnan(x) else x for x in row[:visible]]
    best = sorted(range(visible), key=lambda n: (-seen[n], n))[:k]
    return sorted(best) + [-1] * (k - len(best))

VALUES = st.sampled_from([0., -0., 0., 1., 1., -1., 2., INF, -INF, 1e-45, NAN])

@given(T=st.integers(0, 5), N=st.integers(0, 12), k=st.integers(1, 15), data=st.data())
def test_topk_is_the_slow_one(T, N, k, data):
    "Ties, exact zeros of both signs, infinities and NaN, visible and not"
    rows = data.draw(st.lists(st.lists(VALUES, min_size=N, max_size=N), min_size=T, max_size=T))
    visible = data.draw(st.lists(st.integers(0, N), min_size=T, max_size=T))
    got = ix.topk(torch.tensor(rows).view(T, N), torch.tensor(visible, dtype=torch.int64), k)
    assert got.dtype == torch.int32 and got.shape == (T, k)
    assert got.tolist() == [slow_topk(r, v, k) for r, v in zip(rows, visible)]

@pytest.mark.parametrize("T,N,k", [(3, 1000, 64), (2, 5000, 2048), (70, 300, 7), (1, 300_000, 100)])
def test_topk_of_many_columns_and_many_ties(T, N, k):
    "More than one step of rows, most scores exactly zero"
    x = (torch.randn(T, N) - 1.5).relu()
    visible = torch.randint(0, N + 1, (T,))
    visible[0] = N
    got = ix.topk(x, visible, k)
    for t in range(min(T, 5)):
        order = x[t, :visible[t]].sort(descending=True, stable=True).indices[:k].sort().values
        assert got[t, :len(order)].tolist() == order.tolist() and (got[t, len(order):] == -1).all()

@given(v=st.integers(0, 9), k=st.integers(1, 12), poison=st.sampled_from([NAN, INF, -INF, 3e38]))
def test_what_is_not_visible_never_matters(v, k, poison):
    x, seen = torch.tensor([[.5, -1, .5, 0, 2, .5, 0, 0, 1]]), torch.tensor([v])
    dirty = x.clone()
    dirty[:, v:] = poison
    assert torch.equal(ix.topk(dirty, seen, k), ix.topk(x, seen, k))
    assert torch.equal(ix.topk(torch.cat([dirty, dirty], 1), seen, k), ix.topk(x, seen, k))

def test_rows_with_none_one_and_five_visible_of_eight():
    "Field case 45"
    x = torch.full((3, 16), NAN)
    x[2, :5] = torch.tensor([3., 1, 2, 1, 0])
    x[1, 0] = -7
    got = ix.topk(x, torch.tensor([0, 1, 5]), 8)
    assert got.tolist() == [[-1] * 8, [0] + [-1] * 7, [0, 1, 2, 3, 4, -1, -1, -1]]

def test_ties_go_to_the_lowest_position_and_zeros_of_both_signs_tie():
    x = torch.tensor([[0., -0., 1., -0., 0., 1., 0.]])
    assert ix.topk(x, torch.tensor([7]), 4).tolist() == [[0, 1, 2, 5]]
    assert ix.topk(-x.abs(), torch.tensor([7]), 4).tolist() == [[0, 1, 3, 4]]

def test_a_visible_nan_is_picked_last():
    x = torch.tensor([[NAN, 1., NAN, 0.]])
    assert ix.topk(x, torch.tensor([4]), 2).tolist() == [[1, 3]]
    assert ix.topk(x, torch.tensor([4]), 3).tolist() == [[0, 1, 3]]

@given(st.permutations(range(9)), st.integers(1, 9))
def test_without_ties_the_set_is_the_same_in_every_order(order, k):
    x, order = torch.arange(9.)[None] ** 2, torch.tensor(order)
    moved = ix.topk(x[:, order], torch.tensor([9]), k)[0].long()
    assert sorted(order[moved].tolist()) == list(range(9 - k, 9))

def test_logits_are_not_written():
    x = torch.randn(4, 9)
    kept = x.clone()
    ix.topk(x, torch.tensor([9, 3, 0, 1]), 2)
    assert torch.equal(x, kept)

@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_visible_of_any_integer(dtype):
    assert ix.topk(torch.zeros(1, 4), torch.tensor([3], dtype=dtype), 2).tolist() == [[0, 1]]


# ---- costs and refusals

def test_costs():
    assert ix.index_logits_flops(3, 256, 4, 16) == 2 * 3 * 256 * 4 * 17
    assert ix.index_logits_bytes(32, 256, 4, 16) == 4 * (32 * (64 + 4 + 256) + 256 * 16)

def scores(q, w, k): return ix.index_logits(torch.zeros(q), torch.zeros(w), torch.zeros(k))

BAD = {
    "part of a key tile": lambda: scores((32, 2, 4), (32, 2), (255, 4)),
    "widths that a filling to 16 would hide": lambda: scores((32, 2, 7), (32, 2), (256, 9)),
    "weights of other heads": lambda: scores((32, 2, 4), (32, 3), (256, 4)),
    "weights of other rows": lambda: scores((32, 2, 4), (64, 2), (256, 4)),
    "k of zero": lambda: ix.topk(torch.zeros(1, 4), torch.tensor([4]), 0),
    "visible beyond the columns": lambda: ix.topk(torch.zeros(2, 4), torch.tensor([0, 5]), 2),
    "visible of other rows": lambda: ix.topk(torch.zeros(2, 4), torch.tensor([0]), 2),
}

@pytest.mark.parametrize("what", BAD)
def test_refuses(what):
    with pytest.raises(ValueError): BAD[what]()
