"The draft is one more layer: fed one token ahead, the same bits on every path, and nothing unsound is loaded"
import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.all_gather import ForwardPlan
from cpkv.config import TINY, layer_shapes, parse_config
from cpkv.launch import run_ranks
from cpkv.laws import InputError, OrderError
from cpkv.layout import PageLayout
from cpkv.model import MLP, PROJECT, ATTEND, Model, expert_stacks, load_checkpoint, random_weights, save_checkpoint
from cpkv.nextn import (SHARED, UNKNOWN, NextN, draft_config, draft_tokens, load_nextn, nextn_shapes, nextn_weights,
                        random_nextn, shifted_tokens)
from cpkv.ops.table import REF
from cpkv.pool import FORMATS, Pool
from cpkv.reader import EXCHANGE, Reader
from cpkv.scratch import Scratch
from cpkv.shared_kv import FullView, probe_pages, probe_plan
from cpkv.split import Extend, SPLITS, interleave_split, zigzag_split

GLM = parse_config(TINY | dict(index_topk=24))
V32 = parse_config(TINY | dict(
    model_type="deepseek_v32", indexer_types=None, index_topk=24, n_group=4, topk_group=2, num_hidden_layers=2,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=40, original_max_position_embeddings=64,
                         mscale=1.0, mscale_all_dim=0.5)))
CONFIGS = dict(glm=GLM, v32=V32)
WEIGHTS, DRAFT = random_weights(GLM, 0), random_nextn(GLM, 0)
RAW = TINY | dict(num_nextn_predict_layers=1, index_topk=24)
L = GLM.num_hidden_layers


def draft_of(c, seed=0):
    return NextN(Model(c, random_weights(c, seed), REF), random_nextn(c, seed))

def tokens_of(n): return np.random.default_rng(1).integers(0, 256, n)


# -- one token ahead


def plan_of(batch, tokens, rank, R, split=zigzag_split):
    lay = PageLayout(cp_size=1, page_size=4)
    return probe_plan(batch, probe_pages([batch], lay), lay, rank, R, tokens=tokens, split=split)

@given(split=st.sampled_from([*SPLITS.values()]), R=st.integers(1, 8), batch=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=4))
def test_shift_then_split(split, R, batch):
    "Every row of every rank is fed the token after it in its request, at segment borders too; padding is fed 0"
    cuts = [(i, a, a + n) for i, (a, n, _) in enumerate(batch)]
    tokens = {i: 1000 * (i + 1) + np.arange(a + n + more) for i, (a, n, more) in enumerate(batch)}
    fed = {}
    for r in range(R):
        plan = plan_of(cuts, tokens, r, R, split)
        got, rows = draft_tokens(plan, [7 + i for i in tokens]), plan.rows
        assert len(got) == len(rows.index) and (got[rows.index < 0] == 0).all()
        fed |= {(int(i), int(p)): int(t) for i, p, t in zip(rows.index, rows.position, got) if i >= 0}
    assert fed == {(i, p): int(tokens[i][p + 1]) if p + 1 < len(tokens[i]) else 7 + i
                   for i, a, b in cuts for p in range(a, b)}

def test_shift_after_split_would_be_seen():
    "Trap 9: at a segment's last row the next local row is not the next token"
    split = zigzag_split([Extend(request=0, start=0, stop=64)], 4)
    borders = [s.stop - 1 for s in split.segments if s.stop < 64]
    for r in range(4):
        rows = plan_of([(0, 0, 64)], {0: np.arange(64)}, r, 4).rows
        right = draft_tokens(plan_of([(0, 0, 64)], {0: np.arange(64)}, r, 4), [64])[:rows.num]
        after_split = np.append(rows.token[1:rows.num], 64)
        wrong = set(rows.position[:rows.num][right != after_split].tolist())
        assert wrong and wrong <= set(borders)

def test_by_hand():
    assert shifted_tokens(np.array([5, 6, 7], np.int32), 9).tolist() == [6, 7, 9]
    assert shifted_tokens(np.array([5]), UNKNOWN).tolist() == [-1]
    # bs 2, R 2: request 0 has segments 0 | 1 2 | 3 of four tokens, request 1 is in the middle of its prompt
    tokens = {0: np.array([10, 11, 12, 13]), 1: np.array([20, 21, 22, 23, 24])}
    batch, next_tokens = [(0, 0, 4), (1, 1, 3)], [99, UNKNOWN]
    got = {r: draft_tokens(plan_of(batch, tokens, r, 2), next_tokens)[:plan_of(batch, tokens, r, 2).rows.num].tolist() for r in (0, 1)}
    assert got == {0: [11, 22, 99], 1: [12, 23, 13]}

