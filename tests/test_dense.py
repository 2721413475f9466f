"""Products in tiles, norms, RoPE, the gate and the experts: right, at odd sizes first

That bits do not depend on the batch is in test_row_invariance.
"""
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.ops import dense as d


def rand(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

@pytest.mark.parametrize("n,padded", [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64), (130, 160)])
def test_padding_is_to_whole_tiles(n, padded): assert d.pad_rows(n) == padded

@given(T=st.sampled_from([0, 32, 64, 96]), I=st.integers(1, 70), O=st.integers(1, 70),
       seed=st.integers(0, 9))
def test_dense_is_the_product(T, I, O, seed):
    x, w = rand(T, I, seed=seed), rand(O, I, seed=seed + 1)
    want = x.double() @ w.double().T
    torch.testing.assert_close(d.dense(x, w).double(), want, rtol=1e-5, atol=1e-4)

def test_bf16_weights_are_computed_in_fp32():
    x, w = rand(32, 50), rand(20, 50).bfloat16()
    assert torch.equal(d.dense(x, w), d.dense(x, w.float()))
    assert torch.equal(d.dense_heads(x[:, None], w[None]),
                       d.dense_heads(x[:, None], w[None].float()))

@given(T=st.sampled_from([0, 32, 64]), H=st.integers(1, 5), I=st.integers(1, 40),
       O=st.integers(1, 40))
def test_dense_heads_is_a_product_per_head(T, H, I, O):
    x, w = rand(T, H, I), rand(H, O, I, seed=1)
    want = torch.einsum("thi,hoi->tho", x.double(), w.double())
    torch.testing.assert_close(d.dense_heads(x, w).double(), want, rtol=1e-5, atol=1e-4)

def test_inputs_are_left_alone():
    x, w = rand(32, 33), rand(7, 33)
    kept = x.clone(), w.clone()
    d.dense(x, w); d.rms_norm(x, w[0], 1e-6); d.silu_mul(x, x)
    assert torch.equal(x, kept[0]) and torch.equal(w, kept[1])

