"Any block list, any neighbour, same selection; and a row never sees what it may not"
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.attention import Block, no_picks, select_blocks, select_rows, softmax_scale
from cpkv.ops.index import KEY_TILE
from cpkv.ops.rows import locs_of
from cpkv.ops.table import REF
from cpkv.pool import FORMATS


@st.composite
def rows_of_requests(draw):
    "Request and visible length of each row of a rank: a few runs, then padding"
    run = st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 3000))
    runs, none = draw(st.lists(run, max_size=6)), np.zeros(0, int)
    index = np.concatenate([none, *(np.full(n, r) for r, n, _ in runs)])
    visible = np.concatenate([none, *(first + 1 + np.arange(n) for _, n, first in runs)])
    fill = -len(index) % 32
    return np.pad(index, (0, fill), constant_values=-1), np.pad(visible, (0, fill))


@given(rows_of_requests(), st.sampled_from([0, 32 << 10, 1 << 20, 64 << 20]))
def test_blocks_cover_each_row_once_under_the_bound(rows, bound):
    index, visible = rows
    blocks = select_blocks(index, visible, bound)
    for row in range(len(index)):
        mine = [b for b in blocks if b.request == index[row] and b.start <= row < b.stop]
        assert len(mine) == (visible[row] > 0)
        assert all(b.keys >= visible[row] for b in mine)
    for b in blocks:
        assert b.keys % KEY_TILE == 0 and b.start < b.stop and b.keys
        assert b.stop - b.start == 1 or (b.stop - b.start) * b.keys * 4 <= bound
        assert (index[b.start:b.stop] == b.request).all()
        widths = -(-visible[b.start:b.stop] // KEY_TILE) * KEY_TILE
        assert widths.min() * 8 >= b.keys * 7 and widths.max() == b.keys


def test_a_decode_step_scores_each_request_once():
    "Requests of one row each: no row is scored for a neighbour"
    blocks = select_blocks(np.arange(64), np.arange(64) * 100 + 1)
    assert [(b.request, b.start, b.stop) for b in blocks] == [(i, i, i + 1) for i in range(64)]


def plain_select(q, w, keys, index, visible, k):
    "The definition: scores of one row over its keys, best first, ties to the lowest position"
    out = np.full((len(index), k), -1)
    for t in range(len(index)):
        if index[t] < 0: continue
        kv = keys[index[t]][:visible[t]].double().numpy()
        by_head = np.maximum(q[t].double().numpy() @ kv.T, 0)
        score = w[t].double().numpy() @ by_head
        best = np.sort(np.argsort(-score, kind="stable")[:k])
        out[t, :len(best)] = best
    return out.tolist()


@given(rows_of_requests(), st.sampled_from([0, 64 << 10, 64 << 20]),
       st.sampled_from([1, 8, 700]), st.integers(0, 9))
def test_selection_is_the_definition_in_any_tiling(rows, bound, k, seed):
    index, visible = rows
    g = torch.Generator().manual_seed(seed)
    small = lambda *shape: torch.randint(-2, 3, shape, generator=g).float()   # exact sums, many ties
    q, w, keys = small(len(index), 4, 8), small(len(index), 4), [small(3328, 8) for _ in range(4)]
    for i, key in enumerate(keys):                # what no row of the request sees is poison
        key[max(visible[index == i], default=0):] = torch.nan
    q[index < 0], w[index < 0] = torch.nan, torch.nan
    visible_T = torch.from_numpy(visible)
    blocks = select_blocks(index, visible, bound)
    picked = select_rows(REF, q, w, keys, visible_T, blocks, no_picks(len(index), k))
    assert picked.dtype is torch.int32
    assert picked.tolist() == plain_select(q, w, keys, index, visible, k)


def test_rows_with_fewer_than_k_keys_or_none():
    visible = torch.tensor([0, 1, 5] + [0] * 29)
    request = torch.zeros(32, dtype=torch.int64)
    q, w, keys = torch.randn(32, 4, 8), torch.rand(32, 4), torch.full((256, 8), torch.nan)
    keys[:5] = torch.randn(5, 8)
    blocks = select_blocks(request.numpy(), visible.numpy())
    picked = select_rows(REF, q, w, [keys], visible, blocks, no_picks(32, 8))
    assert picked[:3].tolist() == [[-1] * 8, [0] + [-1] * 7, [0, 1, 2, 3, 4, -1, -1, -1]]
    fmt, P = FORMATS["fp32"].latent(12, 4), 4
    pages = torch.full((4, fmt.page_bytes(P)), 255, dtype=torch.uint8)   # the first and last are NaN
    pages.view(16, -1)[4:9] = fmt.encode(torch.randn(5, 16))             # the request's are 1 and 2
    locs = locs_of(picked, torch.zeros(32, dtype=torch.int64), torch.tensor([1, 2]), P)
    state = REF.sparse_mla(torch.randn(32, 3, 16), pages, locs, fmt, P, v_dim=12, scale=0.25)
    assert state.out.isfinite().all() and state.lse[1:3].isfinite().all()
    assert (state.out[0] == 0).all() and (state.lse[0] == -torch.inf).all()
    one = fmt.decode(pages.view(16, -1)[4:5])[0, :12]
    assert torch.equal(state.out[1], one.expand(3, 12))                  # one key: its value


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7), st.integers(0, 99))
def test_locs_follow_the_page_table(lengths, P, seed):
    rng = np.random.default_rng(seed)
    tables = [rng.permutation(50)[:n + 1] for n in lengths]
    base, flat = np.cumsum([0] + [len(t) for t in tables]), np.concatenate(tables)
    of_row = rng.integers(0, len(tables), 32)
    picked = np.stack([rng.integers(-1, len(tables[r]) * P, 5) for r in of_row])
    locs = locs_of(torch.from_numpy(picked).int(), torch.from_numpy(base[of_row]),
                   torch.from_numpy(flat), P)
    want = [[-1 if p < 0 else tables[r][p // P] * P + p % P for p in row]
            for r, row in zip(of_row, picked)]
    assert locs.dtype is torch.int64 and locs.tolist() == want


def test_locs_are_wide():
    "32-bit rows times a page overflow: page 40,000,000 of 64 rows"
    table = torch.tensor([0, 40_000_000])
    loc = locs_of(torch.tensor([[65]], dtype=torch.int32), torch.tensor([0]), table, 64)
    assert loc.tolist() == [[2_560_000_001]]


def test_no_row_sees_anything():
    blocks = select_blocks(np.full(32, -1), np.zeros(32, int))
    assert blocks == [] and select_blocks(np.zeros(0, int), np.zeros(0, int)) == []
    got = select_rows(REF, torch.randn(32, 1, 4), torch.ones(32, 1), [], torch.zeros(32), blocks,
                      no_picks(32, 3))
    assert (got == -1).all() and got.shape == (32, 3)


def test_refused_and_small():
    with pytest.raises(ValueError, match="33 requests"): select_blocks(np.zeros(33, int), np.ones(32, int))
    assert softmax_scale(192, 64) == 1 / 16
    assert Block(0, 0, 32, 256) == Block(request=0, start=0, stop=32, keys=256)
