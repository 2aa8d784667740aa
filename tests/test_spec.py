"""What is read from `config.json` and GGUF metadata, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.model.spec import UnsupportedModel, spec_from_config, spec_from_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.eos_token_id": 2,
}


def config(**changes):
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}


def test_llama():
    spec = spec_from_config(LLAMA)
    assert (spec.layer_count, spec.hidden_size, spec.feed_forward_size) == (5, 64, 96)
    assert (spec.query_heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.query_size, spec.kv_size) == (64, 32)
    assert (spec.vocabulary_size, spec.context_length, spec.norm_epsilon) == (640, 2048, 1e-5)
    assert not (spec.tied_embeddings or spec.attention_bias or spec.output_bias or spec.qk_norm)
    assert spec.rope_theta == 10000.0
    assert spec.eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6}}, 1e6),
    ],
)
def test_rotary_base_of_transformers_4_and_5(changes, theta):
    assert spec_from_config(config(**changes)).rope_theta == theta


def test_families_differ_in_biases_and_norms():
    qwen2 = spec_from_config(
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=4096)
    )
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = spec_from_config(config(architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (
        False,
        False,
        True,
        128,
    )
    llama = spec_from_config(config(attention_bias=True, head_dim=24, tie_word_embeddings=True))
    assert (llama.attention_bias, llama.output_bias, llama.head_dim, llama.tied_embeddings) == (
        True,
        True,
        24,
        True,
    )
    mistral = spec_from_config(config(architectures=["MistralForCausalLM"], sliding_window=None))
    assert not (mistral.attention_bias or mistral.qk_norm)


def test_heads_of_old_llama_configs_are_all_key_heads():
    assert spec_from_config(config(num_key_value_heads=...)).kv_heads == 4


def test_generation_config_names_the_end():
    assert spec_from_config(LLAMA, {"eos_token_id": [9, 5, 9]}).eos_ids == (5, 9)
    assert spec_from_config(config(eos_token_id=None), {}).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            ["MixtralForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
        ),
        ({"architectures": None}, ["architectures None"]),
        ({"architectures": 7}, ["architectures 7"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["rope_scaling", "llama3", "rotary scaling"],
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters", "yarn"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, ["sliding_window 1024", "null"]),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768},
            ["sliding_window 4096"],
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, ["use_sliding_window"]),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers 0", "from 1 to"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers 1000000000000"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers 2.5"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers True"]),
        ({"hidden_size": ...}, ["hidden_size None"]),
        ({"vocab_size": -1}, ["vocab_size -1"]),
        ({"num_key_value_heads": 3}, ["key/value heads 3", "4 query heads"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["64", "5 attention heads"]),
        ({"head_dim": 15}, ["head size 15", "even"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps 0"]),
        ({"rope_theta": float("nan")}, ["rope_theta nan"]),
        ({"eos_token_id": 640}, ["640"]),
        ({"eos_token_id": "x"}, ["eos_token_id 'x'"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings 'yes'"]),
    ],
)
def test_what_is_not_done_is_refused_by_name_in_one_line(changes, words):
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(config(**changes))
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_a_window_as_long_as_the_context_is_none():
    assert (
        spec_from_config(config(architectures=["MistralForCausalLM"], sliding_window=2048)).context_length
        == 2048
    )


def test_gguf():
    spec = spec_from_gguf(GGUF, {"token_embd.weight"})
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.layer_count, spec.query_heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocabulary_size, spec.context_length, spec.rope_theta) == (49152, 8192, 100000.0)
    assert spec.tied_embeddings and not spec.attention_bias and not spec.qk_norm
    assert spec.eos_ids == (2,)


def test_gguf_tensors_say_what_is_optional():
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"}
    spec = spec_from_gguf(GGUF, names)
    assert spec.attention_bias and spec.qk_norm and not spec.tied_embeddings and not spec.output_bias


@pytest.mark.parametrize(
    ("changes", "names", "words"),
    [
        ({"general.architecture": "gemma"}, (), ["gemma", "qwen3"]),
        ({"llama.rope.scaling.type": "yarn"}, (), ["yarn"]),
        ({}, ("rope_freqs.weight",), ["rope_freqs"]),
        ({"llama.expert_count": 8}, (), ["expert_count 8"]),
        ({"llama.attention.sliding_window": 1024}, (), ["sliding_window 1024"]),
        ({"llama.rope.dimension_count": 32}, (), ["rope.dimension_count 32"]),
        ({"llama.attention.head_count": [9, 9]}, (), ["head_count [9, 9]"]),
        ({"llama.block_count": 2**40}, (), ["block_count"]),
        ({"llama.attention.layer_norm_rms_epsilon": None}, (), ["layer_norm_rms_epsilon None"]),
    ],
)
def test_gguf_refusals(changes, names, words):
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_gguf({**GGUF, **changes}, set(names))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_spec_is_pure():
    code = "import sys, engine.model.spec; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
