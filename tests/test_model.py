"GLM-5 as others compute it, the same bits on every path, and nothing unsound is loaded"
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from cpkv.all_gather import fit_rows
from cpkv.launch import run_ranks
from cpkv.laws import InputError
from cpkv.layout import PageLayout
from cpkv.model import (ATTEND, LATENT_NORM_EPS, MLP, ONLY, PROJECT, TINY, Model, build_layer,
                        layer_shapes, load_checkpoint, num_weights, parse_config, random_weights, read_config,
                        save_checkpoint, weight_shapes)
from cpkv.ops.table import REF
from cpkv.pool import FORMATS, Pool
from cpkv.reader import EXCHANGE, Reader
from cpkv.scratch import Scratch
from cpkv.shared_kv import FullView, probe_pages, probe_plan

CONFIG = parse_config(TINY)
WEIGHTS = random_weights(CONFIG, 0)
GLM5 = dict(  # its public numbers
    model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288,
    moe_intermediate_size=2048, num_hidden_layers=78, num_attention_heads=64, num_key_value_heads=64,
    n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=2048,
    qk_rope_head_dim=64, v_head_dim=256, qk_nope_head_dim=192, n_group=1, topk_group=1, num_experts_per_tok=8,
    norm_topk_prob=True, hidden_act="silu", rms_norm_eps=1e-5, index_topk=2048, index_head_dim=128,
    index_n_heads=32, first_k_dense_replace=3, num_nextn_predict_layers=1, rope_parameters=dict(
        rope_theta=1e6, rope_type="default"))


