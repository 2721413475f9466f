"Tiny random models of transformers, saved by it, loaded by cpkv: the same logits on every path"
import dataclasses
import inspect

import numpy as np
import pytest
import torch

from cpkv.all_gather import fit_rows
from cpkv.config import TINY, parse_config, read_config
from cpkv.launch import run_ranks
from cpkv.layout import PageLayout
from cpkv.model import Model, load_checkpoint
from cpkv.ops.table import REF
from cpkv.pool import FORMATS, Pool
from cpkv.reader import Reader
from cpkv.scratch import Scratch
from cpkv.shared_kv import FullView, probe_pages, probe_plan

hf = pytest.importorskip("transformers", reason="the oracle is in the extra `hf`")
if not hasattr(hf, "DeepseekV32ForCausalLM"):
    pytest.skip(f"transformers {hf.__version__} has no DeepseekV32", allow_module_level=True)

N, STEPS = 75, 4  # tokens, and how many of them are decoded one by one
SIZES = {k: v for k, v in TINY.items() if k not in ("architectures", "model_type", "indexer_types", "rope_parameters")}
SIZES |= dict(num_hidden_layers=3, index_topk=24, n_group=4, topk_group=2, vocab_size=128)
YARN = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=64, rope_type="yarn", rope_theta=10000.0)
KINDS = {
    "glm": ("GlmMoeDsa", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6),
                              indexer_types=["full", "shared", "full"])),
    "v32": ("DeepseekV32", dict(rope_parameters=YARN, max_position_embeddings=2560, rms_norm_eps=1e-6))}


def theirs(kind, **changes):
    "A model with weights at unit scale, so that choices have clear winners, and logits of about 1"
    torch.manual_seed(2)
    name, own = KINDS[kind]
    config = getattr(hf, name + "Config")(**SIZES | own | changes, attn_implementation="eager")
    model = getattr(hf, name + "ForCausalLM")(config)
    with torch.no_grad():
        for key, w in model.named_parameters():
            w.copy_(torch.randn_like(w) / w.shape[-1] ** 0.5 + ("norm" in key and w.dim() == 1))
        model.lm_head.weight *= 0.25
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"): b.copy_(torch.randn_like(b) * 0.1)
    return model.float().eval()

def logits_there(model, tokens, cuts):
    "Chunks through its own cache, one after the other"
    ids, cache, out = torch.from_numpy(tokens)[None], hf.DynamicCache(config=model.config), []
    with torch.no_grad():
        for a, b in zip(cuts, cuts[1:]): out.append(model(ids[:, a:b], cache=cache).logits[0])
    return torch.cat(out)

