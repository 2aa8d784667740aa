"""What a model caches: from `config.json` to the list of its cache pools, for the planner.

Owns which architectures keep keys and values, latents, indexer keys or recurrent state, in which layers, of which
shape on one tp rank. A config is untrusted: every number is bounded here. Prices come from `mem_cache.sizing`; the
tensors listed beside each price take exactly that many bytes. It never looks at weights or at the machine.

Over tp ranks: KV heads are divided, or copied where there are more ranks than heads; latents and indexer keys are the
same on every rank; recurrent state is divided by heads, with the groups of Mamba following the rule of KV heads.
Layers for multi-token prediction are not part of the model served, and not counted.

The engine prices the models that it runs by their `ModelSpec` and the same functions of `sizing`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.mem_cache import sizing
from engine.mem_cache.sizing import ITEM_BYTES, PoolShape
from engine.model.spec import UnsupportedModel


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a pool's record: what one token, or one slot, keeps in one layer on one tp rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, `float16` or `fp8`; `bytes` for a layout that mixes numbers and scales."""


@dataclass(frozen=True, slots=True)
class CachePool:
    """One pool of the whole model: its price and layers, and the tensors that it is made of."""

    shape: PoolShape
    tensors: tuple[CacheTensor, ...]


@dataclass(frozen=True, slots=True)
class ModelCache:
    """All that a model caches: pools in the order kv, latent, indexer, state; a kind in no layer is absent."""

    model_type: str
    layer_count: int
    pools: tuple[CachePool, ...]

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """The pools' prices and layers, in the one order that every rank uses."""
        return tuple(pool.shape for pool in self.pools)


_ATTENTION = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3")
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_MAMBA = ("falcon_h1", "granitemoehybrid")
MODEL_TYPES = (*_ATTENTION, *_LATENT, *_SPARSE, *_DELTA, *_MAMBA)
"""What `config.json` may name; `qwen3_5_text`, the text part of a model that also sees, is read as `qwen3_5`."""


def cache_of(config: Mapping[str, Any], *, tp_size: int, dtype: str, kv_cache_dtype: str) -> ModelCache:
    """Read what the model of a `config.json` caches on one of `tp_size` tp ranks.

    `dtype` is that of arithmetic, in which convolution windows are kept; `kv_cache_dtype` is that of keys, values and
    latents, `fp8` meaning the packed layout with scales for models with a sparse index. Raises UnsupportedModel, and
    ValueError for a tp size that the heads do not divide into.
    """
    fields, kind = _text_fields(config)
    layer_count = _count(fields, "num_hidden_layers", 1024)
    if kind in _LATENT or kind in _SPARSE:
        pools = _latent_pools(fields, kind, layer_count, tp_size, kv_cache_dtype)
    else:
        attention, recurrent = _layer_kinds(fields, kind, layer_count)
        pools = [_attention_pool(fields, kind, attention, tp_size, kv_cache_dtype)]
        if recurrent and kind in _DELTA:
            pools.append(_delta_pool(fields, recurrent, tp_size, dtype))
        elif recurrent:
            pools.append(_mamba_pool(fields, recurrent, tp_size, dtype))
    return ModelCache(kind, layer_count, tuple(pool for pool in pools if pool.shape.layers))


# ---- pools -----------------------------------------------------------------------------------------


