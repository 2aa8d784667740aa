"""What a model is: its shape and its variations as data, read from `config.json` or from GGUF metadata.

Pure: no torch, no weights, no files. A model file is untrusted, so every number is checked here, once, before
anything is sized or allocated by it. What the decoder cannot compute is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """The model is of a kind, or has a feature or a number, that is not allowed. The text is one line naming it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a dense decoder: grouped-query attention, rotary positions, gated feed-forward, RMS norms."""

    architecture: str
    """Name of the class in `transformers` that computes the same function."""
    layer_count: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    """Of queries, keys and values alike; need not be hidden_size / query_heads."""
    feed_forward_size: int
    vocabulary_size: int
    context_length: int
    rope_theta: float
    norm_epsilon: float
    tied_embeddings: bool
    """The output head is the embedding matrix."""
    attention_bias: bool
    """The projections to queries, keys and values add a bias."""
    output_bias: bool
    """The projection out of attention adds a bias."""
    qk_norm: bool
    """Each head of queries and keys is RMS-normed before the rotation."""
    eos_ids: tuple[int, ...]
    """Ids that end a text, in ascending order."""

    @property
    def query_size(self) -> int:
        """Numbers in all query heads of one token."""
        return self.query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers in all key heads of one token, and as many in its value heads."""
        return self.kv_heads * self.head_dim


_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", *_QWEN)
"""What `config.json` may name."""

_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_LIMITS = {
    "layer_count": 1024,
    "hidden_size": 1 << 17,
    "query_heads": 1024,
    "kv_heads": 1024,
    "head_dim": 1024,
    "feed_forward_size": 1 << 20,
    "vocabulary_size": 1 << 22,
    "context_length": 1 << 27,
}
"""Greatest values taken from a file. Far above any dense model, and small enough that products stay harmless."""


def spec_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Read a Hugging Face `config.json` (of transformers 4 or 5) and, if there is one, `generation_config.json`.

    Defaults of absent fields are those of `transformers`. Raises UnsupportedModel.
    """
    architecture = _architecture(config)
    _refuse_sliding_window(config, architecture)
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            "config.json quantization_config: quantised checkpoints are not done yet; allowed is null"
        )
    for field, allowed in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if (value := config.get(field, allowed)) != allowed:
            raise UnsupportedModel(f"config.json {field} {value!r}: allowed is {allowed!r}")
    query_heads = _count(config, "num_attention_heads", "query_heads")
    hidden_size = _count(config, "hidden_size", "hidden_size")
    # Mistral's own default for an absent count is 8, Qwen's 32; files in use always say it, so demand it there.
    if architecture == "LlamaForCausalLM" and config.get("num_key_value_heads") is None:
        kv_heads = query_heads
    else:
        kv_heads = _count(config, "num_key_value_heads", "kv_heads")
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim", "head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = 128
    else:
        head_dim = _quotient("config.json", hidden_size, query_heads)
    # Llama's switch biases all four projections; Qwen2 always biases the three into attention and never the one out.
    bias = (
        _flag(config, "attention_bias") if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    )
    return _checked(
        "config.json",
        ModelSpec(
            architecture=architecture,
            layer_count=_count(config, "num_hidden_layers", "layer_count"),
            hidden_size=hidden_size,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            feed_forward_size=_count(config, "intermediate_size", "feed_forward_size"),
            vocabulary_size=_count(config, "vocab_size", "vocabulary_size"),
            context_length=_count(config, "max_position_embeddings", "context_length"),
            rope_theta=_rope_theta(config),
            norm_epsilon=_real("config.json", "rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_ids=_eos_ids(config, generation_config or {}),
        ),
    )


def spec_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """Read the metadata of a GGUF file; which optional tensors it holds says what biases and head the model has.

    Raises UnsupportedModel.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF general.architecture {kind!r}: allowed is one of {', '.join(_GGUF_ARCHITECTURES)}"
        )
    fields = {
        key.removeprefix(kind + "."): value for key, value in metadata.items() if key.startswith(kind + ".")
    }
    _refuse_gguf_features(fields, tensor_names)
    query_heads = _count(fields, "attention.head_count", "query_heads", "GGUF")
    hidden_size = _count(fields, "embedding_length", "hidden_size", "GGUF")
    head_dim = (
        _count(fields, "attention.key_length", "head_dim", "GGUF")
        if "attention.key_length" in fields
        else _quotient("GGUF", hidden_size, query_heads)
    )
    for field in ("rope.dimension_count", "attention.value_length"):
        if (value := fields.get(field, head_dim)) != head_dim:
            raise UnsupportedModel(f"GGUF {field} {value!r}: allowed is the head size, {head_dim}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocabulary = {"vocab_size": fields.get("vocab_size", len(tokens) if isinstance(tokens, list) else None)}
    return _checked(
        "GGUF",
        ModelSpec(
            architecture=_GGUF_ARCHITECTURES[kind],
            layer_count=_count(fields, "block_count", "layer_count", "GGUF"),
            hidden_size=hidden_size,
            query_heads=query_heads,
            kv_heads=_count(fields, "attention.head_count_kv", "kv_heads", "GGUF")
            if "attention.head_count_kv" in fields
            else query_heads,
            head_dim=head_dim,
            feed_forward_size=_count(fields, "feed_forward_length", "feed_forward_size", "GGUF"),
            vocabulary_size=_count(vocabulary, "vocab_size", "vocabulary_size", "GGUF"),
            context_length=_count(fields, "context_length", "context_length", "GGUF"),
            rope_theta=_real("GGUF", "rope.freq_base", fields.get("rope.freq_base", 10000.0)),
            norm_epsilon=_real(
                "GGUF", "attention.layer_norm_rms_epsilon", fields.get("attention.layer_norm_rms_epsilon")
            ),
            tied_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            eos_ids=_ids(
                "GGUF tokenizer.ggml.eos_token_id",
                [metadata[key] for key in _GGUF_EOS_KEYS if metadata.get(key) is not None],
            ),
        ),
    )


_GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"config.json architectures {name!r}: allowed is one of {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    """A window that covers the whole context does nothing and is let through."""
    if architecture in _QWEN:
        in_use = config.get("use_sliding_window", False) and config.get("sliding_window", 4096) is not None
        layer_types = config.get("layer_types") or []
        if not isinstance(layer_types, list):
            raise UnsupportedModel(f"config.json layer_types {layer_types!r}: allowed is a list")
        odd = [kind for kind in layer_types if kind != "full_attention"]
        if in_use or odd:
            shown = f"layer_types with {odd[0]!r}" if odd else "use_sliding_window true"
            raise UnsupportedModel(
                f"config.json {shown}: sliding windows are not done yet; allowed is full attention"
            )
    if architecture == "MistralForCausalLM":
        window = config.get("sliding_window", 4096)  # absent means 4096 to transformers
        context_length = _count(config, "max_position_embeddings", "context_length")
        if window is not None and not (isinstance(window, int) and window >= context_length):
            raise UnsupportedModel(
                f"config.json sliding_window {window!r}: sliding windows are not done yet; allowed is null"
            )


def _refuse_gguf_features(fields: Mapping[str, Any], tensor_names: Collection[str]) -> None:
    scaling = fields.get("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_names or "rope.scale_linear" in fields:
        shown = "rope_freqs.weight (a table of scaled frequencies)" if scaling == "none" else repr(scaling)
        raise UnsupportedModel(
            f"GGUF rope.scaling.type {shown}: allowed is none; rotary scaling is not done yet"
        )
    if fields.get("expert_count", 0):
        raise UnsupportedModel(
            f"GGUF expert_count {fields['expert_count']}: allowed is 0; experts are not done yet"
        )
    window = fields.get("attention.sliding_window", 0)
    context_length = _count(fields, "context_length", "context_length", "GGUF")
    if window and not (isinstance(window, int) and window >= context_length):
        raise UnsupportedModel(
            f"GGUF attention.sliding_window {window}: sliding windows are not done yet; allowed is 0"
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies, from `rope_parameters` (transformers 5) or `rope_theta` (4)."""
    for field in ("rope_parameters", "rope_scaling"):
        parameters = config.get(field) or {}
        if not isinstance(parameters, dict):
            raise UnsupportedModel(f"config.json {field} {parameters!r}: allowed is an object or null")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default" or parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(
                f"config.json {field} {parameters!r}: rotary scaling is not done yet; allowed is rope_type default"
            )
        if "rope_theta" in parameters:
            return _real("config.json", f"{field}.rope_theta", parameters["rope_theta"])
    return _real("config.json", "rope_theta", config.get("rope_theta", 10000.0))


