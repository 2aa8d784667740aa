"""What models cache, told from `config.json`: hand-computed prices, and the caches that transformers really fills."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from engine.mem_cache.sizing import ITEM_BYTES, attention_bytes_per_token
from engine.model.cache_shapes import MODEL_TYPES, ModelCache, cache_of
from engine.model.spec import UnsupportedModel, spec_from_config


def read(config, *, tp_size=1, dtype="bfloat16", kv_cache_dtype="bfloat16") -> ModelCache:
    fields = config if isinstance(config, dict) else config.to_dict()
    return cache_of(fields, tp_size=tp_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


def prices(model: ModelCache) -> dict[str, tuple[int, int]]:
    """By pool: bytes of a record, and how many layers keep one."""
    return {pool.name: (pool.record_bytes, len(pool.layers)) for pool in model.shapes}


GLM_5_2 = GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
SMOL = LlamaConfig(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
GRANITE = GraniteMoeHybridConfig(
    num_hidden_layers=6, num_key_value_heads=8, layer_types=["mamba", "mamba", "attention"] * 2
)

# ---- prices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtypes", "expected"),
    [
        # 3 heads x 2 x 64 numbers of 4 bytes: 46,080 bytes a token over 30 layers.
        (SMOL, ("float32", "float32"), {"kv": (1536, 30)}),
        (Qwen2Config(num_key_value_heads=4), ("bfloat16", "bfloat16"), {"kv": (2048, 32)}),
        (Qwen3Config(num_key_value_heads=8), ("bfloat16", "fp8"), {"kv": (2048, 32)}),
        (MistralConfig(sliding_window=None), ("bfloat16", "bfloat16"), {"kv": (4096, 32)}),
        # 512 + 64 numbers, whatever the number of heads.
        (DeepseekV2Config(), ("bfloat16", "bfloat16"), {"latent": (1152, 32)}),
        (DeepseekV3Config(), ("bfloat16", "bfloat16"), {"latent": (1152, 61)}),
        (DeepseekV3Config(), ("bfloat16", "fp8"), {"latent": (576, 61)}),
        # 512 + 4 scales of 4 bytes + 64 numbers of 2; a key of 128 numbers and one scale.
        (DeepseekV32Config(), ("bfloat16", "fp8"), {"latent": (656, 61), "indexer": (132, 61)}),
        (GLM_5_2, ("bfloat16", "fp8"), {"latent": (656, 78), "indexer": (132, 21)}),
        (GLM_5_2, ("bfloat16", "bfloat16"), {"latent": (1152, 78), "indexer": (256, 21)}),
        # 2 heads x 2 x 256; (2 x 16 x 128 + 32 x 128) x 3 in bf16 and 32 x 128 x 128 in fp32.
        (Qwen3NextConfig(), ("bfloat16", "bfloat16"), {"kv": (2048, 12), "state": (2_146_304, 36)}),
        (Qwen3_5TextConfig(), ("float32", "fp8"), {"kv": (2048, 8), "state": (2_195_456, 24)}),
        # 8 heads x 2 x 128; (1024 + 2 x 256) x 3 in bf16 and 128 x 8 x 256 in fp32.
        (FalconH1Config(), ("bfloat16", "bfloat16"), {"kv": (4096, 32), "state": (1_057_792, 32)}),
        # (8192 + 2 x 256) x 3 in bf16 and 128 x 64 x 256 in fp32.
        (GRANITE, ("bfloat16", "bfloat16"), {"kv": (4096, 2), "state": (8_440_832, 4)}),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else None,
)
def test_prices(config, dtypes: tuple[str, str], expected: dict[str, tuple[int, int]]):
    dtype, kv_cache_dtype = dtypes
    assert prices(read(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype)) == expected


ALL = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"head_dim": 64},
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_listed_kind_is_read_as_transformers_writes_it(model_type: str):
    config = transformers.AutoConfig.for_model(model_type, **ALL.get(model_type, {}))
    model = read(config)
    text = config.get_text_config()
    assert model.layer_count == text.num_hidden_layers and model.model_type == model_type
    assert model.pools and all(pool.shape.record_bytes > 0 for pool in model.pools)


# ---- what transformers keeps -----------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
}
INDEX = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
DELTA = {
    "head_dim": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
TINY = [
    LlamaConfig(**SMALL),
    MistralConfig(**SMALL, head_dim=10, sliding_window=None),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, head_dim=12),
    DeepseekV2Config(**LATENT),
    DeepseekV3Config(**LATENT),
    DeepseekV32Config(**LATENT, **INDEX),
    GlmMoeDsaConfig(**LATENT, **INDEX, index_topk_freq=2, index_skip_topk_offset=1),
    Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS),
    Qwen3_5TextConfig(**SMALL, **DELTA, linear_conv_kernel_dim=3),
    Qwen3_5MoeTextConfig(**SMALL, **DELTA, **EXPERTS),
    FalconH1Config(**SMALL, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=2),
    GraniteMoeHybridConfig(
        **SMALL,
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_d_conv=5,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=2,
        shared_intermediate_size=16,
    ),
]


@pytest.mark.parametrize("config", TINY, ids=lambda config: config.model_type)
def test_prices_are_the_bytes_that_transformers_keeps(config):
    """A tiny model reads six tokens in bf16; what its cache then holds is weighed, layer by layer."""
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        layers = model(torch.arange(1, 7)[None], use_cache=True).past_key_values.layers
    found: dict[str, dict[int, int]] = {"kv": {}, "latent": {}, "indexer": {}, "state": {}}
    for index, layer in enumerate(layers):
        if (keys := getattr(layer, "keys", None)) is not None:
            kind = "latent" if hasattr(config, "kv_lora_rank") else "kv"
            found[kind][index] = (keys.nbytes + layer.values.nbytes) // 6
        if (keys := getattr(layer, "indexer_keys", None)) is not None:
            found["indexer"][index] = keys.nbytes // 6
        if (recurrent := getattr(layer, "recurrent_states", {0: None})[0]) is not None:
            # transformers keeps one input more than the next step's convolution needs.
            window = layer.conv_states[0][..., 1:]
            found["state"][index] = window.nbytes + recurrent.nbytes
    ours = {pool.name: dict.fromkeys(pool.layers, pool.record_bytes) for pool in read(config).shapes}
    assert ours == {name: layers for name, layers in found.items() if layers}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(
    "config",
    [SMOL, DeepseekV3Config(), GLM_5_2, Qwen3NextConfig(), FalconH1Config(), GRANITE],
    ids=lambda config: config.model_type,
)
def test_the_tensors_of_a_record_take_what_it_costs(config, kv_cache_dtype: str, tp_size: int):
    if config is SMOL and tp_size == 2:
        tp_size = 3
    for pool in read(config, tp_size=tp_size, kv_cache_dtype=kv_cache_dtype).pools:
        sizes = [math.prod(one.shape) * {"bytes": 1, **ITEM_BYTES}[one.dtype] for one in pool.tensors]
        assert sum(sizes) == pool.shape.record_bytes


def test_state_has_the_shapes_of_transformers():
    config = FalconH1Config(**SMALL, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=2)
    convolution, recurrent = read(config, dtype="float32").pools[1].tensors
    assert (convolution.shape, convolution.dtype) == ((24 + 2 * 2 * 16, 3), "float32")
    assert (recurrent.shape, recurrent.dtype) == ((4, 6, 16), "float32")
    delta = read(Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS)).pools[1].tensors
    assert [one.shape for one in delta] == [(2 * 2 * 8 + 4 * 6, 3), (4, 8, 6)]


def test_recurrent_state_is_kept_as_the_model_says():
    config = {**Qwen3NextConfig().to_dict(), "mamba_ssm_dtype": "bfloat16"}
    assert read(config).pools[1].tensors[1].dtype == "bfloat16"
    assert prices(read(config))["state"] == (49_152 + 1_048_576, 36)


# ---- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rhythm",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 5},
        {"index_topk_pattern": "FFSSF" * 3},
        {"index_topk_pattern": ["full", "shared", "shared"] * 5},
        {"indexer_types": ["full"] * 2 + ["shared"] * 13, "index_topk_freq": 4},
    ],
)
def test_layers_that_share_an_index_keep_no_keys_for_it(rhythm: dict):
    """Read from the file's own rhythm, without the list that transformers makes of it."""
    config = GlmMoeDsaConfig(num_hidden_layers=15, **rhythm)
    fields = {**config.to_dict(), "indexer_types": None, **rhythm}
    owners = tuple(layer for layer, kind in enumerate(config.indexer_types) if kind == "full")
    assert read(fields).shapes[1].layers == read(config).shapes[1].layers == owners