def prefill(peers, kind, model, tokens, cuts, P=16):
    "All hidden rows of one request, in order, and the stages of each forward"
    world, c = peers.world(), model.config
    lay = PageLayout(cp_size=kind.shards(world.size), page_size=P)
    batches = [[(0, a, b)] for a, b in zip(cuts, cuts[1:])]
    pages = probe_pages(batches, lay)
    pool = Pool(lay, has_index=c.has_index, dims=c.payload_dims, format=FORMATS["fp32"],
                local_pages=lay.num_pages(cuts[-1]) // lay.cp_size + 2)
    pool.poison(range(pool.local_pages))
    arena = Scratch(kind.scratch_bytes(pool, world.size, cuts[-1], cuts[-1]))
    reader = kind(world, pool, REF, arena, index_topk=c.index_topk, v_dim=c.kv_lora_rank,
                  scale=c.scale)
    out, stages = [], []
    for batch in batches:
        plan = probe_plan(batch, pages, lay, world.rank, world.size, tokens={0: tokens})
        session, said = reader.open(plan), []
        steps = model.steps(session)
        while True:
            try: said.append(next(steps))
            except StopIteration as done:
                hidden = done.value
                break
        session.end()
        assert hidden.shape == (len(plan.rows.index), c.hidden_size) and hidden.isfinite().all()
        got = world.all_gather(fit_rows(hidden, plan.split.max_rows), tag="all").wait()
        out.append(got.flatten(0, 1)[torch.from_numpy(plan.order)])
        stages.append(said)
    return torch.cat(out), stages

def hidden_of(R, kind, model, tokens, cuts, **how):
    got = run_ranks(prefill, R, kind, model, tokens, cuts, backend="local", **how)
    assert all(torch.equal(got[0][0], rows) for rows, _ in got)
    return got[0][0]

def logits_of(model, hidden): return torch.cat([model.logits(x) for x in hidden.split(32)])

def tokens_of(n, vocab=256): return np.random.default_rng(0).integers(0, vocab, n)


# -- the same model elsewhere


def lively(model):
    "Random weights at unit scale, away from small initial ones"
    with torch.no_grad():
        for name, w in model.named_parameters():
            w.copy_(torch.randn_like(w) / w.shape[-1] ** 0.5 + ("norm" in name and w.dim() == 1))
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"): b.copy_(torch.randn_like(b) * 0.1)
    return model.float().eval()

@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    "A random model of transformers, its checkpoint, and its logits for 150 tokens"
    hf = pytest.importorskip("transformers", reason="the oracle is in the extra `hf`")
    if not hasattr(hf, "GlmMoeDsaForCausalLM"): pytest.skip(f"transformers {hf.__version__} has no GlmMoeDsa")
    torch.manual_seed(1)
    keep = {k: v for k, v in TINY.items() if k not in ("architectures", "model_type")}
    config = hf.GlmMoeDsaConfig(**keep | dict(n_group=4, topk_group=2), attn_implementation="eager")
    model = lively(hf.GlmMoeDsaForCausalLM(config))
    d = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(d)
    tokens = tokens_of(150)
    with torch.no_grad(): logits = model(torch.from_numpy(tokens)[None]).logits[0]
    return hf, model, d, tokens, logits

def test_a_checkpoint_of_transformers_gives_its_logits(oracle):
    _, _, d, tokens, want = oracle
    config, weights = load_checkpoint(d)
    assert (config.n_group, config.topk_group, config.index_topk) == (4, 2, 64)
    model, n = Model(config, weights, REF), len(tokens)
    base = hidden_of(1, Reader, model, tokens, (0, n))
    assert (logits_of(model, base) - want).abs().max() < 1e-5 and want.abs().max() > 1
    for R, cuts in ((1, (*range(0, n, 32), n)), (2, (*range(0, n, 7), n)), (3, (0, n))):
        assert torch.equal(hidden_of(R, FullView, model, tokens, cuts), base)

def test_our_checkpoint_loads_there(oracle, tmp_path):
    hf, _, _, tokens, _ = oracle
    save_checkpoint(tmp_path, TINY, WEIGHTS)
    theirs = hf.GlmMoeDsaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    with torch.no_grad(): want = theirs(torch.from_numpy(tokens)[None]).logits[0]
    model = Model(CONFIG, WEIGHTS, REF)
    got = logits_of(model, hidden_of(2, FullView, model, tokens, (0, 100, 150)))
    assert (got - want).abs().max() < 1e-5 and want.abs().max() > 1

def test_the_oracle_masks_by_position():
    "By hand, one layer: after a history of five, two new rows see 6 and 7 keys and no later one"
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    keep = {k: v for k, v in TINY.items() if k not in ("architectures", "model_type")}
    one = keep | dict(num_hidden_layers=1, indexer_types=["full"])
    model = lively(hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(**one, attn_implementation="eager")))
    tokens = torch.from_numpy(tokens_of(7))
    def rows_5_and_6(ids):
        cache = hf.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[None, :5], cache=cache)
            return model(ids[None, 5:], cache=cache).logits[0]
    base = rows_5_and_6(tokens)
    with torch.no_grad(): whole = model(tokens[None]).logits[0, 5:]
    assert (base - whole).abs().max() < 1e-4 * whole.abs().max()
    def seen(row):
        return [j for j in range(7) if not torch.equal(
            rows_5_and_6(torch.where(torch.arange(7) == j, (tokens + 1) % 256, tokens))[row], base[row])]
    assert (seen(0), seen(1)) == ([*range(6)], [*range(7)])


# -- one prompt, many paths


@pytest.fixture(scope="module")
def rows_100():
    torch.set_num_threads(1)
    model = Model(CONFIG, WEIGHTS, REF)
    return model, hidden_of(1, Reader, model, tokens_of(100), (0, 100))

@pytest.mark.parametrize("R,kind,cuts", [
    (1, Reader, (0, 1, 2, 99, 100)), (1, FullView, (0, 64, 100)), (2, FullView, (0, 16, 50, 100)),
    (3, FullView, (0, 99, 100)), (4, Reader, (0, 33, 100)), (8, FullView, (0, 5, 100))])
def test_a_row_has_the_same_bits_on_every_path(rows_100, R, kind, cuts):
    model, want = rows_100
    assert torch.equal(hidden_of(R, kind, model, tokens_of(100), cuts), want)

def test_a_prefix_has_the_rows_of_the_whole(rows_100):
    model, want = rows_100
    for n in (1, 31, 32, 33):
        assert torch.equal(hidden_of(2, FullView, model, tokens_of(100)[:n], (0, n)), want[:n])

def test_logits_of_a_row_do_not_depend_on_the_others(rows_100):
    model, hidden = rows_100
    want = logits_of(model, hidden)
    for rows in ([0], [5, 3], [*range(33)]): assert torch.equal(model.logits(hidden[rows]), want[rows])
    assert model.logits(hidden[:0]).shape == (0, 256)

