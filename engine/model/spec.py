"""What a model is, told from its `config.json` or its GGUF metadata. Pure: no torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a dense decoder. (The helper that owns this file extends it.)"""

    architecture: str
    layer_count: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    feed_forward_size: int
    vocabulary_size: int
    context_length: int
    rope_theta: float
    norm_epsilon: float
    tied_embeddings: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