def test_glm_5_2_has_21_indexers_in_78_layers():
    assert read(GLM_5_2).shapes[1].layers == (0, 1, *range(2, 78, 4))


def test_hybrid_layers_are_named_by_the_file_or_come_every_nth():
    fields = Qwen3NextConfig(num_hidden_layers=9).to_dict()
    assert [pool.layers for pool in read(fields).shapes] == [(3, 7), (0, 1, 2, 4, 5, 6, 8)]
    every_third = {**fields, "layer_types": None, "full_attention_interval": 3}
    assert read(every_third).shapes[0].layers == (2, 5, 8)
    assert [pool.layers for pool in read(GRANITE).shapes] == [(2, 5), (0, 1, 3, 4)]
    old = {**GRANITE.to_dict(), "layer_types": ["mamba", "mamba", "attention"] * 2}
    assert read(old) == read(GRANITE)


def test_a_kind_in_no_layer_has_no_pool():
    fields = GRANITE.to_dict()
    assert [pool.name for pool in read({**fields, "layer_types": ["mamba"] * 6}).shapes] == ["state"]
    assert [pool.name for pool in read({**fields, "layer_types": ["attention"] * 6}).shapes] == ["kv"]


def test_a_model_that_also_sees_is_read_by_its_text_part():
    text = Qwen3_5TextConfig()
    whole = Qwen3_5Config(text_config=text.to_dict())
    assert read(whole) == read(text)
    assert read({"model_type": "some_eyes", "text_config": SMOL.to_dict()}) == read(SMOL)