@pytest.mark.parametrize("kind,exchanges", [(Reader, (1, 1)), (FullView, (3, 2))])
def test_stages_come_in_order_on_every_rank(kind, exchanges):
    "With an indexer and without: rows, then index pages, then latent pages"
    got = run_ranks(prefill, 3, kind, Model(CONFIG, WEIGHTS, REF), tokens_of(2), (0, 1, 2), backend="local")
    want = [stage for has in CONFIG.has_index
            for stage in (PROJECT, *[EXCHANGE] * exchanges[not has], ATTEND, MLP)]
    assert all(said == want for _, stages in got for said in stages)

def test_a_selection_matters(rows_100):
    "With room for every key the rows differ: top-k is at work in the tests above"
    model, want = rows_100
    free = Model(dataclasses.replace(CONFIG, index_topk=128), WEIGHTS, REF)
    got = hidden_of(1, Reader, free, tokens_of(100), (0, 100))
    assert torch.equal(got[:64], want[:64]) and not torch.equal(got[64:], want[64:])


# -- configs


def test_glm5_parses_from_its_public_numbers():
    c = parse_config(GLM5)
    assert c.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75 and all(c.has_index)
    assert (c.scale, c.rope_theta) == (1 / 16, 1e6)
    assert dataclasses.astuple(c.payload_dims) == (512, 64, 128)
    shapes = weight_shapes(c)
    per_layer = 9 + 5                                                # attention and norms, indexer
    assert len(shapes) == 3 + 78 * per_layer + 3 * 3 + 75 * (2 + 3 * 257) == 59_079
    assert shapes["model.layers.5.self_attn.kv_b_proj.weight"] == (64 * (192 + 256), 512)
    assert shapes["model.layers.77.mlp.experts.255.down_proj.weight"] == (6144, 2048)
    total, active = num_weights(c)
    assert round(total / 1e9, 1) == 743.9 and round(active / 1e9, 1) == 40.8
    assert len(weight_shapes(parse_config(GLM5, layers=4))) == 3 + 4 * per_layer + 3 * 3 + 2 + 3 * 257

def test_glm5_of_transformers_is_the_same():
    hf = pytest.importorskip("transformers")
    raw = hf.GlmMoeDsaConfig().to_dict()
    theta = raw["rope_parameters"]["rope_theta"]
    assert parse_config(raw) == dataclasses.replace(parse_config(GLM5), rope_theta=theta)

def test_indexers_by_pattern_frequency_or_list():
    def types(**keys):
        config = parse_config(TINY | dict(indexer_types=None, **keys))
        return "".join(t[0] for t in config.indexer_types)
    assert types() == "ffff" and types(index_topk_pattern="FSSF") == "fssf"
    assert types(index_topk_pattern=["full", "shared", "full", "full"]) == "fsff"
    assert types(index_topk_freq=2) == "ffsf" and types(index_topk_freq=4) == "ffss"
    assert types(index_topk_freq=3, index_skip_topk_offset=1) == "fssf"
    sparse = parse_config(GLM5 | dict(index_topk_freq=4, index_skip_topk_offset=3))
    assert sum(sparse.has_index) == 21 and sparse.has_index[:8] == (True,) * 3 + (False,) * 3 + (True, False)

def test_a_list_may_go_on_for_the_nextn_layer():
    four = ["full", "shared", "full", "full"]
    raw = TINY | dict(num_nextn_predict_layers=1, indexer_types=[*four, "full"])
    assert parse_config(raw).indexer_types == tuple(four)
    assert parse_config(TINY | dict(indexer_types=four), layers=2).indexer_types == ("full", "shared")

WHOLE = [k for k, t in type(CONFIG).__annotations__.items() if t is int]

@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "8", True])
def test_sizes_are_positive_integers(key, value):
    with pytest.raises(InputError, match=f"{key} is not a positive int"): parse_config(TINY | {key: value})

@pytest.mark.parametrize("key", WHOLE)
def test_a_missing_size_is_named(key):
    with pytest.raises(InputError, match=key): parse_config({k: v for k, v in TINY.items() if k != key})