def prefill(peers, kind, model, tokens, cuts):
    "All hidden rows of one request in order, on every rank"
    world, c = peers.world(), model.config
    lay, batches = PageLayout(cp_size=kind.shards(world.size), page_size=16), [[(0, a, b)] for a, b in zip(cuts, cuts[1:])]
    pages = probe_pages(batches, lay)
    pool = Pool(lay, has_index=c.has_index, dims=c.payload_dims, format=FORMATS["fp32"],
                local_pages=lay.num_pages(cuts[-1]) // lay.cp_size + 2)
    pool.poison(range(pool.local_pages))
    arena = Scratch(kind.scratch_bytes(pool, world.size, cuts[-1], cuts[-1]))
    reader = kind(world, pool, REF, arena, index_topk=c.index_topk, v_dim=c.kv_lora_rank, scale=c.scale)
    out = []
    for batch in batches:
        plan = probe_plan(batch, pages, lay, world.rank, world.size, tokens={0: tokens})
        session = reader.open(plan)
        hidden = model.forward(session)
        session.end()
        got = world.all_gather(fit_rows(hidden, plan.split.max_rows), tag="all").wait()
        out.append(got.flatten(0, 1)[torch.from_numpy(plan.order)])
    return torch.cat(out)

def hidden_here(R, kind, model, tokens, cuts):
    got = run_ranks(prefill, R, kind, model, tokens, cuts, backend="local")
    assert all(torch.equal(rows, got[0]) for rows in got)
    return got[0]

def logits_here(model, tokens, cuts=None):
    rows = hidden_here(1, Reader, model, tokens, cuts or (0, len(tokens)))
    return torch.cat([model.logits(x) for x in rows.split(32)])

CUTS = {"whole": (0, N), "7": (*range(0, N, 7), N), "32": (*range(0, N, 32), N),
        "decode": (0, *range(N - STEPS, N + 1))}
TOKENS = np.random.default_rng(3).integers(0, SIZES["vocab_size"], N)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    "Their model, its checkpoint, ours from it, our rows of one rank and one chunk"
    torch.set_num_threads(1)
    model, d = theirs(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(d)
    ours = Model(*load_checkpoint(d), REF)
    return request.param, model, d, ours, hidden_here(1, Reader, ours, TOKENS, (0, N))

@pytest.mark.parametrize("cuts", CUTS)
def test_their_logits_and_ours(pair, cuts):
    "On each of their own paths: whole, in chunks, from their cache token by token"
    _, model, _, ours, rows = pair
    want = logits_there(model, TOKENS, CUTS[cuts])
    got = torch.cat([ours.logits(x) for x in rows.split(32)])
    assert want.shape == got.shape and 0.5 < want.abs().max() < 2
    assert (got - want).abs().max() < 1e-5

@pytest.mark.parametrize("R", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cuts", CUTS)
def test_our_rows_on_every_path(pair, cuts, R):
    _, _, _, ours, rows = pair
    kind = FullView if R > 1 or cuts == "whole" else Reader  # whole on one rank was made by Reader
    assert torch.equal(hidden_here(R, kind, ours, TOKENS, CUTS[cuts]), rows)

def test_what_differs_between_the_families_matters(pair):
    "Each fact that no shape gives away, told wrong, is seen in the logits"
    name, model, d, ours, _ = pair
    want, (config, weights) = logits_there(model, TOKENS, (0, N)), load_checkpoint(d)
    other = "half" if config.index_rope == "interleaved" else "interleaved"
    wrong = [dict(index_rope=other), dict(n_group=1, topk_group=1), dict(index_topk=N), dict(rope_theta=2e4)]
    if name == "v32": wrong += [dict(yarn=None), dict(yarn=dataclasses.replace(config.yarn, on_scores=1.0))]
    for change in wrong:
        got = logits_here(Model(dataclasses.replace(config, **change), weights, REF), TOKENS)
        assert (got - want).abs().max() > 1e-2, change

@pytest.mark.parametrize("how", [dict(max_shard_size="150KB"), dict(save_original_format=False),
                                 dict(save_original_format=False, max_shard_size="150KB")])
def test_every_form_that_it_saves_is_the_same_model(pair, tmp_path, how):
    "Shards with an index, experts stacked in one tensor"
    _, model, d, _, _ = pair
    model.save_pretrained(tmp_path, **how)
    names = {p.name for p in tmp_path.glob("*.safetensors*")}
    assert ("model.safetensors.index.json" in names) == ("max_shard_size" in how)
    (config, got), (same, want) = load_checkpoint(tmp_path), load_checkpoint(d)
    assert config == same and list(got) == list(want)
    assert all(torch.equal(got[k], w) for k, w in want.items())

def test_bf16_is_read_as_it_was_saved(pair, tmp_path):
    name, _, d, _, _ = pair
    half = theirs(name).bfloat16()
    half.save_pretrained(tmp_path)
    got, whole = load_checkpoint(tmp_path)[1], load_checkpoint(d)[1]
    assert {w.dtype for w in got.values()} >= {torch.bfloat16}
    assert all(torch.equal(got[k].float(), w.to(got[k].dtype).float()) for k, w in whole.items())

def test_only_the_layers_asked_for(pair):
    name, model, d, _, _ = pair
    config, weights = load_checkpoint(d, layers=2)
    short = theirs(name)
    short.model.layers = short.model.layers[:2]
    short.config.num_hidden_layers = short.model.config.num_hidden_layers = 2
    want = logits_there(short, TOKENS, (0, N))
    assert (logits_here(Model(config, weights, REF), TOKENS) - want).abs().max() < 1e-5


# -- ties


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lowest_position(kind, tmp_path, monkeypatch):
    "Four index heads: scores that are exactly 0 tie; given our rule, transformers agrees again"
    model = theirs(kind, index_n_heads=4)
    model.save_pretrained(tmp_path)
    ours = Model(*load_checkpoint(tmp_path), REF)
    topk, k, ties = torch.Tensor.topk, SIZES["index_topk"], []
    def lowest_first(x, n, dim=-1):
        if n != k: return topk(x, n, dim=dim)
        value, index = x.sort(dim=dim, descending=True, stable=True)
        if x.shape[-1] > k: ties.append(int((value[..., k - 1] == value[..., k]).logical_and(value[..., k] == 0).sum()))
        return torch.return_types.topk((value[..., :k], index[..., :k]))
    monkeypatch.setattr(torch.Tensor, "topk", lowest_first)
    want = logits_there(model, TOKENS, (0, N))
    monkeypatch.undo()
    assert sum(ties) > 0
    rows = hidden_here(1, Reader, ours, TOKENS, (0, N))
    assert (torch.cat([ours.logits(x) for x in rows.split(32)]) - want).abs().max() < 1e-5
    for R, cuts in ((1, "32"), (2, "7"), (3, "decode"), (8, "whole")):
        assert torch.equal(hidden_here(R, FullView, ours, TOKENS, CUTS[cuts]), rows)


# -- the oracle itself


@pytest.mark.parametrize("kind", KINDS)
def test_its_mask_by_hand(kind, monkeypatch):
    """Three tokens of history, two new ones, two keys each. With the scores below, the first new
    row picks 1 and 2 of its four keys, the second 2 and 0 of its five"""
    model = theirs(kind, num_hidden_layers=1, index_topk=2, indexer_types=["full"])
    hand = torch.tensor([[.1, .9, .5, .2, .0], [.3, .2, .8, .1, .0]])
    causal = [[True, True, True, True, False], [True] * 5]
    chosen = [[False, True, True, False, False], [True, False, True, False, False]]
    seen, scores, topk = [], [], torch.Tensor.topk
    def by_hand(x, k, dim=-1):
        if x.shape != (1, 2, 5): return topk(x, k, dim=dim)
        scores.append(x[0] > -1e30)
        return topk(torch.where(scores[-1], hand, -torch.inf)[None], k, dim=dim)
    module = inspect.getmodule(type(model))
    attend = module.eager_attention_forward
    def watch(layer, q, k, v, mask, **keys):
        seen.append(mask[0, 0] > -1e30)
        return attend(layer, q, k, v, mask, **keys)
    monkeypatch.setattr(torch.Tensor, "topk", by_hand)
    monkeypatch.setattr(module, "eager_attention_forward", watch)
    logits_there(model, TOKENS[:5], (0, 3, 5))
    assert [s.tolist() for s in scores] == [causal] and seen[-1].tolist() == chosen

def test_configs_mean_the_same_there(tmp_path):
    for kind, (name, own) in KINDS.items():
        config = getattr(hf, name + "Config")(**SIZES | own)
        config.save_pretrained(tmp_path)
        assert read_config(tmp_path) == parse_config(config.to_dict())
        assert read_config(tmp_path).index_rope == {"glm": "interleaved", "v32": "half"}[kind]
