"""The parts of a decoder layer, as functions of tensors and weights: norm, rotary positions, attention, feed-forward.

Rounding follows `transformers`: norms compute in float32 and round before the weight multiplies, angles are float32.
Nothing here knows about requests, steps or stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.attention import paged_attention
from engine.model.batch import Batch
from engine.model.spec import ModelSpec
from engine.model.weights import LayerWeights

_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias.

    On CPUs in float32 it goes to oneDNN, which torch itself uses for bfloat16 but not here, where it chooses MKL.
    What that gives a whole step shows `python -m benchmarks.model_speed`, which runs `transformers` on torch's choice.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and _ONEDNN:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich, 2019)."""
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotations of a step's positions (Su et al., 2021), pairing component i with i + head_dim / 2."""

    cosine: torch.Tensor
    """[rows, 1, head_dim]"""
    sine: torch.Tensor
    """[rows, 1, head_dim], its first half negated, so that a rotation is x * cosine + roll(x) * sine."""

    @staticmethod
    def build(positions: torch.Tensor, spec: ModelSpec, dtype: torch.dtype) -> Rotary:
        """Angles of the positions [rows]: position * theta^(-2i / head_dim)."""
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=positions.device).float()
        frequencies = 1.0 / spec.rope_theta ** (exponents / spec.head_dim)
        angles = positions[:, None].float() * frequencies
        cosine, sine = angles.cos(), angles.sin()
        return Rotary(
            torch.cat((cosine, cosine), -1)[:, None].to(dtype),
            torch.cat((-sine, sine), -1)[:, None].to(dtype),
        )

    def apply_(self, heads: torch.Tensor) -> None:
        """Rotate [rows, heads, head_dim] in place."""
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(self.cosine).addcmul_(rolled, self.sine)


def attention(
    x: torch.Tensor,
    weights: LayerWeights,
    spec: ModelSpec,
    rotary: Rotary,
    pool: DeviceKVPool,
    layer: int,
    batch: Batch,
) -> torch.Tensor:
    """Grouped-query attention of normed rows [rows, hidden] over their sequences.

    Keys and values of all rows go into the pool first, then every row reads through its pages.
    """
    heads = linear(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, spec.head_dim)
    queries, keys = heads[:, : spec.query_heads], heads[:, spec.query_heads : -spec.kv_heads]
    if weights.query_norm is not None and weights.key_norm is not None:
        queries.copy_(rms_norm(queries, weights.query_norm, spec.norm_epsilon))
        keys.copy_(rms_norm(keys, weights.key_norm, spec.norm_epsilon))
    rotary.apply_(heads[:, : -spec.kv_heads])
    pool.write(layer, batch.slots, heads[:, spec.query_heads :])
    attended = paged_attention(queries, pool, layer, batch)
    return linear(attended.reshape(x.shape[0], -1), weights.output, weights.output_bias)


def feed_forward(x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""
    gate, up = linear(x, weights.gate_up).chunk(2, -1)
    return linear(silu(gate).mul_(up), weights.down)
