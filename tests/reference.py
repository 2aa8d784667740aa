"""What `transformers` says of a checkpoint: greedy ids and log probabilities, of prompts whose choices are clear.

A choice is clear when the two likeliest tokens are well apart: only then is equality of ids a fair demand, since the
last bits of a product differ with its number of rows. Logits of the tiny models are large (weights of std 1), and
have been seen to differ by 1e-3 between two right computations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

GAP = 4e-3
TOPS = 2
BATCH = 64


@dataclass(frozen=True)
class Answer:
    """The greedy continuation of one prompt."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[int]]
    """The likeliest ids at each position, likeliest first."""
    clear: bool


class Reference:
    """A checkpoint in float32 under `transformers`. Loaded when first asked."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        """`file` is a GGUF file inside the folder."""
        self.folder = folder
        self.file = file
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}

    @cached_property
    def model(self) -> Any:
        """The model, ready to be called."""
        import torch
        import transformers

        extra = {"gguf_file": self.file} if self.file else {}
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", **extra
        ).eval()

    def answers(self, prompts: Sequence[list[int]], n: int) -> list[Answer]:
        """Greedy continuations of `n` tokens; an end-of-sequence token is a token like any other."""
        new = [p for p in dict.fromkeys(map(tuple, prompts)) if (p, n) not in self._known]
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            self._known.update(zip([(p, n) for p in batch], self._compute(batch, n), strict=True))
        return [self._known[tuple(prompt), n] for prompt in prompts]

    def ids(self, prompts: Sequence[list[int]], n: int) -> list[list[int]]:
        """Greedy ids of prompts that are known to be clear."""
        answers = self.answers(prompts, n)
        assert all(answer.clear for answer in answers), "a prompt whose choices are not clear"
        return [answer.ids for answer in answers]

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        """Log probability of each prompt token but the first, given those before it."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()

    def clear_prompts(
        self, lengths: Sequence[int], n: int, seed: int, prefix: Sequence[int] = ()
    ) -> list[list[int]]:
        """One random prompt of each length, all with clear choices over `n` tokens, each with `prefix` before it."""
        generator = random.Random(seed)
        vocabulary = self.model.config.vocab_size
        found: list[list[int] | None] = [None] * len(lengths)
        while missing := [place for place, prompt in enumerate(found) if prompt is None]:
            drawn = [[*prefix, *generator.choices(range(vocabulary), k=lengths[place])] for place in missing]
            for place, prompt, answer in zip(missing, drawn, self.answers(drawn, n), strict=True):
                if answer.clear:
                    found[place] = prompt
        return [prompt for prompt in found if prompt is not None]

    def _compute(self, prompts: Sequence[Sequence[int]], n: int) -> list[Answer]:
        """All prompts in one batch, padded on the left, with the model's own cache."""
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        chosen, logprobs, tops, clear, cache = [], [], [], torch.ones(len(prompts), dtype=torch.bool), None
        with torch.inference_mode():
            for _ in range(n):
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = self.model(
                    ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
                )
                cache, logits = out.cache, out.logits[:, -1]
                best = logits.topk(TOPS)
                clear &= best.values[:, 0] - best.values[:, 1] >= GAP
                ids = best.indices[:, :1]
                chosen.append(ids)
                tops.append(best.indices)
                logprobs.append(logits.log_softmax(-1).gather(1, ids))
                mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
        rows = zip(
            torch.cat(chosen, 1).tolist(),
            torch.cat(logprobs, 1).tolist(),
            torch.stack(tops, 1).tolist(),
            strict=True,
        )
        return [Answer(*row, bool(good)) for row, good in zip(rows, clear, strict=True)]
