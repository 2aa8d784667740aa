"""The decoder: one class for every dense family, run over the layers of one stage. Reads like the papers.

Owns no weights of other stages, no cache (the pool is given) and no request. What differs between families is data in
`ModelSpec`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.batch import Batch
from engine.model.layers import Rotary, attention, feed_forward, linear, rms_norm
from engine.model.spec import ModelSpec
from engine.model.weights import StageWeights


class Decoder:
    """The layers of one stage. Call it under `torch.inference_mode()`, which is a state of the calling thread."""

    def __init__(self, spec: ModelSpec, weights: StageWeights) -> None:
        self.spec, self.weights = spec, weights

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pool: DeviceKVPool) -> torch.Tensor:
        """Hidden states [rows, hidden] after this stage's layers; keys and values of the rows are in the pool then.

        `hidden` comes from the stage before; None on the first stage, which embeds the batch's ids. It may be changed.
        """
        spec = self.spec
        if hidden is None:
            assert self.weights.embedding is not None, "only the first stage embeds"
            hidden = embedding(batch.token_ids, self.weights.embedding)
        if batch.begun_slots is not None:
            pool.clear(batch.begun_slots)
        rotary = Rotary.build(batch.positions, spec, hidden.dtype)
        for layer, weights in enumerate(self.weights.layers):
            normed = rms_norm(hidden, weights.attention_norm, spec.norm_epsilon)
            hidden = hidden + attention(normed, weights, spec, rotary, pool, layer, batch)
            normed = rms_norm(hidden, weights.feed_forward_norm, spec.norm_epsilon)
            hidden = hidden + feed_forward(normed, weights)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage: float32 logits [rows, vocabulary] of hidden states [rows, hidden]."""
        assert self.weights.norm is not None and self.weights.head is not None, (
            "only the last stage has a head"
        )
        normed = rms_norm(hidden, self.weights.norm, self.spec.norm_epsilon)
        return linear(normed, self.weights.head).float()
