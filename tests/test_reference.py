"""The decoder against `transformers`, in float32: same logits, same greedy ids, however stages and batches are cut.

Prompts are screened: only those whose two likeliest tokens are at least 1e-3 apart at every step are compared by id,
since a product's last bits differ with its number of rows. (A02, A10, A11: the public faults named below.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.source import open_source, resolve_model
from engine.model.weights import load_weights
from engine.topology import split_layers
from engine.types import Span
from tests.tiny_models import make_tiny

PAGE_SIZE = 4
NEW_TOKENS = 8
CPU = torch.device("cpu")

VARIANTS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True, "num_key_value_heads": 1}),
    "mistral-wide-heads": ("MistralForCausalLM", {"head_dim": 24}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 4}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-wide-heads": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "head_dim": 32}),
}


@dataclass
class Case:
    """A checkpoint, and what transformers says about some prompts."""

    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]
    """Of every prompt position."""
    greedy: list[list[int]]


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request, tmp_path_factory) -> Case:
    architecture, overrides = VARIANTS[request.param]
    folder = make_tiny(tmp_path_factory.mktemp(request.param), architecture, **overrides)
    model = reference_model(folder)
    generator = random.Random(7)
    prompts, logits, greedy = [], [], []
    prefix = [generator.randrange(600) for _ in range(2 * PAGE_SIZE)]
    for number in range(40):
        prompt = prefix + [generator.randrange(600) for _ in range(1 + number % 9)]
        found = reference_greedy(model, prompt)
        if found is not None:
            prompts.append(prompt)
            logits.append(found[0])
            greedy.append(found[1])
        if len(prompts) == 6:
            return Case(folder, prompts, logits, greedy)
    raise AssertionError("too few prompts whose greedy tokens are clear")


def reference_model(folder: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[torch.Tensor, list[int]] | None:
    """Logits of the prompt and the next greedy ids, without a cache; None when some choice is not clear."""
    ids, prompt_logits = list(prompt), None
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        prompt_logits = logits if prompt_logits is None else prompt_logits
        best = logits[-1].topk(2).values
        if best[0] - best[1] < 1e-3:
            return None
        ids.append(int(logits[-1].argmax()))
    return prompt_logits, ids[len(prompt) :]


class Stages:
    """All stages of a model in one process: what `stage.py` does, without the wire."""

    def __init__(self, path: Path, pp_size: int, pages: int = 64, dtype: torch.dtype = torch.float32) -> None:
        source = open_source(path)
        self.dtype = dtype
        self.stages = []
        for start, stop in split_layers(source.spec.layer_count, pp_size):
            weights = load_weights(source, range(start, stop), dtype=dtype, device=CPU)
            pool = DeviceKVPool(
                stop - start, pages, PAGE_SIZE, source.spec.kv_heads, source.spec.head_dim, dtype, CPU
            )
            self.stages.append((Decoder(source.spec, weights), pool))

    @torch.inference_mode()
    def step(self, *spans: Span) -> tuple[Batch, torch.Tensor]:
        """Hidden states of all rows after the last layer."""
        batch = Batch.build(spans, PAGE_SIZE, CPU, self.dtype)
        hidden = None
        for decoder, pool in self.stages:
            hidden = decoder.forward(batch, hidden, pool)
        assert hidden is not None
        return batch, hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[-1][0].logits(hidden)

    def generate(self, prompts: list[list[int]], *, chunk: int, cached: int = 0) -> list[list[int]]:
        """Greedy ids of all prompts at once; each starts at row `cached`, whose pages all tables share.

        Tables are scattered over the pool, so that nothing works only for neighbouring pages.
        """
        pages = list(range(64))
        random.Random(3).shuffle(pages)
        shared = [pages.pop() for _ in range(cached // PAGE_SIZE)]
        if cached:
            self.step(Span(99, 0, tuple(prompts[0][:cached]), tuple(shared)))
        tables = [shared + [pages.pop() for _ in range(8 - len(shared))] for _ in prompts]
        known = [list(prompt) for prompt in prompts]
        computed = [cached] * len(prompts)
        while any(len(ids) < len(prompt) + NEW_TOKENS for ids, prompt in zip(known, prompts, strict=True)):
            spans = []
            for index, ids in enumerate(known):
                if len(ids) < len(prompts[index]) + NEW_TOKENS:
                    rows = ids[computed[index] : computed[index] + chunk]
                    end = computed[index] + len(rows)
                    table = tuple(tables[index][: -(-end // PAGE_SIZE)])
                    spans.append((index, Span(index, computed[index], tuple(rows), table)))
            _, hidden = self.step(*(span for _, span in spans))
            row = -1
            for index, span in spans:
                row += span.count
                computed[index] = span.end
                if span.end == len(known[index]):
                    known[index].append(int(self.logits(hidden[row : row + 1]).argmax()))
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]


@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_logits_equal_reference(case: Case, pp_size: int):
    """Every stage count projects with the right head: sglang#15890, sglang#21347 (tied embeddings under PP)."""
    stages = Stages(case.folder, pp_size)
    for prompt, expected in zip(case.prompts, case.logits, strict=True):
        _, hidden = stages.step(Span(0, 0, tuple(prompt), tuple(range(20, 20 - 5, -1))))
        # Logits have a standard deviation of about 8; transformers differs from itself by 2e-4 between kernels.
        torch.testing.assert_close(stages.logits(hidden), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_greedy_equal_reference_one_at_a_time(case: Case, pp_size: int, chunk: int):
    stages = Stages(case.folder, pp_size)
    for prompt, expected in zip(case.prompts[:2], case.greedy, strict=False):
        assert stages.generate([prompt], chunk=chunk) == [expected]


@pytest.mark.parametrize("cached", [0, PAGE_SIZE, 2 * PAGE_SIZE])
@pytest.mark.parametrize("chunk", [2, 5, 512])
def test_greedy_equal_reference_all_at_once(case: Case, chunk: int, cached: int):
    """Prefill chunks and decode rows of several sequences in one batch, with and without pages in common.

    vllm#41133, vllm#28839: stages that lose or misplace tokens when chunks of many requests are mixed.
    """
    stages = Stages(case.folder, 2)
    assert stages.generate(case.prompts, chunk=chunk, cached=cached) == case.greedy