def _attention_pool(
    fields: Mapping[str, Any], kind: str, layers: tuple[int, ...], tp_size: int, dtype: str
) -> CachePool:
    query_heads = _count(fields, "num_attention_heads", 1024)
    # Null means one a query head. Absent means so to Llama only, and other defaults differ: they must say it.
    unsaid = {"num_key_value_heads": None} if kind == "llama" else {"num_key_value_heads": 0}
    kv_heads = query_heads
    if {**unsaid, **fields}["num_key_value_heads"] is not None:
        kv_heads = _count(fields, "num_key_value_heads", 1024)
    if query_heads % kv_heads:
        raise UnsupportedModel(
            f"config.json num_key_value_heads {kv_heads}: allowed is a divisor of the {query_heads} attention heads"
        )
    _check_tp_size(tp_size, (query_heads,), kv_heads, "attention heads and key/value heads")
    head_dim = _head_dim(fields, kind, query_heads)
    price = sizing.attention_record_bytes(
        kv_heads, head_dim, head_dim, tp_size=tp_size, item_bytes=ITEM_BYTES[dtype]
    )
    heads = max(kv_heads // tp_size, 1)
    tensors = tuple(CacheTensor(name, (heads, head_dim), dtype) for name in ("key", "value"))
    return CachePool(PoolShape("kv", price, layers), tensors)


def _latent_pools(
    fields: Mapping[str, Any], kind: str, layer_count: int, tp_size: int, dtype: str
) -> list[CachePool]:
    """MLA's latent with its rotary part, and where there is a sparse index, the keys of its indexer layers.

    The index keeps its keys in the layout of the latents: packed with scales when these are fp8, else plain numbers.
    """
    query_heads = _count(fields, "num_attention_heads", 1024)
    _check_tp_size(tp_size, (query_heads,), query_heads, "attention heads")
    rank = _count(fields, "kv_lora_rank", 1 << 14)
    rope = _count(fields, "qk_rope_head_dim", 1024)
    everywhere = tuple(range(layer_count))
    packed = dtype == "fp8" and kind in _SPARSE
    if packed:
        _check_scales("kv_lora_rank", rank)
        price = sizing.sparse_latent_record_bytes(rank, rope)
    else:
        price = sizing.latent_record_bytes(rank, rope, item_bytes=ITEM_BYTES[dtype])
    latent = CacheTensor("latent", (price,) if packed else (rank + rope,), "bytes" if packed else dtype)
    pools = [CachePool(PoolShape("latent", price, everywhere), (latent,))]
    if kind in _SPARSE:
        head_dim = _count(fields, "index_head_dim", 1024)
        if packed:
            _check_scales("index_head_dim", head_dim)
        price = sizing.indexer_record_bytes(head_dim, item_bytes=ITEM_BYTES[dtype])
        key = CacheTensor("key", (price,) if packed else (head_dim,), "bytes" if packed else dtype)
        indexed = _indexer_layers(fields, kind, layer_count)
        pools.append(CachePool(PoolShape("indexer", price, indexed), (key,)))
    return pools


def _delta_pool(fields: Mapping[str, Any], layers: tuple[int, ...], tp_size: int, dtype: str) -> CachePool:
    """Gated delta rule (Qwen3-Next, Qwen3.5): a window over queries, keys, values; key_dim x value_dim a head."""
    key_heads = _count(fields, "linear_num_key_heads", 1024)
    value_heads = _count(fields, "linear_num_value_heads", 1024)
    key_dim = _count(fields, "linear_key_head_dim", 1024)
    value_dim = _count(fields, "linear_value_head_dim", 1024)
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"config.json linear_num_value_heads {value_heads}: allowed is a multiple of the {key_heads} key heads"
        )
    _check_tp_size(tp_size, (key_heads, value_heads), value_heads, "heads of linear attention")
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // tp_size
    window = _count(fields, "linear_conv_kernel_dim", 64) - 1
    recurrent = (value_heads // tp_size, key_dim, value_dim)
    return _state_pool(layers, (channels, window), dtype, recurrent, _recurrent_dtype(fields))


def _mamba_pool(fields: Mapping[str, Any], layers: tuple[int, ...], tp_size: int, dtype: str) -> CachePool:
    """Mamba 2 (Falcon-H1, Granite): a window over inputs and the groups' B and C, and head_dim x d_state a head."""
    heads = _count(fields, "mamba_n_heads", 4096)
    groups = _count(fields, "mamba_n_groups", 1024)
    state_size = _count(fields, "mamba_d_state", 4096)
    if fields.get("mamba_d_ssm") is not None:
        inner = _count(fields, "mamba_d_ssm", 1 << 20)
    else:
        inner = _count(fields, "mamba_expand", 64) * _count(fields, "hidden_size", 1 << 17)
    if inner % heads or heads % groups:
        raise UnsupportedModel(
            f"config.json mamba_n_heads {heads}: allowed is a divisor of the inner size {inner} "
            f"and a multiple of the {groups} groups"
        )
    head_dim = inner // heads
    if fields.get("mamba_d_head", "auto") not in ("auto", head_dim):
        raise UnsupportedModel(
            f"config.json mamba_d_head {_shown(fields['mamba_d_head'])}: allowed is auto or {head_dim}"
        )
    _check_tp_size(tp_size, (heads,), groups, "Mamba heads and groups")
    channels = inner // tp_size + 2 * max(groups // tp_size, 1) * state_size
    window = _count(fields, "mamba_d_conv", 64) - 1
    recurrent = (heads // tp_size, head_dim, state_size)
    return _state_pool(layers, (channels, window), dtype, recurrent, _recurrent_dtype(fields))


def _state_pool(
    layers: tuple[int, ...],
    convolution: tuple[int, int],
    convolution_dtype: str,
    recurrent: tuple[int, int, int],
    recurrent_dtype: str,
) -> CachePool:
    """One slot: [channels, inputs that the convolution still needs] and [heads, rows, columns]."""
    price = sizing.state_record_bytes(
        convolution[0] * convolution[1],
        recurrent[0] * recurrent[1] * recurrent[2],
        convolution_bytes=ITEM_BYTES[convolution_dtype],
        recurrent_bytes=ITEM_BYTES[recurrent_dtype],
    )
    tensors = (
        CacheTensor("convolution", convolution, convolution_dtype),
        CacheTensor("recurrent", recurrent, recurrent_dtype),
    )
    return CachePool(PoolShape("state", price, layers), tensors)


# ---- layers ----------------------------------------------------------------------------------------

_LAYER_KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
}
"""Names of transformers 5, and of files written before it."""


def _layer_kinds(
    fields: Mapping[str, Any], kind: str, layer_count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers with attention, and those with recurrent state."""
    everywhere = tuple(range(layer_count))
    if kind == "falcon_h1":
        return everywhere, everywhere
    if kind in _ATTENTION:
        _refuse_sliding_window(fields, kind)
    if fields.get("layer_types") is None:
        if kind in _ATTENTION:
            return everywhere, ()
        if kind in _DELTA:
            interval = _count({"full_attention_interval": 4, **fields}, "full_attention_interval", 1024)
            full = tuple(layer for layer in everywhere if (layer + 1) % interval == 0)
            return full, tuple(layer for layer in everywhere if (layer + 1) % interval)
    allowed = [name for name, found in _LAYER_KINDS.items() if found == "attention" or kind not in _ATTENTION]
    names = _per_layer(fields, "layer_types", layer_count, allowed)
    attention, recurrent = (
        tuple(layer for layer in everywhere if _LAYER_KINDS[names[layer]] == wanted)
        for wanted in ("attention", "recurrent")
    )
    return attention, recurrent


def _indexer_layers(fields: Mapping[str, Any], kind: str, layer_count: int) -> tuple[int, ...]:
    """Layers that own an indexer; the others take the choice of the last one before them and keep no keys for it.

    Told by a list or a pattern, or by a rhythm: every `index_topk_freq`-th layer, counted from one before
    `index_skip_topk_offset`, and all before that.
    """
    everywhere = tuple(range(layer_count))
    if kind != "glm_moe_dsa":
        return everywhere
    for field in ("indexer_types", "index_topk_pattern"):
        value = fields.get(field)
        if value is not None:
            # A pattern may also be written as letters: FFFSSSF...
            full, shared = ("F", "S") if isinstance(value, str) else ("full", "shared")
            listed = list(value) if isinstance(value, str) else value
            names = _per_layer({field: listed}, field, layer_count, [full, shared])
            return tuple(layer for layer in everywhere if names[layer] == full)
    rhythm = _count({"index_topk_freq": 1, **fields}, "index_topk_freq", 1024)
    offset = _count({"index_skip_topk_offset": 2, **fields}, "index_skip_topk_offset", 1024)
    return tuple(layer for layer in everywhere if max(layer - offset + 1, 0) % rhythm == 0)


def _refuse_sliding_window(fields: Mapping[str, Any], kind: str) -> None:
    """A window that covers the whole context does nothing and is let through."""
    if kind.startswith("qwen"):
        window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window", False) else None
    else:
        window = fields.get("sliding_window", 4096 if kind == "mistral" else None)
    if window is None:
        return
    context_length = _count(fields, "max_position_embeddings", 1 << 27)
    if not isinstance(window, int) or window < context_length:
        raise UnsupportedModel(
            f"config.json sliding_window {_shown(window)}: sliding windows are not done yet; allowed is null"
        )


# ---- fields ----------------------------------------------------------------------------------------


def _text_fields(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The fields of the language model, which models that also see keep in `text_config`, and its kind."""
    fields = config.get("text_config")
    if fields is None:
        fields = config
    if not isinstance(fields, Mapping):
        raise UnsupportedModel(f"config.json text_config {_shown(fields)}: allowed is an object")
    name = fields.get("model_type", config.get("model_type"))
    kind = name.removesuffix("_text") if isinstance(name, str) else name
    if kind not in MODEL_TYPES:
        raise UnsupportedModel(
            f"config.json model_type {_shown(name)}: allowed is one of {', '.join(MODEL_TYPES)}"
        )
    return fields, str(kind)


def _head_dim(fields: Mapping[str, Any], kind: str, query_heads: int) -> int:
    if fields.get("head_dim") is not None or kind in _DELTA:
        return _count(fields, "head_dim", 1024)
    if kind == "qwen3":
        return 128
    hidden_size = _count(fields, "hidden_size", 1 << 17)
    if hidden_size % query_heads:
        raise UnsupportedModel(
            f"config.json hidden_size {hidden_size}: allowed is a multiple of the {query_heads} attention heads "
            "where no head_dim is given"
        )
    return hidden_size // query_heads


def _recurrent_dtype(fields: Mapping[str, Any]) -> str:
    """Recurrent state adds up over a whole text, so it is kept in fp32 unless the model says otherwise."""
    value = fields.get("mamba_ssm_dtype") or "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"config.json mamba_ssm_dtype {_shown(value)}: allowed is one of float32, bfloat16, float16"
        )
    return str(value)


def _check_tp_size(tp_size: int, divided: tuple[int, ...], copied: int, what: str) -> None:
    """Raise ValueError unless `divided` heads split evenly and `copied` ones split or repeat evenly."""

    def legal(size: int) -> bool:
        return not any(heads % size for heads in divided) and (copied % size == 0 or size % copied == 0)

    if not legal(tp_size):
        counts = ", ".join(str(count) for count in dict.fromkeys((*divided, copied)))
        allowed = ", ".join(str(size) for size in range(1, max(divided) + 1) if legal(size))
        raise ValueError(f"--tp-size {tp_size}: the model has {counts} {what}; allowed is one of {allowed}")


def _check_scales(field: str, value: int) -> None:
    if value % sizing.SCALE_GROUP:
        raise UnsupportedModel(
            f"config.json {field} {value}: allowed with --kv-cache-dtype fp8 is a multiple of {sizing.SCALE_GROUP}"
        )


def _count(fields: Mapping[str, Any], field: str, most: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UnsupportedModel(
            f"config.json {field} {_shown(value)}: allowed is a whole number from 1 to {most}"
        )
    return value


def _per_layer(fields: Mapping[str, Any], field: str, layer_count: int, allowed: list[str]) -> list[str]:
    names = fields.get(field)
    if not isinstance(names, list) or len(names) != layer_count:
        raise UnsupportedModel(
            f"config.json {field} {_shown(names)}: allowed is a list of {layer_count} names, one per layer"
        )
    for name in names:
        if name not in allowed:
            raise UnsupportedModel(
                f"config.json {field} with {_shown(name)}: allowed is {', '.join(allowed)}"
            )
    return names


def _shown(value: Any) -> str:
    """A value for an error of one line, whatever the file holds."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
