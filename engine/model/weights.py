"""The weights of one stage: its own layers, read page by page as they are wanted, and nothing of other stages.

Rows come from the source as float32 blocks of bounded size and go straight to their place in the final tensor, so
that memory never holds more than the stage's weights and one block. Query, key and value projections are one
tensor, and so are gate and up: fewer, larger products. Each part has one named tensor behind it, and a part that
the source cannot fill is an error that names tensor and stage; nothing is ever left as it was allocated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from engine.model.source import ModelSource, StoredTensor
from engine.model.spec import ModelSpec

Progress = Callable[[int, int], None]
"""Called with (parameters filled, parameters in all) of this stage."""


class WeightError(ValueError):
    """A weight is missing or of another shape than the configuration says. The text names tensor and stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Rows: all query heads, all key heads, all value heads."""
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    """Rows: gate, then up."""
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """What one stage holds. `embedding` and `head` are one tensor on a single stage with tied embeddings."""

    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor | None
    """First stage only: [vocabulary, hidden]."""
    norm: torch.Tensor | None
    """Last stage only."""
    head: torch.Tensor | None
    """Last stage only: [vocabulary, hidden]."""

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors, a shared one counted once."""
        tensors = {id(tensor): tensor for tensor in self._tensors()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        holders: tuple[StageWeights | LayerWeights, ...] = (self, *self.layers)
        for holder in holders:
            for item in fields(holder):
                if isinstance(tensor := getattr(holder, item.name), torch.Tensor):
                    yield tensor


def load_weights(
    source: ModelSource,
    layers: range,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stage: str = "",
    progress: Progress | None = None,
    seed: int = 0,
) -> StageWeights:
    """Load what the stage that owns `layers` needs. Raises WeightError.

    The stage with layer 0 gets the embedding, the one with the last layer norm and head. With tied embeddings the
    head *is* the embedding, whatever else the file holds under `lm_head` (`transformers` 5 would use a head that
    differs), for every number of stages. `stage` is shown in errors. `seed` is for `dummy`, where a parameter's values
    depend on its name alone.
    """
    spec = source.spec
    assert 0 <= layers.start < layers.stop <= spec.layer_count, f"{layers} of {spec.layer_count} layers"
    loader = _Loader(source, dtype, device, stage, progress, parameter_count(spec, layers), seed)
    vocabulary, hidden = spec.vocabulary_size, spec.hidden_size
    first, last = layers.start == 0, layers.stop == spec.layer_count
    embedding = loader.tensor(hidden, {"model.embed_tokens.weight": vocabulary}) if first else None
    loaded = tuple(_layer(loader, spec, f"model.layers.{layer}") for layer in layers)
    norm = head = None
    if last:
        norm = loader.vector("model.norm.weight", hidden)
        if spec.tied_embeddings and embedding is not None:
            head = embedding
        else:
            name = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
            head = loader.tensor(hidden, {name: vocabulary})
    return StageWeights(layers=loaded, embedding=embedding, norm=norm, head=head)


def parameter_count(spec: ModelSpec, layers: range) -> int:
    """Numbers in the weights of the stage that owns `layers`; times the item size, the bytes it will hold."""
    hidden, first, last = spec.hidden_size, layers.start == 0, layers.stop == spec.layer_count
    qkv_rows = spec.query_size + 2 * spec.kv_size
    per_layer = hidden * (2 + qkv_rows + spec.query_size + 3 * spec.feed_forward_size)
    per_layer += qkv_rows * spec.attention_bias + hidden * spec.output_bias + 2 * spec.head_dim * spec.qk_norm
    embeddings = 1 if first and last and spec.tied_embeddings else first + last
    return per_layer * len(layers) + hidden * (embeddings * spec.vocabulary_size + last)


def _layer(loader: _Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    hidden, feed_forward = spec.hidden_size, spec.feed_forward_size
    attention = f"{prefix}.self_attn"
    rows = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    qkv_bias = query_norm = key_norm = output_bias = None
    if spec.attention_bias:
        qkv_bias = loader.tensor(1, {f"{attention}.{name}.bias": count for name, count in rows.items()}).view(
            -1
        )
    if spec.qk_norm:
        query_norm = loader.vector(f"{attention}.q_norm.weight", spec.head_dim)
        key_norm = loader.vector(f"{attention}.k_norm.weight", spec.head_dim)
    if spec.output_bias:
        output_bias = loader.vector(f"{attention}.o_proj.bias", hidden)
    return LayerWeights(
        attention_norm=loader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=loader.tensor(hidden, {f"{attention}.{name}.weight": count for name, count in rows.items()}),
        qkv_bias=qkv_bias,
        query_norm=query_norm,
        key_norm=key_norm,
        output=loader.tensor(spec.query_size, {f"{attention}.o_proj.weight": hidden}),
        output_bias=output_bias,
        feed_forward_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=loader.tensor(
            hidden,
            {f"{prefix}.mlp.gate_proj.weight": feed_forward, f"{prefix}.mlp.up_proj.weight": feed_forward},
        ),
        down=loader.tensor(feed_forward, {f"{prefix}.mlp.down_proj.weight": hidden}),
    )


_BLOCK_NUMBERS = 1 << 21
"""Numbers read at once: 8 MB of float32."""

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class _Loader:
    """Fills tensors from one source and counts what it filled."""

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        device: torch.device,
        stage: str,
        progress: Progress | None,
        total: int,
        seed: int,
    ) -> None:
        self.source, self.dtype, self.device, self.seed = source, dtype, device, seed
        self.where = f"stage {stage}" if stage else "the stage"
        self.progress, self.done, self.total = progress, 0, total
        self.head_dim = source.spec.head_dim
        # llama.cpp stores the q and k rows of its "llama" architecture with each head's halves interleaved.
        self.interleaved = source.weight_format == "gguf" and source.spec.architecture == "LlamaForCausalLM"

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A one-dimensional parameter."""
        return self.tensor(1, {name: size}).view(-1)

    def tensor(self, columns: int, parts: Mapping[str, int]) -> torch.Tensor:
        """One tensor [sum of the parts' rows, columns], each part filled from the named parameter."""
        target = torch.empty(sum(parts.values()), columns, dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts.items():
            part = target[start : start + rows]
            if self.source.weight_format == "dummy":
                self._fill_random(part, name)
            else:
                self._fill(part, name)
            start += rows
        return target

    def _fill(self, part: torch.Tensor, name: str) -> None:
        rows, columns = part.shape
        stored = self._stored(name, rows, columns)
        if len(stored.shape) == 1:  # a vector is one row of the file
            self._place(part, torch.from_numpy(stored.read_rows(0, 1)).view(rows, 1), name)
            return
        step = (
            max(_BLOCK_NUMBERS // columns // self.head_dim, 1) * self.head_dim
        )  # whole heads, for the interleaved
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            self._place(part[start:stop], torch.from_numpy(stored.read_rows(start, stop)), name)

    def _stored(self, name: str, rows: int, columns: int) -> StoredTensor:
        """The tensor behind a parameter, of the shape that the configuration demands."""
        stored_name = _gguf_name(name) if self.source.weight_format == "gguf" else name
        stored = self.source.tensors.get(stored_name)
        if stored is None:
            raise WeightError(f"{self.source.path}: lacks tensor {stored_name!r}, which {self.where} needs")
        if stored.shape not in ((rows, columns), *(((rows,),) if columns == 1 else ())):
            expected = [rows] if columns == 1 else [rows, columns]
            raise WeightError(
                f"{self.source.path}: tensor {stored_name!r} of {self.where} has shape {list(stored.shape)}; "
                f"the configuration allows {expected}"
            )
        return stored

    def _place(self, part: torch.Tensor, block: torch.Tensor, name: str) -> None:
        if self.interleaved and (".q_proj." in name or ".k_proj." in name):
            # [heads, pairs, 2, columns] of the file -> [heads, 2, pairs, columns], whose rotation pairs i and i + half.
            shape = (-1, self.head_dim // 2, 2, block.shape[1])
            block = block.reshape(shape).transpose(1, 2).reshape(block.shape)
        part.copy_(block)
        self._count(part.numel())

    def _fill_random(self, part: torch.Tensor, name: str) -> None:
        """Norms are one, all else normal, scaled so that activations keep their size from layer to layer."""
        if "norm" in name:
            part.fill_(1.0)
            self._count(part.numel())
            return
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        scale = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(part.shape[1])
        step = max(_BLOCK_NUMBERS // part.shape[1], 1)
        for start in range(0, part.shape[0], step):
            block = part[start : start + step]
            block.copy_(torch.randn(block.shape, generator=generator).mul_(scale))
            self._count(block.numel())

    def _count(self, numbers: int) -> None:
        self.done += numbers
        if self.progress is not None:
            self.progress(self.done, self.total)


def _gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What --dtype means here: `auto` is bfloat16 on CUDA and on CPUs that multiply it in hardware, else float32."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    return (
        torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32
    )