@pytest.mark.parametrize("shape", [(32, 1), (32, 7), (64, 3, 33), (0, 5)])
def test_norms_are_those_of_the_textbook(shape):
    x, w, b = rand(*shape), rand(shape[-1], seed=1), rand(shape[-1], seed=2)
    X = x.double()
    rms = X / (X.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    centred = X - X.mean(-1, keepdim=True)
    ln = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b
    torch.testing.assert_close(d.rms_norm(x, w, 1e-5).double(), rms, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d.layer_norm(x, w, b, 1e-5).double(), ln, rtol=1e-5, atol=1e-5)

def test_norm_of_zeros_is_zero_and_not_nan():
    assert not d.rms_norm(torch.zeros(32, 5), torch.ones(5), 1e-6).any()
    assert not d.layer_norm(torch.zeros(32, 5), torch.ones(5), torch.zeros(5), 1e-6).any()


# ---- RoPE

def complex_rope(x_THD, angle_TP, pairs):
    "Each pair as a complex number, times exp(i angle)"
    a, b = pairs(x_THD.double())
    turn = torch.polar(torch.ones_like(angle_TP), angle_TP)[:, None]
    return torch.view_as_real(torch.complex(a, b) * turn)

@pytest.mark.parametrize("H,D", [(1, 2), (3, 6), (2, 64)])
def test_rope_turns_its_pairs(H, D):
    x, angle = rand(32, H, D), rand(32, D // 2, seed=1).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    neighbours = complex_rope(x, angle, lambda x: (x[..., ::2], x[..., 1::2])).flatten(-2)
    halves = complex_rope(x, angle, lambda x: x.chunk(2, -1)).transpose(-1, -2).flatten(-2)
    for turn, want in ((d.rope_interleaved, neighbours), (d.rope_half, halves)):
        torch.testing.assert_close(turn(x, cos, sin).double(), want, rtol=1e-5, atol=1e-5)

def test_the_two_ropes_are_one_up_to_the_order_of_numbers():
    x, angle = rand(32, 2, 10), rand(32, 5, seed=1)
    order = torch.cat([torch.arange(0, 10, 2), torch.arange(1, 10, 2)])
    assert torch.equal(d.rope_half(x[..., order], angle.cos(), angle.sin()),
                       d.rope_interleaved(x, angle.cos(), angle.sin())[..., order])

@pytest.mark.parametrize("T", [0, 32])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_rope_of_a_view_is_that_of_its_copy(T, start):
    "Heads cut out of a wider product, at odd places and of odd strides; no rows too"
    wide, angle = torch.randn(T, 19), torch.randn(T, 2)
    for turn in (d.rope_interleaved, d.rope_half):
        for x in (wide[:, None, start:start + 4], wide[:, start:start + 12].view(T, 3, 4)):
            got = turn(x, angle.cos(), angle.sin())
            assert torch.equal(got, turn(x.clone(), angle.cos(), angle.sin()))
            assert got.shape == x.shape

def test_rope_at_position_zero_is_nothing():
    x = rand(32, 2, 8)
    for turn in (d.rope_interleaved, d.rope_half):
        assert torch.equal(turn(x, torch.ones(32, 4), torch.zeros(32, 4)), x)


# ---- the gate

def slow_route(logits, bias, k, groups, open_groups, normalize, scale):
    "One row in plain Python over the verb's own sigmoid"
    E = len(logits)
    score = torch.sigmoid(logits.expand(32, E).contiguous())[0]
    choice = (score + bias).tolist()
    width = E // groups
    def worth(g): return sum(torch.tensor(sorted(choice[g * width:(g + 1) * width])[-2:]))
    best = sorted(range(groups), key=lambda g: (-float(worth(g)), g))[:open_groups]
    allowed = [e for e in range(E) if e // width in best]
    picked = sorted(allowed, key=lambda e: (-choice[e], e))[:k]
    w = score[picked].double()
    return picked, (w / w.sum() if normalize else w) * scale

@given(data=st.data(), width=st.integers(1, 4), groups=st.integers(1, 4), normalize=st.booleans())
def test_route_is_the_slow_one_with_ties(data, width, groups, normalize):
    E = width * groups
    open_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, width * open_groups))
    few = st.sampled_from([-1., 0., .5, 2.])   # few values: many ties
    logits = torch.tensor(data.draw(st.lists(few, min_size=E, max_size=E)))
    biases = st.sampled_from([0., .25, -.75])
    bias = torch.tensor(data.draw(st.lists(biases, min_size=E, max_size=E)))
    picked, weight = d.route(logits.expand(32, E), bias, k=k, num_groups=groups,
                             topk_groups=open_groups,
                             normalize=normalize, scale=2.5)
    want, w = slow_route(logits, bias, k, groups, open_groups, normalize, 2.5)
    assert picked.dtype == torch.int64
    assert picked[0].tolist() == want and picked[31].tolist() == want
    torch.testing.assert_close(weight[0].double(), w, rtol=1e-5, atol=1e-6)

def test_a_negative_bias_never_opens_a_closed_group():
    "Closed experts are -inf, not 0: with all choices below zero, 0 would win"
    picked, _ = d.route(torch.zeros(32, 8), torch.full((8,), -2.), k=4, num_groups=4, topk_groups=2,
                        normalize=True, scale=1.)
    assert picked[0].tolist() == [0, 1, 2, 3]

def test_the_bias_does_not_enter_the_weight():
    logits = rand(32, 6)
    for bias in (torch.zeros(6), torch.full((6,), 3.)):
        picked, weight = d.route(logits, bias, k=2, num_groups=1, topk_groups=1, normalize=False,
                                 scale=1.)
        assert torch.equal(weight, torch.sigmoid(logits).gather(1, picked))


# ---- the experts

@given(T=st.sampled_from([0, 32, 64]), E=st.integers(1, 6), D=st.integers(1, 40),
       W=st.integers(1, 20), data=st.data())
def test_experts_are_the_weighted_sum(T, E, D, W, data):
    K = data.draw(st.integers(1, E))
    x, gate_up, down = rand(T, D), rand(E, 2 * W, D, seed=1), rand(E, D, W, seed=2)
    picked, weight = rand(T, E, seed=3).topk(K).indices, rand(T, K, seed=4)
    want = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for e, w in zip(picked[t].tolist(), weight[t].tolist()):
            g, u = (gate_up[e].double() @ x[t].double()).chunk(2)
            want[t] += w * (down[e].double() @ (torch.nn.functional.silu(g) * u))
    got = d.experts(x, picked, weight, gate_up, down)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)