def _eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Generation settings win over the model's, as in transformers."""
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return _ids("config.json eos_token_id", value if isinstance(value, list) else [value])


def _ids(where: str, values: list[Any]) -> tuple[int, ...]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UnsupportedModel(f"{where} {value!r}: allowed is a token id")
    return tuple(sorted(set(values)))


def _count(fields: Mapping[str, Any], key: str, name: str, where: str = "config.json") -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LIMITS[name]:
        raise UnsupportedModel(
            f"{where} {key} {value!r}: allowed is a whole number from 1 to {_LIMITS[name]}"
        )
    return value


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"config.json {key} {value!r}: allowed is true or false")
    return value


def _real(where: str, key: str, value: Any) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not math.isfinite(value) or value <= 0:
        raise UnsupportedModel(f"{where} {key} {value!r}: allowed is a positive number")
    return float(value)


def _quotient(where: str, hidden_size: int, query_heads: int) -> int:
    if hidden_size % query_heads:
        raise UnsupportedModel(
            f"{where} hidden size {hidden_size}: allowed is a multiple of the {query_heads} attention heads "
            "where no head size is given"
        )
    return hidden_size // query_heads


def _checked(where: str, spec: ModelSpec) -> ModelSpec:
    """Checks that join two fields."""
    if spec.query_heads % spec.kv_heads:
        raise UnsupportedModel(
            f"{where} key/value heads {spec.kv_heads}: allowed is a divisor of the {spec.query_heads} query heads"
        )
    if not 2 <= spec.head_dim <= _LIMITS["head_dim"] or spec.head_dim % 2:
        raise UnsupportedModel(
            f"{where} head size {spec.head_dim}: allowed is an even number from 2 to {_LIMITS['head_dim']}"
        )
    if spec.eos_ids and spec.eos_ids[-1] >= spec.vocabulary_size:
        raise UnsupportedModel(
            f"{where} end-of-sequence id {spec.eos_ids[-1]}: allowed is an id below the vocabulary's size, "
            f"{spec.vocabulary_size}"
        )
    return spec
