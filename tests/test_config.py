"A config is computed as its makers mean it; or refused by the key that is wrong"
import dataclasses
import math

import pytest
import torch
from hypothesis import given, strategies as st

from cpkv.config import FAMILIES, TINY, Yarn, mscale, num_weights, parse_config, rope_speeds, weight_shapes
from cpkv.laws import InputError

V32 = dict(  # its public config.json, less what a decoder does not read, and unquantised
    model_type="deepseek_v32", vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256,
    routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", num_experts_per_tok=8, norm_topk_prob=True,
    moe_layer_freq=1, first_k_dense_replace=3, hidden_act="silu", rms_norm_eps=1e-6, index_topk=2048, index_head_dim=128,
    index_n_heads=64, num_nextn_predict_layers=1, max_position_embeddings=163840, rope_theta=10000, rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))


# -- DeepSeek-V3.2


def test_v32_from_its_public_numbers():
    c = parse_config(V32)
    assert (c.index_rope, c.rms_norm_eps, c.rope_theta, c.n_group, c.topk_group) == ("half", 1e-6, 1e4, 8, 4)
    assert all(c.has_index) and c.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 58
    assert c.yarn == Yarn(factor=40, original=4096, beta_fast=32, beta_slow=1, truncate=True, on_angles=1.0,
                          on_scores=(0.1 * math.log(40) + 1) ** 2)
    assert c.scale == pytest.approx(1.3688879454113936 ** 2 / 192 ** .5)
    total, active = num_weights(c)
    assert round(total / 1e9, 1) == 671.9 and round(active / 1e9, 1) == 37.5
    assert len(weight_shapes(c)) == 3 + 61 * (9 + 5) + 3 * 3 + 58 * (2 + 3 * 257)

def test_v32_of_transformers_is_the_same():
    hf = pytest.importorskip("transformers")
    raw = hf.DeepseekV32Config(rope_theta=10000.0, rope_scaling=dict(V32["rope_scaling"])).to_dict()
    assert parse_config(raw) == parse_config(V32)

def test_glm52_of_transformers_is_the_same():
    hf = pytest.importorskip("transformers")
    raw = hf.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3).to_dict()
    c = parse_config(raw)
    assert sum(c.has_index) == 21 == sum(parse_config(raw | dict(indexer_types=None)).has_index)
    assert c.has_index == tuple(t == "full" for t in raw["indexer_types"])

def test_families_have_their_own_defaults():
    missing = {k: v for k, v in TINY.items() if k not in ("rms_norm_eps", "indexer_types")}
    for name, family in FAMILIES.items():
        c = parse_config(missing | dict(model_type=name))
        assert (c.rms_norm_eps, c.index_rope) == (family.rms_norm_eps, family.index_rope)

@pytest.mark.parametrize("key,value", [
    ("indexer_types", ["full", "full", "shared", "full"]), ("index_topk_pattern", "FFSF"), ("index_topk_freq", 2),
    ("indexer_rope_interleave", True), ("quantization_config", dict(quant_method="fp8", weight_block_size=[128, 128]))])
def test_what_v32_does_not_do_is_refused(key, value):
    assert parse_config(V32 | {key: None})
    with pytest.raises(InputError, match=key if key[0] != "i" or "rope" in key else "indexer_types"):
        parse_config(V32 | dict(num_hidden_layers=4, num_nextn_predict_layers=0) | {key: value})


# -- the rotation


def rope(**keys): return parse_config(TINY | dict(rope_parameters=dict(rope_theta=1e4, rope_type="yarn") | keys)).yarn