@pytest.mark.parametrize("key,value", [
    ("model_type", None), ("model_type", "deepseek_v3"), ("hidden_act", "gelu"), ("scoring_func", "softmax"),
    ("topk_method", "greedy"), ("moe_layer_freq", 2), ("attention_bias", True), ("mlp_bias", True),
    ("tie_word_embeddings", True), ("rope_interleave", False), ("indexer_rope_interleave", False),
    ("rope_scaling", {"type": "yarn", "factor": 4}), ("quantization_config", {"quant_method": "fp8"}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}), ("rope_parameters", {"rope_type": "default"}),
    ("rope_parameters", [1]), ("rms_norm_eps", 0), ("rms_norm_eps", "small"), ("rms_norm_eps", float("nan")),
    ("routed_scaling_factor", -1), ("routed_scaling_factor", float("inf")), ("norm_topk_prob", 1),
    ("indexer_types", ["full"] * 3), ("indexer_types", ["full"] * 5), ("indexer_types", ["full"] * 3 + ["none"]),
    ("indexer_types", 4), ("indexer_types", [{}] * 4), ("mlp_layer_types", ["dense"]), ("mlp_layer_types", "DDDD"),
    ("first_k_dense_replace", -1), ("num_nextn_predict_layers", "1"), ("num_key_value_heads", 2),
    ("n_group", 3), ("topk_group", 2), ("num_experts_per_tok", 9), ("qk_rope_head_dim", 15)])
def test_what_is_not_done_is_refused_by_key(key, value):
    message = {"rope_parameters": "rope_", "topk_group": "groups"}.get(key, key)
    with pytest.raises(InputError, match=message) as e: parse_config(TINY | {key: value})
    assert e.value.exit_code == 2

def test_other_refusals():
    with pytest.raises(InputError, match="first layer"):
        parse_config(TINY | dict(indexer_types=["shared"] + ["full"] * 3))
    with pytest.raises(InputError, match="not an object"): parse_config([])
    for layers in (0, 5, -1):
        with pytest.raises(InputError, match="layers asked for"): parse_config(TINY, layers)
    for key in ONLY: assert parse_config(TINY | {key: None}) == CONFIG


# -- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    d = tmp_path_factory.mktemp("ours")
    save_checkpoint(d, TINY, WEIGHTS)
    return d

def resaved(tmp_path, **changes):
    save_checkpoint(tmp_path, TINY, {k: w for k, w in (WEIGHTS | changes).items() if w is not None})
    return tmp_path

def test_what_is_saved_is_loaded(saved):
    config, weights = load_checkpoint(saved)
    assert config == CONFIG == read_config(saved) and weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(w, weights[k]) and w.shape == weight_shapes(CONFIG)[k] for k, w in WEIGHTS.items())

def test_only_the_layers_asked_for_are_read(saved):
    config, weights = load_checkpoint(saved, layers=2)
    assert config.num_hidden_layers == 2 and weights.keys() == weight_shapes(config).keys()
    assert all(torch.equal(w, WEIGHTS[k]) for k, w in weights.items())

def test_half_precision_is_read_as_stored(tmp_path):
    "bf16 on disk, the same numbers in fp32 in the model"
    d = resaved(tmp_path, **{k: w.bfloat16() for k, w in WEIGHTS.items()})
    config, weights = load_checkpoint(d)
    assert all(w.dtype is torch.bfloat16 for w in weights.values())
    rounded = {k: w.bfloat16().float() for k, w in WEIGHTS.items()}
    want = hidden_of(1, Reader, Model(config, rounded, REF), tokens_of(5), (0, 5))
    assert torch.equal(hidden_of(1, Reader, Model(config, weights, REF), tokens_of(5), (0, 5)), want)

def test_seeded_weights_are_the_same_in_every_process_and_differ_by_seed():
    again, other = random_weights(CONFIG, 0), random_weights(CONFIG, 1)
    assert all(torch.equal(w, again[k]) and not torch.equal(w, other[k]) for k, w in WEIGHTS.items())

@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.experts.7.up_proj.weight",
                                  "model.layers.3.self_attn.indexer.k_norm.bias"])
def test_bad_tensors_are_named(tmp_path, name):
    for error, change in (("lacks a tensor", None), ("another shape", torch.ones(3, 3)),
                          ("another type", WEIGHTS[name].int())):
        with pytest.raises(InputError, match=f"{error}.*tensor={name}"):
            load_checkpoint(resaved(tmp_path, **{name: change}))

