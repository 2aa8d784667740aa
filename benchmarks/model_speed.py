"""Speed of one stage's decoder beside `transformers`, on the same threads, with the same weights.

    python -m benchmarks.model_speed [--dtype float32] [--threads 2] [--rounds 7] [--model-path ...]

Measured are the model's steps alone (no scheduler, no server): prefill of 512 tokens, a decode step of one sequence
and one of 16 sequences with 600 tokens each, of which 512 are common. Contestants take turns within a round and the
median over rounds is shown, so that other work on the machine hits all alike; its load is printed beside.
`transformers` reads its cache as contiguous tensors and holds the common prefix 16 times, as static batching does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.mem_cache.pool.device import DeviceKVPool
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.readout import read_out
from engine.model.source import ModelSource, open_source, resolve_model
from engine.model.weights import StageWeights, load_weights
from engine.types import Sample, SamplingParams, Span

PAGE_SIZE, PREFIX, CONTEXT, ROWS, DECODE_STEPS = 16, 512, 600, 16, 8


class Ours:
    """Paged steps through `Decoder` and `read_out`, as a rank runs them."""

    name = "lockstep"

    def __init__(self, source: ModelSource, weights: StageWeights, dtype: torch.dtype) -> None:
        spec = source.spec
        self.decoder, self.dtype, self.pages = Decoder(spec, weights), dtype, 1024
        self.pool = DeviceKVPool(
            spec.layer_count,
            self.pages,
            PAGE_SIZE,
            (2, spec.kv_heads, spec.head_dim),
            dtype,
            torch.device("cpu"),
        ).allocate()
        self.greedy = SamplingParams(max_new_tokens=1, temperature=0.0)

    def step(self, *spans: Span) -> tuple[int, ...]:
        """One step, from spans to token ids."""
        batch = Batch.build(spans, PAGE_SIZE, torch.device("cpu"), self.dtype)
        hidden = self.decoder.forward(batch, None, self.pool)
        return read_out(self.decoder, batch, hidden).tokens

    def span(self, number: int, start: int, ids: list[int], pages: tuple[int, ...]) -> Span:
        """A span that samples greedily."""
        end = start + len(ids)
        sample = Sample(self.greedy, end, 0, (), (), ())
        return Span(number, start, tuple(ids), pages[: -(-end // PAGE_SIZE)], sample)

    def prefill(self, ids: list[int]) -> None:
        """One prompt from an empty cache."""
        self.step(self.span(0, 0, ids, tuple(range(len(ids) // PAGE_SIZE + 1))))

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of one decode step of all prompts, whose first PREFIX tokens are common."""
        shared = tuple(range(PREFIX // PAGE_SIZE))
        # Tables are scattered: neighbouring pages, which are read without a copy, would flatter the figure.
        own = -(-(CONTEXT + steps) // PAGE_SIZE) - len(shared)
        order = torch.randperm(self.pages - len(shared), generator=torch.Generator().manual_seed(1)) + len(
            shared
        )
        tables = [shared + tuple(order[row * own : (row + 1) * own].tolist()) for row in range(len(prompts))]
        self.step(self.span(0, 0, prompts[0][:PREFIX], tables[0]))
        self.step(*(self.span(row, PREFIX, ids[PREFIX:], tables[row]) for row, ids in enumerate(prompts)))
        began = time.perf_counter()
        for position in range(CONTEXT, CONTEXT + steps):
            self.step(*(self.span(row, position, [7], tables[row]) for row in range(len(prompts))))
        return (time.perf_counter() - began) / steps


class Theirs:
    """`transformers` with its dynamic cache."""

    def __init__(
        self, source: ModelSource, weights: StageWeights, dtype: torch.dtype, attention: str
    ) -> None:
        self.name = f"transformers {attention}"
        self.model = reference_model(source, weights, dtype, attention)
        self.caches: dict[int, Any] = {}

    def prefill(self, ids: list[int]) -> None:
        """One prompt from an empty cache, logits of its last row only."""
        self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of one decode step of all prompts."""
        if len(prompts) not in self.caches:
            filled = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            self.caches[len(prompts)] = filled.past_key_values
        cache = self.caches[len(prompts)]
        began = time.perf_counter()
        for _ in range(steps):
            ids = torch.full((len(prompts), 1), 7)
            self.model(ids, cache=cache, use_cache=True).logits.argmax(-1).tolist()
        seconds = time.perf_counter() - began
        cache.crop(-steps)
        return seconds / steps


def reference_model(
    source: ModelSource, weights: StageWeights, dtype: torch.dtype, attention: str
) -> torch.nn.Module:
    """A Llama of `transformers` over the very same tensors."""
    import transformers

    spec = source.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocabulary_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.feed_forward_size,
        num_hidden_layers=spec.layer_count,
        num_attention_heads=spec.query_heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        rms_norm_eps=spec.norm_epsilon,
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation=attention,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    state = {"model.embed_tokens.weight": weights.embedding, "lm_head.weight": weights.head}
    state["model.norm.weight"] = weights.norm
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}"
        parts = layer.qkv.split((spec.query_size, spec.kv_size, spec.kv_size))
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            state[f"{prefix}.self_attn.{name}.weight"] = part
        for name, part in zip(("gate_proj", "up_proj"), layer.gate_up.chunk(2), strict=True):
            state[f"{prefix}.mlp.{name}.weight"] = part
        state[f"{prefix}.self_attn.o_proj.weight"] = layer.output
        state[f"{prefix}.mlp.down_proj.weight"] = layer.down
        state[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
        state[f"{prefix}.post_attention_layernorm.weight"] = layer.feed_forward_norm
    model.load_state_dict(state, assign=True)
    # What is computed and not loaded was made on the meta device; make it anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    source = open_source(resolve_model(options.model_path))
    weights = load_weights(source, range(source.spec.layer_count), dtype=dtype, device=torch.device("cpu"))
    contestants = [Ours(source, weights, dtype)]
    contestants += [Theirs(source, weights, dtype, attention) for attention in ("eager", "sdpa")]
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(1000, 40000, (PREFIX,), generator=generator).tolist()
    tails = torch.randint(1000, 40000, (ROWS, CONTEXT - PREFIX), generator=generator).tolist()
    prompts = [prefix + tail for tail in tails]

    def prefill(contestant: Ours | Theirs) -> float:
        began = time.perf_counter()
        contestant.prefill(prefix)
        return time.perf_counter() - began

    cases: dict[str, Callable[[Ours | Theirs], float]] = {
        "prefill 512": prefill,
        "decode 1 x 600": lambda contestant: contestant.decode(prompts[:1], DECODE_STEPS),
        "decode 16 x 600": lambda contestant: contestant.decode(prompts, DECODE_STEPS),
    }
    print(f"{source.name}, {options.dtype}, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    with torch.inference_mode():
        for label, measure in cases.items():
            seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
            for _ in range(options.rounds + 1):  # the first round warms up
                for contestant in contestants:
                    seconds[contestant.name].append(measure(contestant))
            medians = {name: statistics.median(values[1:]) * 1000 for name, values in seconds.items()}
            print(f"{label:16}", *(f"{name} {value:8.1f} ms  " for name, value in medians.items()))


if __name__ == "__main__":
    main()
