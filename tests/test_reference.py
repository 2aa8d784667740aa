"""The decoder against `transformers`, in float32: same logits, same greedy ids, however stages and batches are cut.

Prompts are screened: only those whose two likeliest tokens are at least 1e-3 apart at every step are compared by id,
since a product's last bits differ with its number of rows.
"""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model import attention, batch
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.layers import linear
from engine.model.readout import Readout, read_out
from engine.model.source import open_source, resolve_model
from engine.model.weights import load_weights
from engine.topology import split_layers
from engine.types import Sample, SamplingParams, Span
from tests.tiny_models import make_tiny

PAGE_SIZE = 4
NEW_TOKENS = 8
CPU = torch.device("cpu")
torch.set_num_threads(
    1
)  # as in a rank that shares its machine; waiting for threads would be most of these tests

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

    def __init__(
        self,
        path: Path,
        pp_size: int,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        source = open_source(path)
        self.dtype = dtype
        self.stages = []
        for start, stop in split_layers(source.spec.layer_count, pp_size):
            weights = load_weights(source, range(start, stop), dtype=dtype, device=CPU)
            record = 2, source.spec.kv_heads, source.spec.head_dim
            pool = DeviceKVPool(stop - start, 64, PAGE_SIZE, record, cache_dtype or dtype, CPU).allocate()
            # What an earlier owner may have left in a page: it must reach nobody.
            pool.records.fill_(torch.nan)
            self.stages.append((Decoder(source.spec, weights), pool))

    @torch.inference_mode()
    def step(self, *spans: Span) -> tuple[Batch, torch.Tensor]:
        """Hidden states of all rows after the last layer."""
        step = Batch.build(spans, PAGE_SIZE, CPU, self.dtype)
        hidden = None
        for decoder, pool in self.stages:
            hidden = decoder.forward(step, hidden, pool)
        assert hidden is not None
        return step, hidden

    @torch.inference_mode()
    def read_out(self, *spans: Span) -> Readout:
        """Tokens and log probabilities of a step."""
        step, hidden = self.step(*spans)
        return read_out(self.stages[-1][0], step, hidden)

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


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("cached", [0, PAGE_SIZE, 2 * PAGE_SIZE])
@pytest.mark.parametrize("chunk", [2, 5, 512])
def test_greedy_equal_reference_all_at_once(case: Case, chunk: int, cached: int, small: bool, monkeypatch):
    """Prefill chunks and decode rows of several sequences in one batch, with and without pages in common.

    vllm#41133, vllm#28839: stages that lose or misplace tokens when chunks of many requests are mixed. `small` makes
    limits that long texts would reach bite here: common prefixes read once, groups cut, blocks of two rows.
    """
    if small:
        monkeypatch.setattr(batch, "_SAVED_TOKENS_MIN", 1)
        monkeypatch.setattr(batch, "_GROUP_TOKENS_MAX", 32)
        monkeypatch.setattr(batch, "PREFILL_BLOCK_ROWS", 2)
        monkeypatch.setattr(attention, "PREFILL_BLOCK_ROWS", 2)
    stages = Stages(case.folder, 2)
    assert stages.generate(case.prompts, chunk=chunk, cached=cached) == case.greedy


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_logprobs_equal_reference(case: Case, chunk: int):
    """Of prompt tokens, each once over the chunks, and of the sampled token, with alternatives."""
    prompt, expected = case.prompts[0], case.logits[0].double().log_softmax(-1)
    stages, first, found = Stages(case.folder, 2), 3, []
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True, top_logprobs=2)
    table = tuple(range(11, 11 + -(-len(prompt) // PAGE_SIZE)))
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        # Row p scores the token at p + 1; the last row of the prompt samples instead.
        low, high = max(first, start + 1), min(end + 1, len(prompt))
        readout = stages.read_out(
            Span(
                5,
                start,
                tuple(prompt[start:end]),
                table,
                Sample(greedy, end, 0, (), (), ()) if end == len(prompt) else None,
                tuple(prompt[low:high]),
                low,
                3,
            )
        )
        found += [entry for span in readout.logprobs for entry in span.prompt]
    assert [(entry.position, entry.token_id) for entry in found] == list(enumerate(prompt))[first:]
    for entry in found:
        row = expected[entry.position - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
    output = readout.logprobs[0].output
    assert readout.tokens == (case.greedy[0][0],) and output is not None
    assert (output.position, output.token_id, len(output.top)) == (len(prompt), case.greedy[0][0], 2)
    assert output.logprob == pytest.approx(float(expected[-1].max()), abs=2e-3)


def test_a_cache_of_another_type_rounds_keys_and_values_only(case: Case):
    """bfloat16 keeps 8 bits: what that changes is small beside the spread of the logits, but it is not nothing."""
    prompt, expected = case.prompts[-1], case.logits[-1]
    table = (9, 3, 30, 31, 32)[: -(-len(prompt) // PAGE_SIZE)]
    stages = Stages(case.folder, 2, cache_dtype=torch.bfloat16)
    _, chunk = stages.step(Span(0, 0, tuple(prompt[:-1]), table))
    _, last = stages.step(Span(0, len(prompt) - 1, (prompt[-1],), table))
    found = stages.logits(torch.cat((chunk, last)))
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-5 < error < 0.15, error  # logits that have nothing in common differ by 1.4


def test_a_thread_of_its_own_gives_the_same(case: Case):
    """Inference mode is a state of the thread; the rank's worker is not the main one."""
    stages = Stages(case.folder, 2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(stages.generate, case.prompts, chunk=5).result()
    assert found == case.greedy


def test_products_equal_the_kernel_that_tells_its_denominator():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 4, 24, generator=generator)
    keys, values = torch.randn(2, 3, 10, 2, 24, generator=generator).transpose(2, 3)
    mask = torch.zeros(3, 1, 1, 10)
    mask[1, ..., 6:] = -torch.inf
    for given in (None, mask):
        ours = attention.attend_by_products(query, keys, values, given)
        kernel = attention._attend(query, keys, values, given)
        torch.testing.assert_close(ours, kernel, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 512])
def test_linear_is_the_plain_product(rows: int, bias: bool):
    """Whatever library computes it, in float32, against the same sum in float64."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(40, 96, generator=generator)
    added = torch.randn(40, generator=generator) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    torch.testing.assert_close(linear(x, weight, added), expected.float(), atol=5e-5, rtol=1e-5)


# ---- the default model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_model() -> tuple[Path, torch.nn.Module]:
    """The GGUF file, and transformers' own reading of it."""
    import transformers

    path = resolve_model(None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return path, model.eval()


def test_default_model_weights_equal_reference(default_model):
    path, model = default_model
    state = model.state_dict()
    source = open_source(path)
    for layers in (range(1), range(14, 16), range(29, 30)):
        weights = load_weights(source, layers, dtype=torch.float32, device=CPU)
        for number, layer in zip(layers, weights.layers, strict=True):
            prefix = f"model.layers.{number}"
            qkv = [state[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
            assert torch.equal(layer.qkv, torch.cat(qkv))
            assert torch.equal(layer.output, state[f"{prefix}.self_attn.o_proj.weight"])
            assert torch.equal(layer.down, state[f"{prefix}.mlp.down_proj.weight"])
            assert torch.equal(layer.feed_forward_norm, state[f"{prefix}.post_attention_layernorm.weight"])
    assert torch.equal(weights.head, state["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])


def test_default_model_greedy_equal_reference(default_model):
    """Prompts of very different lengths at once, over two stages."""
    path, model = default_model
    generator = random.Random(11)
    texts = [[504, 3575, 282, 4649, 314]]  # "The capital of France is"
    texts += [[generator.randrange(49000) for _ in range(size)] for size in (1, 7, 24, 3, 16, 11, 22)]
    found = {number: reference_greedy(model, text) for number, text in enumerate(texts)}
    clear = {number: answer[1] for number, answer in found.items() if answer is not None}
    assert 0 in clear and len(clear) >= 5
    stages = Stages(path, 2)
    assert stages.generate([texts[number] for number in clear], chunk=10) == list(clear.values())


def test_default_model_in_bfloat16_errs_no_more_than_reference(default_model):
    """Same upcasts, same error: the mean distance to float32 logits is that of transformers in bfloat16."""
    path, model = default_model
    ids = [504, 3575, 282, 4649, 314, 260, 1546, 6330, 282, 253]
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0]
        rounded = copy.deepcopy(model).to(torch.bfloat16)
        theirs = rounded(torch.tensor([ids])).logits[0].float()
    stages = Stages(path, 2, dtype=torch.bfloat16)
    _, hidden = stages.step(Span(0, 0, tuple(ids), (5, 3, 9)))
    ours = stages.logits(hidden)
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