@pytest.mark.parametrize("name", [
    "x", "model.layers.0.mlp.gate.weight", "model.layers.2.self_attn.indexer.wk.weight",
    "model.layers.4.input_layernorm.weight", "model.layers.x.y"])
def test_extra_tensors_are_named(tmp_path, name):
    with pytest.raises(InputError, match=f"extra tensor.*tensor={name}"):
        load_checkpoint(resaved(tmp_path, **{name: torch.ones(2)}))

def test_the_nextn_layer_is_passed_over_if_the_config_has_one(tmp_path):
    extra = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    d = resaved(tmp_path, **extra)
    (d / "config.json").write_text(json.dumps(TINY | dict(num_nextn_predict_layers=1)))
    assert load_checkpoint(d)[1].keys() == WEIGHTS.keys()

def test_a_tensor_in_two_files_is_refused(tmp_path, saved):
    from safetensors.torch import save_file
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "more.safetensors")
    with pytest.raises(InputError, match="twice.*model.norm.weight"): load_checkpoint(tmp_path)

def test_shards_are_read_together(tmp_path):
    from safetensors.torch import save_file
    names = list(WEIGHTS)
    for i in range(3): save_file({k: WEIGHTS[k] for k in names[i::3]}, tmp_path / f"model-{i}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    weights = load_checkpoint(tmp_path)[1]
    assert weights.keys() == WEIGHTS.keys() and all(torch.equal(w, WEIGHTS[k]) for k, w in weights.items())

@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1])
def test_a_cut_file_is_refused(tmp_path, saved, keep):
    whole = (saved / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(InputError, match="not a safetensors file"): load_checkpoint(tmp_path)

def test_directories_that_are_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="no such checkpoint"): load_checkpoint(tmp_path / "none")
    with pytest.raises(InputError, match="no config.json"): load_checkpoint(tmp_path)
    for text, message in (("{", "not JSON"), ("[1]", "not an object"), ("{}", "model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=message): load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not JSON"): load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(InputError, match="no .safetensors"): load_checkpoint(tmp_path)

def test_names_of_a_layer():
    names = [k for k, _ in layer_shapes(CONFIG, 2)]
    assert len(names) == len(set(names)) and not any("indexer" in k for k in names)
    assert LATENT_NORM_EPS == 1e-6


@pytest.mark.parametrize("n", range(CONFIG.num_hidden_layers))
def test_a_layer_is_five_products_and_its_experts(n):
    "Matrices that multiply the same rows are one product, with or without an indexer or a router"
    shapes, layer = [], build_layer(CONFIG, WEIGHTS, n)
    def dense(x, w):
        shapes.append(tuple(w.shape))
        return REF.dense(x, w)
    model = Model(CONFIG, WEIGHTS, dataclasses.replace(REF, dense=dense))
    hidden_of(1, Reader, model, tokens_of(5), (0, 5))
    D, q = CONFIG.hidden_size, CONFIG.q_lora_rank
    inside = (CONFIG.intermediate_size, CONFIG.moe_intermediate_size)[n > 0]
    reads = q + CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim + 48 * CONFIG.has_index[n]
    assert shapes[5 * n:5 * n + 5] == [tuple(w.shape) for w in (
        layer.read_OD, layer.query_OQ, layer.out_DO, layer.up_OD, layer.down_DF)]
    assert shapes[5 * n][0] == reads and shapes[5 * n + 3] == (2 * inside + 8 * (n > 0), D)
    assert len(shapes) == 5 * CONFIG.num_hidden_layers

def test_every_weight_of_a_layer_is_in_it_once():
    for n in range(CONFIG.num_hidden_layers):
        layer = build_layer(CONFIG, WEIGHTS, n)
        held = [layer.read_OD, layer.query_OQ, layer.out_DO, layer.up_OD, layer.down_DF,
                layer.key_HCN, layer.value_HVC, *layer.w.values()]
        if n: held += [layer.gate_up_E2FD, layer.down_EDF]
        assert sum(t.numel() for t in held) == sum(
            np.prod(shape) for _, shape in layer_shapes(CONFIG, n))
        assert all(t.dim() == 1 for t in layer.w.values())
