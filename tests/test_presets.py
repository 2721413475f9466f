"""Names of models: a preset or a directory, read by the parser of checkpoints"""
import json

import pytest
import torch

from cpkv.config import TINY, num_weights
from cpkv.laws import InputError
from cpkv.model import random_weights, save_checkpoint
from cpkv.nextn import random_nextn
from cpkv.pool import format_of, token_bytes
from cpkv.presets import PRESETS, find_source

FULL = {"glm-5": [*range(78)], "glm-5.2": [0, 1, 2, *range(6, 78, 4)],
        "deepseek-v3.2": [*range(61)]}
LARGE = sorted(FULL)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_has_its_layers_and_indexers_where_its_makers_put_them(name):
    c = find_source(name).config
    assert c.num_hidden_layers == {"deepseek-v3.2": 61}.get(name, 78)
    assert [n for n, here in enumerate(c.has_index) if here] == FULL[name]
    assert len(FULL["glm-5.2"]) == 21 and c.mlp_layer_types[:4] == ("dense",) * 3 + ("sparse",)

@pytest.mark.parametrize("name,heads,index_heads,nope,value,lora", [
    ("glm-5", 64, 32, 192, 256, 2048), ("glm-5.2", 64, 32, 192, 256, 2048),
    ("deepseek-v3.2", 128, 64, 128, 128, 1536)])
def test_widths(name, heads, index_heads, nope, value, lora):
    c = find_source(name).config
    assert (c.kv_lora_rank, c.qk_rope_head_dim) == (512, 64)
    assert (c.index_head_dim, c.index_topk) == (128, 2048)
    assert (c.num_attention_heads, c.index_n_heads, c.q_lora_rank) == (heads, index_heads, lora)
    assert (c.qk_nope_head_dim, c.v_head_dim) == (nope, value)

@pytest.mark.parametrize("name,total,active", [
    ("glm-5", 744, 40), ("glm-5.2", 744, 40), ("deepseek-v3.2", 671, 37)])
def test_the_number_of_weights_is_the_published_one(name, total, active):
    "Billions: indexers, which the makers count or not, are less than one"
    got = num_weights(find_source(name).config)
    assert abs(got[0] / 1e9 - total) < 1 and abs(got[1] / 1e9 - active) < 1

@pytest.mark.parametrize("name,size", [
    ("glm-5", 78 * 788), ("glm-5.2", 78 * 656 + 21 * 132), ("deepseek-v3.2", 61 * 788)])
def test_bytes_of_a_token(name, size):
    c = find_source(name).config
    assert sum(token_bytes(c.payload_dims, format_of("fp8_packed"), c.has_index).values()) == size

@pytest.mark.parametrize("name", LARGE)
def test_transformers_says_the_same(name):
    transformers = pytest.importorskip("transformers")
    raw = {k: v for k, v in PRESETS[name].items() if k != "architectures"}
    kinds = {"glm_moe_dsa": "GlmMoeDsaConfig", "deepseek_v32": "DeepseekV32Config"}
    kind = getattr(transformers, kinds[raw["model_type"]])
    said, plain, ours = kind(**raw), kind(), find_source(name).config
    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size",
                "n_routed_experts", "n_group", "topk_group", "vocab_size", "routed_scaling_factor",
                "rms_norm_eps", "num_experts_per_tok", "index_n_heads", "first_k_dense_replace"):
        assert getattr(plain, key) == raw[key], key
    assert tuple(getattr(said, "indexer_types", ["full"] * 61)) == ours.indexer_types

def test_an_unknown_name_is_refused_with_the_known_ones():
    for name in ("glm-6", "GLM-5", "", "no/such/place"):
        with pytest.raises(InputError, match="no such model") as e: find_source(name)
        assert e.value.facts["known"] == ["tiny", "glm-5", "glm-5.2", "deepseek-v3.2"]

def test_shapes_have_no_weights():
    for name in LARGE:
        s = find_source(name)
        assert not s.has_weights
        for load in (s.load, s.load_nextn):
            with pytest.raises(InputError, match="no weights here"): load()

def test_tiny_has_weights_and_a_draft_layer():
    s = find_source("tiny")
    config, weights = s.load()
    assert s.has_weights and config == s.config and torch.equal(
        weights["model.norm.weight"], random_weights(config, 0)["model.norm.weight"])
    assert len(s.load_nextn()) == len(random_nextn(config, 0))

def test_a_directory_is_a_model(tmp_path):
    with pytest.raises(InputError, match="no config.json"): find_source(str(tmp_path))
    (tmp_path/"config.json").write_text(json.dumps(TINY))
    bare = find_source(str(tmp_path))
    assert not bare.has_weights and bare.config == find_source("tiny").config
    with pytest.raises(InputError, match="no .safetensors"): bare.load()
    save_checkpoint(tmp_path, TINY, random_weights(bare.config, 3))
    whole = find_source(str(tmp_path))
    assert whole.has_weights and torch.equal(whole.load()[1]["lm_head.weight"],
                                             random_weights(bare.config, 3)["lm_head.weight"])

def test_a_preset_is_nobodys_to_change():
    "Two presets share keys, not objects that differ"
    assert PRESETS["glm-5"]["rope_parameters"] != PRESETS["glm-5.2"]["rope_parameters"]
    assert "index_topk_freq" not in PRESETS["glm-5"]