def test_an_unknown_token_is_refused_where_it_would_be_used():
    tokens = {0: np.arange(9), 1: np.arange(6)}
    for r, R in ((0, 1), (0, 2)):  # rank 0 holds the last segments
        with pytest.raises(InputError, match="position=5, request=1"):
            draft_tokens(plan_of([(0, 0, 8), (1, 2, 6)], tokens, r, R), [UNKNOWN, UNKNOWN])
    assert (draft_tokens(plan_of([(0, 0, 8), (1, 2, 6)], tokens, 1, 2), [UNKNOWN] * 2) >= 0).all()
    with pytest.raises(InputError, match="requests=2, next_tokens=1"): draft_tokens(plan_of([(0, 0, 8), (1, 2, 6)], tokens, 0, 1), [1])


# -- the layer, in plain double precision


def rms(x, w, eps): return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w

def turned(x, angle, factor, half):
    "RoPE by complex numbers on [T, H, D]"
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if half else x.unflatten(-1, (-1, 2))
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.full_like(angle, factor), angle)[:, None]
    out = torch.view_as_real(z)
    return (out.transpose(-1, -2) if half else out).flatten(-2)

def dense_draft(c, w, ids, hidden):
    "FIELD-NOTES: concat(rms(embed(next)), rms(hidden)) -> eh_proj -> layer -> norm -> head; one rank, no cache"
    w, T = {k.removeprefix(f"model.layers.{c.num_hidden_layers}."): x.double() for k, x in w.items()}, len(ids)
    eps, H, nope, rope, V = c.rms_norm_eps, c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    a, i = (lambda k: w[f"self_attn.{k}.weight"]), (lambda k: w[f"self_attn.indexer.{k}"])
    speed = c.rope_theta ** (-torch.arange(0, rope, 2).double() / rope)
    if c.yarn:  # its ramp, written out
        low, high = (rope * math.log(c.yarn.original / (b * 2 * math.pi)) / 2 / math.log(c.rope_theta) for b in (32, 1))
        step = ((torch.arange(rope // 2).double() - max(math.floor(low), 0)) / (math.ceil(high) - max(math.floor(low), 0))).clamp(0, 1)
        speed = speed * (1 - step) + speed / c.yarn.factor * step
    angle = torch.arange(T).double()[:, None] * speed
    more = c.yarn.on_angles if c.yarn else 1.0
    x = torch.cat([rms(w["embed_tokens.weight"][ids], w["enorm.weight"], eps), rms(hidden.double(), w["hnorm.weight"], eps)], 1)
    h = x @ w["eh_proj.weight"].T
    x = rms(h, w["input_layernorm.weight"], eps)
    low = rms(x @ a("q_a_proj").T, a("q_a_layernorm"), 1e-6)
    q = (low @ a("q_b_proj").T).view(T, H, nope + rope)
    kv = x @ a("kv_a_proj_with_mqa").T
    k_rope = turned(kv[:, None, c.kv_lora_rank:], angle, more, False).expand(T, H, rope)
    wide = (rms(kv[:, :c.kv_lora_rank], a("kv_a_layernorm"), 1e-6) @ a("kv_b_proj").T).view(T, H, nope + V)
    k, v = torch.cat([wide[..., :nope], k_rope], 2), wide[..., nope:]
    q = torch.cat([q[..., :nope], turned(q[..., nope:], angle, more, False)], 2)
    half = c.index_rope == "half"
    def index(y): return torch.cat([turned(y[..., :rope], angle, more, half), y[..., rope:]], -1)
    iq = index((low @ i("wq_b.weight").T).view(T, c.index_n_heads, c.index_head_dim))
    ik = torch.nn.functional.layer_norm(x @ i("wk.weight").T, (c.index_head_dim,), i("k_norm.weight"), i("k_norm.bias"), 1e-6)
    ik = index(ik[:, None])[:, 0]
    score = torch.einsum("th,thj->tj", x @ i("weights_proj.weight").T, torch.einsum("thd,jd->thj", iq, ik).relu())
    sees = torch.zeros(T, T, dtype=torch.bool)
    for t in range(T): sees[t, sorted(range(t + 1), key=lambda j, t=t: (-score[t, j].item(), j))[:c.index_topk]] = True
    logit = torch.einsum("thd,jhd->htj", q, k) * c.scale
    att = torch.einsum("htj,jhd->thd", logit.masked_fill(~sees, -torch.inf).softmax(-1), v)
    h = h + att.reshape(T, H * V) @ a("o_proj").T
    x = rms(h, w["post_attention_layernorm.weight"], eps)
    def gated(p, y): return (torch.nn.functional.silu(y @ w[p + "gate_proj.weight"].T) * (y @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T
    gate, bias, out = (x @ w["mlp.gate.weight"].T).sigmoid(), w["mlp.gate.e_score_correction_bias"], gated("mlp.shared_experts.", x)
    size = c.n_routed_experts // c.n_group
    for t in range(T):
        choice = (gate[t] + bias).tolist()
        worth = [sum(sorted(choice[g * size:(g + 1) * size])[-2:]) for g in range(c.n_group)]
        open_groups = sorted(range(c.n_group), key=lambda g: -worth[g])[:c.topk_group]
        best = sorted((e for e in range(len(choice)) if e // size in open_groups), key=lambda e: -choice[e])[:c.num_experts_per_tok]
        share = c.routed_scaling_factor / gate[t, best].sum()
        out[t] = out[t] + sum(gate[t, e] * share * gated(f"mlp.experts.{e}.", x[t]) for e in best)
    rows = rms(h + out, w["shared_head.norm.weight"], eps)
    return rows, rows @ w["shared_head.head.weight"].T


# -- the same request on many paths


def extend(peers, kind, draft, batches, tokens, fmt="fp32", P=16, split=zigzag_split,
           stores_at=lambda a, b, n: b < n, following=11):
    "Draft rows, cache of the draft layer, target rows, stages and bytes, batch by batch, of one rank"
    world, c, n = peers.world(), draft.model.config, draft.n
    lay = PageLayout(cp_size=kind.shards(world.size), page_size=P)
    pages, last = probe_pages(batches, lay), max(b for batch in batches for _, _, b in batch)
    pool = Pool(lay, has_index=draft.has_index, dims=c.payload_dims, format=FORMATS[fmt],
                local_pages=sum(map(len, pages.values())) // lay.cp_size + 3)
    pool.poison(range(pool.local_pages))
    arena = Scratch(kind.scratch_bytes(pool, world.size, 4 * last, 4 * last))
    reader = kind(world, pool, REF, arena, index_topk=c.index_topk, v_dim=c.kv_lora_rank, scale=c.scale)
    out, hid, said, moved = {}, {}, [], []
    for batch in batches:
        stores = frozenset({n} if all(stores_at(a, b, len(tokens[q])) for q, a, b in batch) else ())
        plan = probe_plan(batch, pages, lay, world.rank, world.size, tokens=tokens, split=split)
        session, mark = reader.open(plan, stores), world.ledger.mark()
        hidden = draft.model.forward(session)
        ahead = torch.from_numpy(draft_tokens(plan, [following if b == len(tokens[q]) else UNKNOWN for q, _, b in batch]))
        steps = (draft.store if stores else draft.steps)(session, ahead, hidden)
        stages, rows = [], None
        while True:
            try: stages.append(next(steps))
            except StopIteration as done:
                rows = done.value
                break
        session.end()
        assert arena.free_bytes == len(arena.arena)
        where = [(plan.split.extends[i].request, int(p)) for i, p in zip(plan.rows.index[:plan.rows.num], plan.rows.position)]
        hid |= dict(zip(where, hidden))
        if rows is not None:
            assert rows.isfinite().all()
            out |= dict(zip(where, rows))
        said.append(stages)
        moved.append((world.ledger.since(mark).received().get(n, 0), reader.layer_bytes(plan, n, stores)))
    kept = {(q, j): [b.pages[lay.local_page_of(p)] for b in (pool.latent[n], pool.index[n])] for q, table in pages.items()
            for j, p in enumerate(table) if lay.owner_of_page(p) == world.rank % lay.cp_size}
    return out, kept, hid, said, moved

def everywhere(R, kind, draft, batches, tokens, **how):
    "What all ranks have together"
    out, kept, hid = {}, {}, {}
    got = run_ranks(partial(extend, **how), R, kind, draft, batches, tokens, backend="local")
    for rows, pages, target, *_ in got: out, kept, hid = out | rows, kept | pages, hid | target
    return out, kept, hid, *got[0][3:]

def chunks(*cuts): return [[(0, a, b)] for a, b in zip(cuts, cuts[1:])]

def same(a, b): return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k], strict=True))

@pytest.fixture(scope="module", params=CONFIGS)
def whole(request):
    torch.set_num_threads(1)
    c = CONFIGS[request.param]
    draft, tokens = draft_of(c), {0: tokens_of(70)}
    return draft, tokens, everywhere(1, Reader, draft, chunks(0, 70), tokens)

def test_it_is_the_layer_of_the_formula(whole):
    draft, tokens, (out, _, hid, _, _) = whole
    c = draft.model.config
    hidden = torch.stack([hid[0, p] for p in range(70)])
    ids = torch.from_numpy(shifted_tokens(tokens[0], 11))
    rows, logits = dense_draft(c, random_nextn(c, 0), ids, hidden)
    got = torch.stack([out[0, p] for p in range(70)])
    mine = torch.cat([draft.logits(x) for x in got.split(32)])
    assert (got - rows).abs().max() < 2e-5 and (mine - logits).abs().max() < 2e-5 and logits.abs().max() > 2
    wrong, _ = dense_draft(c, random_nextn(c, 0), torch.from_numpy(tokens[0].copy()), hidden)
    assert (got - wrong).abs().max() > 0.1  # not shifted
    wide, _ = dense_draft(dataclasses.replace(c, index_topk=70), random_nextn(c, 0), ids, hidden)
    assert torch.allclose(wide[:24], rows[:24]) and (wide - rows).abs().max() > 0.1  # a selection is at work

@pytest.mark.parametrize("R,kind,cuts,split", [
    (1, Reader, (0, 1, 31, 33, 70), zigzag_split), (1, FullView, (0, 16, 70), interleave_split), (2, FullView, (0, 70), zigzag_split),
    (2, Reader, (0, 69, 70), zigzag_split), (2, FullView, (0, 33, 70), interleave_split), (3, FullView, (0, 7, 14, 21, 70), zigzag_split),
    (3, Reader, (0, 70), interleave_split), (8, FullView, (0, 5, 70), zigzag_split)])
@pytest.mark.parametrize("attends", [False, True], ids=["stores", "attends"])
def test_draft_rows_and_cache_on_every_path(whole, R, kind, cuts, split, attends):
    "Chunks that sample nothing store; that they attend instead changes no byte of the cache"
    draft, tokens, (want, pages, hid, _, _) = whole
    out, kept, hidden, _, moved = everywhere(R, kind, draft, chunks(*cuts), tokens, split=split,
                                            stores_at=lambda a, b, n: b < n and not attends)
    assert same(kept, pages) and all(torch.equal(hidden[k], h) for k, h in hid.items())
    first = 0 if attends else cuts[-2]
    assert out.keys() == {(0, p) for p in range(first, 70)} and all(torch.equal(out[k], want[k]) for k in out)
    assert all(got == predicted for got, predicted in moved)

@pytest.mark.parametrize("fmt", sorted(set(FORMATS) - {"fp32"}))
def test_other_formats(whole, fmt):
    draft, tokens, _ = whole
    a = everywhere(1, Reader, draft, chunks(0, 70), tokens, fmt=fmt)
    b = everywhere(3, FullView, draft, chunks(0, 20, 70), tokens, fmt=fmt)
    assert same(a[1], b[1]) and torch.equal(a[0][0, 69], b[0][0, 69])

def test_a_batch_gives_each_request_its_own_rows(whole):
    draft, tokens, (want, pages, _, _, _) = whole
    both = tokens | {1: tokens_of(90)[60:]}
    batches = [[(0, 0, 40), (1, 0, 9)], [(1, 9, 30), (0, 40, 70)]]
    out, kept, _, _, _ = everywhere(2, FullView, draft, batches, both)
    assert all(torch.equal(out[0, p], want[0, p]) for p in range(40, 70))
    assert same({k: x for k, x in kept.items() if k[0] == 0}, pages)

@pytest.mark.parametrize("kind,gathers", [(Reader, 1), (FullView, 3)])
def test_stages_are_those_of_a_layer(kind, gathers):
    draft, tokens = draft_of(GLM), {0: tokens_of(5)}
    said = everywhere(3, kind, draft, chunks(0, 3, 5), tokens)[3]
    assert said == [[PROJECT, EXCHANGE], [PROJECT, *[EXCHANGE] * gathers, ATTEND, MLP]]

def test_draft_rows_depend_on_the_next_token_and_target_rows_do_not():
    "Law 12: keys are pairs where a draft is attached"
    draft = draft_of(GLM)
    one, other = tokens_of(33), tokens_of(33)
    other[32] ^= 1
    a, b = (everywhere(1, Reader, draft, chunks(0, 33), {0: t}, P=1) for t in (one, other))
    assert all(torch.equal(a[2][0, p], b[2][0, p]) for p in range(32))
    differs = [p for p in range(33) if not torch.equal(a[1][0, p][0], b[1][0, p][0])]
    assert differs == [31, 32]

def test_the_session_knows_the_draft():
    "A pool with a draft is not served without one, nor is a layer stored that was to attend, nor the other way round"
    draft, tokens = draft_of(GLM), {0: tokens_of(9)}
    class Skips(NextN):
        def steps(self, session, token_T, hidden_TD):
            return hidden_TD
            yield
    skips = Skips(draft.model, DRAFT)
    with pytest.raises(OrderError, match="work left.*4: 'put'"): run_ranks(extend, 1, Reader, skips, chunks(0, 9), tokens, backend="local")
    class Stores(NextN): steps = NextN.store
    with pytest.raises(OrderError, match="step=finish, due=select"):
        run_ranks(extend, 1, Reader, Stores(draft.model, DRAFT), chunks(0, 9), tokens, backend="local")
    class Attends(NextN): store = NextN.steps
    with pytest.raises(OrderError, match="step=select, due=finish"):
        run_ranks(extend, 1, Reader, Attends(draft.model, DRAFT), chunks(0, 4, 9), tokens, backend="local")


# -- weights


def test_names_and_shapes():
    glm5 = parse_config(TINY | dict(
        vocab_size=154880, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048, num_hidden_layers=78,
        num_attention_heads=64, num_key_value_heads=64, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, index_n_heads=32, index_head_dim=128, index_topk=2048, n_routed_experts=256, num_experts_per_tok=8,
        first_k_dense_replace=3, indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3))
    shapes = nextn_shapes(glm5)
    assert all(n.startswith("model.layers.78.") for n in shapes) and len(shapes) == 6 + 9 + 5 + 2 + 3 * 257
    assert shapes["model.layers.78.eh_proj.weight"] == (6144, 12288)
    assert shapes["model.layers.78.self_attn.indexer.wk.weight"] == (128, 6144)
    assert shapes["model.layers.78.shared_head.head.weight"] == shapes["model.layers.78.embed_tokens.weight"] == (154880, 6144)
    assert nextn_weights(glm5) == sum(math.prod(s) for s in shapes.values())
    assert draft_config(glm5).has_index == (*glm5.has_index, True) and draft_config(glm5).mlp_layer_types[-1] == "sparse"

def test_random_weights_are_seeded_and_unlike_the_target():
    assert DRAFT.keys() == nextn_shapes(GLM).keys() and all(w.shape == nextn_shapes(GLM)[k] for k, w in DRAFT.items())
    again, other = random_nextn(GLM, 0), random_nextn(GLM, 1)
    assert all(torch.equal(w, again[k]) and not torch.equal(w, other[k]) for k, w in DRAFT.items())
    for name, _ in layer_shapes(GLM, 3): assert not torch.equal(DRAFT[f"model.layers.4.{name}"], WEIGHTS[f"model.layers.3.{name}"])

def saved(tmp_path, raw=RAW, **changes):
    save_checkpoint(tmp_path, raw, {k: w for k, w in (WEIGHTS | DRAFT | changes).items() if w is not None})
    return tmp_path

def test_it_is_loaded_beside_the_target(tmp_path):
    d = saved(tmp_path)
    config, weights = load_checkpoint(d)
    draft = load_nextn(d)
    assert config == GLM and weights.keys() == WEIGHTS.keys() and draft.keys() == DRAFT.keys()
    assert all(torch.equal(w, DRAFT[k]) for k, w in draft.items())
    assert NextN(Model(config, weights, REF), draft).shared == ()

def test_behind_fewer_layers_it_is_renumbered(tmp_path):
    d = saved(tmp_path)
    config, weights = load_checkpoint(d, layers=2)
    got = load_nextn(d, layers=2)
    assert got.keys() == nextn_shapes(config).keys() and all(torch.equal(w, DRAFT[k.replace("layers.2.", "layers.4.")]) for k, w in got.items())
    draft = NextN(Model(config, weights, REF), got)
    assert draft.n == 2 and draft.has_index == (True, True, True)
    assert (0, 8) in everywhere(2, FullView, draft, chunks(0, 4, 9), {0: tokens_of(9)})[0]

def test_shared_weights_may_be_absent(tmp_path):
    "GLM-4.6 and later: embedding and head are the target's; each of them alone too"
    for missing in (("embed_tokens.weight",), tuple(SHARED)):
        d = saved(tmp_path, **{f"model.layers.4.{n}": None for n in missing})
        draft = NextN(Model(*load_checkpoint(d), REF), load_nextn(d))
        assert draft.shared == missing
        assert torch.equal(draft.embed, WEIGHTS["model.embed_tokens.weight"])
        head = "lm_head.weight" if len(missing) == 2 else "model.layers.4.shared_head.head.weight"
        assert torch.equal(draft.head, (WEIGHTS | DRAFT)[head])

def test_stacked_experts(tmp_path):
    stacks = expert_stacks({k: tuple(w.shape) for k, w in DRAFT.items()})
    change = {p: None for s in stacks.values() for p in s.parts}
    change |= {k: torch.cat([DRAFT[p] for p in s.parts]).view(s.shape) for k, s in stacks.items()}
    got = load_nextn(saved(tmp_path, **change))
    assert len(stacks) == 2 and all(torch.equal(got[k], w) for k, w in DRAFT.items())

@pytest.mark.parametrize("name", [k.removeprefix("model.layers.4.") for k in nextn_shapes(GLM)
                                  if "experts." not in k or "experts.7" in k])
def test_each_tensor_is_checked(tmp_path, name):
    key, w = f"model.layers.4.{name}", DRAFT[f"model.layers.4.{name}"]
    changes = [("another shape", torch.ones(3)), ("another type", w.int())]
    if name not in SHARED: changes.append(("lacks a tensor", None))
    for error, change in changes:
        with pytest.raises(InputError, match=f"{error}.*tensor={key}"): load_nextn(saved(tmp_path, **{key: change}))

def test_extra_and_absent_are_refused(tmp_path):
    with pytest.raises(InputError, match="extra tensor.*layers.4.x"): load_nextn(saved(tmp_path, **{"model.layers.4.x": torch.ones(1)}))
    with pytest.raises(InputError, match="fp8"): load_nextn(saved(tmp_path, **{"model.layers.4.eh_proj.weight_scale_inv": torch.ones(1)}))
    with pytest.raises(InputError, match="no NextN layer.*layer=4"): load_nextn(saved(tmp_path, **{k: None for k in DRAFT}))
    for count in (0, None, 2):
        (tmp_path / "config.json").write_text(json.dumps(RAW | dict(num_nextn_predict_layers=count)))
        with pytest.raises(InputError, match="one NextN layer.*num_nextn_predict_layers"): load_nextn(tmp_path)

def test_plans_are_not_made_anew():
    "The draft reads the plan that the target ran; no other one is built"
    draft, made, init = draft_of(GLM), [], ForwardPlan.__post_init__
    try:
        ForwardPlan.__post_init__ = lambda self: made.append(1) or init(self)
        everywhere(1, Reader, draft, chunks(0, 4, 9), {0: tokens_of(9)})
    finally: ForwardPlan.__post_init__ = init
    assert len(made) == 2
