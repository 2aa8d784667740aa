"""From logits to tokens and log probabilities. Pure functions of their arguments: no state, no randomness of their own.

A row's token depends on its own logits, parameters and 64 random bits, never on the other rows of the batch. Penalties
follow SGLang: frequency and presence are subtracted for generated tokens, then repetition divides positive logits and
multiplies negative ones for tokens of prompt and output, then biases are added. Truncation is joint: top_k, top_p and
min_p each look at the whole distribution after the temperature, and a token must pass all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.types import Sample, SamplingParams, TokenLogprob

_CANDIDATES = 64
"""How many of the likeliest tokens are looked at first; more only for rows whose kept tokens are more."""


def sample(logits: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """Choose one token per row of float32 logits [rows, vocabulary], which stay as they are."""
    assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows for {len(samples)} samples"
    rows = [row for row, item in enumerate(samples) if _adjusts(item)]
    if rows:
        logits = logits.clone()
        for row in rows:
            _adjust_(logits[row], samples[row])
    drawing = [row for row, item in enumerate(samples) if item.params.temperature > 0]
    if len(drawing) == len(samples):
        return _draw(logits, samples)
    tokens: list[int] = logits.argmax(-1).tolist()
    if drawing:
        drawn = _draw(logits[drawing], [samples[row] for row in drawing])
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token
    return tokens


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], positions: Sequence[int], top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probabilities of one token per row, under the model's own distribution, with the `top` likeliest of each row."""
    if not token_ids:
        return []
    totals = logits.logsumexp(-1, keepdim=True)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    found: list[float] = (logits.gather(-1, chosen) - totals)[:, 0].tolist()
    alternatives: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if most := min(max(top), logits.shape[-1]):
        best = logits.topk(most, -1)
        values, ids = (best.values - totals).tolist(), best.indices.tolist()
        for row, count in enumerate(top):
            pairs = sorted(zip(ids[row], values[row], strict=True), key=lambda pair: (-pair[1], pair[0]))
            alternatives[row] = tuple(pairs[:count])
    return [
        TokenLogprob(position=position, token_id=token_id, logprob=logprob, top=others)
        for position, token_id, logprob, others in zip(positions, token_ids, found, alternatives, strict=True)
    ]


def _adjusts(item: Sample) -> bool:
    params = item.params
    return bool(item.banned_ids or params.logit_bias) or _penalises(params)


def _penalises(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def _adjust_(logits: torch.Tensor, item: Sample) -> None:
    """Penalties, biases and bans, in place, on one row [vocabulary]. Ids that the model does not have are no one's."""
    params, size, device = item.params, logits.shape[0], logits.device
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(item.output_ids)
        seen = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits[seen] -= params.frequency_penalty * times + params.presence_penalty
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*item.prompt_ids, *item.output_ids}), dtype=torch.int64, device=device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < size:
            logits[token_id] += bias
    banned = [token_id for token_id in item.banned_ids if 0 <= token_id < size]
    if banned:
        logits[banned] = -torch.inf


def _draw(logits: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """Inverse of the cumulative distribution at each row's random number."""
    temperatures = torch.tensor([item.params.temperature for item in samples], dtype=torch.float32)
    # Against the greatest logit first, so that no temperature, however small, makes an infinity but a -inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures.to(logits.device)[:, None]
    weights = scaled.exp_()
    tokens = [0] * len(samples)
    truncated = [row for row, item in enumerate(samples) if _truncates(item.params)]
    for row, item in enumerate(samples):
        if not _truncates(item.params):
            cumulative = weights[row].cumsum(-1, dtype=torch.float64)
            target = cumulative[-1] * _unit(item)
            tokens[row] = min(int(torch.searchsorted(cumulative, target, right=True)), weights.shape[1] - 1)
    if truncated:
        chosen = weights[truncated]
        totals: list[float] = chosen.sum(-1, dtype=torch.float64).tolist()
        best = chosen.topk(min(_CANDIDATES, chosen.shape[1]), -1)
        values, ids = best.values.cpu().numpy(), best.indices.cpu().numpy()
        for index, row in enumerate(truncated):
            tokens[row] = _draw_truncated(
                chosen[index], values[index], ids[index], totals[index], samples[row]
            )
    return tokens


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _unit(item: Sample) -> float:
    """The row's random number in [0, 1), from the upper 53 of its 64 bits."""
    return (item.random >> 11) * 2.0**-53


def _draw_truncated(
    weights: torch.Tensor,
    values: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    total: float,
    item: Sample,
) -> int:
    """Draw among the kept tokens of one row.

    `values` and `ids` are its greatest weights, descending. Tokens of equal weight stand by id, and the last kept weight
    must differ from the last looked at, so that the answer does not depend on how many were looked at.
    """
    while True:
        kept = _kept_count(values, total, item.params)
        if len(values) == len(weights) or values[kept - 1] > values[-1]:
            break
        best = weights.topk(min(len(values) * 8, len(weights)))
        values, ids = best.values.cpu().numpy(), best.indices.cpu().numpy()
    order = np.lexsort((ids, -values))[:kept]
    cumulative = values[order].astype(np.float64).cumsum()
    index = int(np.searchsorted(cumulative, cumulative[-1] * _unit(item), side="right"))
    return int(ids[order[min(index, kept - 1)]])


def _kept_count(values: npt.NDArray[np.float32], total: float, params: SamplingParams) -> int:
    """How many of the descending weights are kept: each limit keeps a first part of them, and at least one stays."""
    kept = min(params.top_k, len(values)) if params.top_k > 0 else len(values)
    if params.top_p < 1.0:
        before = values.astype(np.float64).cumsum() - values
        kept = min(kept, int(np.count_nonzero(before < params.top_p * total)))
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(values >= params.min_p * values[0])))
    return max(kept, 1)