YARNS = [dict(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
         dict(factor=4, original_max_position_embeddings=128), dict(factor=1, original_max_position_embeddings=4096),
         dict(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0, beta_fast=8, beta_slow=2),
         dict(factor=8, original_max_position_embeddings=64, attention_factor=1.25, mscale_all_dim=0.5),
         dict(factor=8, original_max_position_embeddings=1000, truncate=False, mscale=1.0, mscale_all_dim=0),
         dict(factor=16, original_max_position_embeddings=7, beta_fast=1, beta_slow=1)]

@pytest.mark.parametrize("keys", YARNS)
@pytest.mark.parametrize("dim", [16, 64])
def test_yarn_of_transformers_is_the_same(keys, dim):
    hf = pytest.importorskip("transformers")
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
    own = {k: v for k, v in TINY.items() if k not in ("architectures", "model_type", "indexer_types")}
    own |= dict(qk_rope_head_dim=dim, index_head_dim=64, rope_parameters=dict(rope_theta=1e4, rope_type="yarn") | keys)
    config = hf.DeepseekV32Config(**own)
    there, attention = v32.DeepseekV32RotaryEmbedding(config), v32.DeepseekV32Attention(config, 0)
    c = parse_config(own | dict(model_type="deepseek_v32"))
    assert torch.equal(rope_speeds(dim, c.rope_theta, c.yarn), there.inv_freq)
    assert c.yarn.on_angles == pytest.approx(there.attention_scaling, rel=1e-12)
    assert c.scale == pytest.approx(attention.scaling, rel=1e-12)

@given(factor=st.floats(1, 1000), original=st.integers(2, 1 << 20), dim=st.sampled_from([2, 16, 64, 128]),
       turns=st.tuples(st.floats(.1, 100), st.floats(.1, 100)))
def test_speeds_lie_between_plain_and_slowed(factor, original, dim, turns):
    yarn = Yarn(factor=factor, original=original, beta_fast=max(turns), beta_slow=min(turns), truncate=True,
                on_angles=1, on_scores=1)
    plain, got = rope_speeds(dim, 1e4, None), rope_speeds(dim, 1e4, yarn)
    assert got.isfinite().all() and (got <= plain * (1 + 1e-6)).all() and (got >= plain / factor * (1 - 1e-6)).all()
    assert (got.diff() <= 0).all()

def test_mscale_by_hand():
    assert mscale(1, 1) == mscale(0.5, 3) == 1 and mscale(math.e, 2) == pytest.approx(1.2) and mscale(9, 0) == 1

def test_old_and_new_place_of_the_rotation_mean_the_same():
    old = {k: v for k, v in V32.items() if k not in ("rope_scaling", "rope_theta")}
    new = old | dict(rope_parameters=V32["rope_scaling"] | dict(rope_theta=10000, rope_type="yarn"))
    assert parse_config(new) == parse_config(V32)
    assert parse_config(old | dict(rope_parameters=V32["rope_scaling"], rope_theta=10000.0)) == parse_config(V32)
    assert parse_config(old | dict(rope_theta=5e5)).rope_theta == 5e5
    plain = parse_config(old)
    assert plain.rope_theta == 1e4 and plain.yarn is None and plain.scale == pytest.approx(192 ** -.5)

@pytest.mark.parametrize("keys,said", [
    (dict(rope_scaling=[1]), "rope_scaling is not an object"), (dict(rope_scaling=dict(type="linear", factor=2)), "rope_type"),
    (dict(rope_scaling=dict(rope_type="longrope")), "rope_type"), (dict(rope_parameters=dict(rope_theta=1.0)), "both there"),
    (dict(rope_theta=-1), "rope_theta"), (dict(rope_theta=0), "rope_theta"), (dict(rope_theta=True), "rope_theta")])
def test_a_rotation_that_is_none_is_refused(keys, said):
    with pytest.raises(InputError, match=said): parse_config(V32 | keys)

@pytest.mark.parametrize("key,value", [
    ("factor", 0), ("factor", None), ("factor", "40"), ("factor", float("nan")), ("original_max_position_embeddings", None),
    ("original_max_position_embeddings", 4096.5), ("beta_fast", -1), ("beta_slow", "1"), ("mscale", -1.0), ("mscale", "1"),
    ("mscale_all_dim", float("inf")), ("mscale_all_dim", float("nan")), ("attention_factor", -2)])
def test_yarn_is_refused_by_key_and_place(key, value):
    for place in ("rope_scaling", "rope_parameters"):
        raw = {k: v for k, v in V32.items() if k != "rope_scaling"} | {place: V32["rope_scaling"] | dict(rope_theta=1e4)}
        with pytest.raises(InputError, match=f"json: {place}: {key}"): parse_config(raw | {place: raw[place] | {key: value}})

def test_zero_and_null_mean_what_they_mean_there():
    first = YARNS[0]
    assert rope(**first, beta_fast=None) == rope(**first)
    assert rope(**first | dict(mscale_all_dim=0)).on_scores == 1.0
    assert rope(**first | dict(mscale_all_dim=None)).on_angles == mscale(40, 1)

def test_a_config_is_a_value():
    c = parse_config(V32)
    assert hash(c) == hash(parse_config(V32)) and c != dataclasses.replace(c, yarn=None)