def test_experts_that_nobody_picked_are_not_read():
    gate_up, down = rand(3, 8, 5), rand(3, 5, 4)
    gate_up[1], down[1] = float("nan"), float("nan")
    picked = torch.tensor([[0, 2]]).expand(32, 2)
    assert bool(d.experts(rand(32, 5), picked, torch.ones(32, 2), gate_up, down).isfinite().all())

def test_the_order_in_which_experts_were_picked_does_not_show():
    "The sum runs in ascending order of experts"
    x, gate_up, down = rand(32, 5), rand(4, 8, 5), rand(4, 5, 4)
    picked, weight = torch.tensor([[3, 0, 2]]).expand(32, 3), rand(1, 3).expand(32, 3)
    assert torch.equal(d.experts(x, picked, weight, gate_up, down),
                       d.experts(x, picked.flip(1), weight.flip(1), gate_up, down))


# ---- costs and refusals

def test_costs_count_whole_tiles():
    assert d.dense_flops(1, 10, 20) == d.dense_flops(32, 10, 20) == 2 * 32 * 10 * 20
    assert d.dense_bytes(33, 10, 20) == 4 * (64 * 30 + 2 * 200) and d.dense_flops(0, 10, 20) == 0

def gate(E, k, groups, open_groups):
    return d.route(rand(32, E), rand(E), k=k, num_groups=groups, topk_groups=open_groups,
                   normalize=True, scale=1.)

BAD = {
    "31 rows": lambda: d.dense(rand(31, 4), rand(2, 4)),
    "widths that a filling to 16 would hide": lambda: d.dense(rand(32, 7), rand(2, 9)),
    "three dimensions": lambda: d.dense(rand(32, 2, 4), rand(2, 4)),
    "heads": lambda: d.dense_heads(rand(32, 2, 4), rand(3, 5, 4)),
    "heads' widths": lambda: d.dense_heads(rand(32, 2, 7), rand(2, 5, 9)),
    "a norm of one row": lambda: d.rms_norm(rand(1, 4), rand(4), 1e-6),
    "a layer norm of one row": lambda: d.layer_norm(rand(1, 4), rand(4), rand(4), 1e-6),
    "odd rope": lambda: d.rope_interleaved(rand(32, 1, 5), rand(32, 2), rand(32, 2)),
    "angles of other rows": lambda: d.rope_half(rand(32, 1, 4), rand(64, 2), rand(64, 2)),
    "sin unlike cos": lambda: d.rope_half(rand(32, 1, 4), rand(32, 2), rand(32, 1)),
    "gate unlike up": lambda: d.silu_mul(rand(32, 4), rand(32, 5)),
    "groups that do not divide": lambda: gate(7, 1, 2, 1),
    "no group": lambda: gate(6, 1, 2, 0),
    "k of zero": lambda: gate(6, 0, 2, 1),
    "more than the open groups hold": lambda: gate(6, 4, 2, 1),
    "experts of 5 rows": lambda: d.experts(rand(5, 4), torch.zeros(5, 1).long(), rand(5, 1),
                                           rand(1, 4, 4), rand(1, 4, 2)),
}

@pytest.mark.parametrize("what", BAD)
def test_refuses(what):
    with pytest.raises(ValueError): BAD[what]()