# ---- tp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "tp_size", "expected"),
    [
        (SMOL, 3, {"kv": 256}),
        # 2 KV heads over 8 ranks: each holds a copy of one. Linear heads are divided: 2 and 4 of 16 and 32.
        (Qwen3NextConfig(), 8, {"kv": 1024, "state": (2 * 2 * 128 + 4 * 128) * 3 * 2 + 4 * 128 * 128 * 4}),
        (DeepseekV3Config(), 8, {"latent": 1152}),
        (GLM_5_2, 4, {"latent": 1152, "indexer": 256}),
        # The one group of B and C is on every rank.
        (FalconH1Config(), 4, {"kv": 1024, "state": (256 + 2 * 256) * 3 * 2 + 32 * 8 * 256 * 4}),
    ],
)
def test_what_is_divided_over_tp_ranks_and_what_is_not(config, tp_size: int, expected: dict[str, int]):
    assert {pool.name: pool.record_bytes for pool in read(config, tp_size=tp_size).shapes} == expected


@pytest.mark.parametrize(
    ("config", "tp_size", "words"),
    [
        (
            SMOL,
            2,
            "--tp-size 2: the model has 9, 3 attention heads and key/value heads; allowed is one of 1, 3, 9",
        ),
        (
            DeepseekV3Config(),
            3,
            "--tp-size 3: the model has 128 attention heads; allowed is one of 1, 2, 4, 8",
        ),
        (
            Qwen3NextConfig(linear_num_key_heads=4),
            8,
            "4, 32 heads of linear attention; allowed is one of 1, 2, 4",
        ),
        (
            FalconH1Config(mamba_n_groups=4, hidden_size=3840, num_attention_heads=30, num_key_value_heads=3),
            3,
            "128, 4 Mamba heads",
        ),
    ],
)
def test_a_tp_size_that_heads_do_not_divide_into_is_refused_by_name(config, tp_size: int, words: str):
    with pytest.raises(ValueError) as raised:
        read(config, tp_size=tp_size)
    assert words in str(raised.value)


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "config.json model_type 'gpt2': allowed is one of llama, mistral"),
        ({}, "config.json model_type None: allowed is one of llama"),
        ({"model_type": ["llama"]}, "config.json model_type ['llama']: allowed is"),
        ({"text_config": [1]}, "config.json text_config [1]: allowed is an object"),
        (
            {**SMOL.to_dict(), "num_hidden_layers": 10**9},
            "num_hidden_layers 1000000000: allowed is a whole number",
        ),
        ({**SMOL.to_dict(), "num_hidden_layers": True}, "num_hidden_layers True: allowed is"),
        (
            {**SMOL.to_dict(), "num_key_value_heads": 4},
            "num_key_value_heads 4: allowed is a divisor of the 9",
        ),
        (
            {**SMOL.to_dict(), "head_dim": None, "hidden_size": 577},
            "hidden_size 577: allowed is a multiple of the 9",
        ),
        (
            MistralConfig().to_dict(),
            "sliding_window 4096: sliding windows are not done yet; allowed is null",
        ),
        ({**Qwen2Config().to_dict(), "use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        (
            {**Qwen2Config().to_dict(), "layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "layer_types with 'sliding_attention': allowed is full_attention, attention",
        ),
        ({**GRANITE.to_dict(), "layer_types": None}, "layer_types None: allowed is a list of 6 names"),
        (
            {**GRANITE.to_dict(), "layer_types": ["mamba"]},
            "layer_types ['mamba']: allowed is a list of 6 names",
        ),
        (
            {**GRANITE.to_dict(), "mamba_n_heads": 100},
            "mamba_n_heads 100: allowed is a divisor of the inner size",
        ),
        ({**GRANITE.to_dict(), "mamba_d_head": 65}, "mamba_d_head 65: allowed is auto or 64"),
        (
            {**Qwen3NextConfig().to_dict(), "linear_num_value_heads": 24},
            "linear_num_value_heads 24: allowed is a mul",
        ),
        ({**Qwen3NextConfig().to_dict(), "head_dim": None}, "head_dim None: allowed is"),
        (
            {**Qwen3NextConfig().to_dict(), "mamba_ssm_dtype": "int4"},
            "mamba_ssm_dtype 'int4': allowed is one of",
        ),
        ({**GLM_5_2.to_dict(), "indexer_types": ["full"] * 77}, "indexer_types ['full', "),
        ({**GLM_5_2.to_dict(), "indexer_types": "FX" * 39}, "indexer_types with 'X': allowed is F, S"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name_in_one_short_line(fields: dict, words: str):
    with pytest.raises(UnsupportedModel) as raised:
        read(fields)
    text = str(raised.value)
    assert words in text and "\n" not in text and len(text) < 300


def test_the_packed_layout_needs_whole_groups_of_numbers():
    for field, value in (("kv_lora_rank", 500), ("index_head_dim", 96)):
        fields = {**GLM_5_2.to_dict(), field: value}
        assert read(fields)
        with pytest.raises(
            UnsupportedModel, match=f"{field} {value}: allowed with --kv-cache-dtype fp8 is a mult"
        ):
            read(fields, kv_cache_dtype="fp8")


WHOLE = [SMOL, DeepseekV3Config(), GLM_5_2, Qwen3NextConfig(), FalconH1Config(), GRANITE, MistralConfig()]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_junk_in_a_file_is_refused_or_bounded_and_never_a_crash(data: st.DataObject):
    fields = data.draw(st.sampled_from([config.to_dict() for config in WHOLE]))
    for _ in range(data.draw(st.integers(1, 3))):
        fields = {**fields, data.draw(st.sampled_from(sorted(fields))): data.draw(JUNK)}
    try:
        model = read(fields, kv_cache_dtype=data.draw(st.sampled_from(["bfloat16", "fp8"])))
    except UnsupportedModel as error:
        assert str(error).startswith("config.json ") and "allowed" in str(error)
    else:
        assert all(0 < pool.record_bytes < 2**60 and len(pool.layers) <= 1024 for pool in model.shapes)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_planner_and_the_engine_pay_the_same_for_a_token(family: str, tp_size: int):
    """The engine prices by its own reading of the model; both must come to the same."""
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 5,
        "intermediate_size": 256,
        "vocab_size": 640,
        "max_position_embeddings": 1024,
    }
    [pool] = read(config, tp_size=tp_size, kv_cache_dtype="float32").shapes
    for layers in (range(3), range(3, 5)):
        price = attention_bytes_per_token(
            spec_from_config(config), len(layers), tp_size=tp_size, dtype="float32"
        )
        assert pool.bytes_on(layers) == price > 0
