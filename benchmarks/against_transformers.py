"""Lockstep against transformers on the same cores, by turns, in one run: `python -m benchmarks.against_transformers`.

The default model in fp32, one stage (and two beside it), as many threads as there are cores. Each figure is the
median of several rounds; in each round both sides do the same work one after the other, so that a machine whose speed
drifts slows both. While one side works the other's processes are idle. transformers runs with the attention it chooses
by itself (sdpa), which is its faster one; `benchmarks.model_speed` has eager too. The last line puts the scheduler,
radix tree and digest of a decode step (`benchmarks.scheduler_speed`) beside the step. Run it alone: threads of
transformers spin while they wait, and other work on the cores slows them out of proportion. `--json` writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.scheduler_speed import decode_times
from engine.distributed.launch import usable_cores
from engine.llm import LLM
from engine.model.source import resolve_model

DECODED_TOKENS = 64
SHARED_TOKENS, OWN_TOKENS, REQUESTS = 512, 32, 16
LONG_TOKENS = 2048
GREEDY = {"temperature": 0, "ignore_eos": True}


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def reference() -> PreTrainedModel:
    """The default model as transformers runs it, fp32."""
    path = resolve_model(None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


class Prompts:
    """Random prompts that nobody has seen, so that only what is meant to be cached is."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fresh(self, length: int) -> list[int]:
        """`length` ids, all beyond the special tokens."""
        return [self._random.randrange(1000, 40000) for _ in range(length)]


class Transformers:
    """The peer."""

    def __init__(self) -> None:
        self._model = reference()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Greedy static batch of prompts of one length."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + new_tokens, f"{out.shape} for {ids.shape} + {new_tokens}"


def lockstep(llm: LLM, prompts: list[list[int]], new_tokens: int) -> None:
    """The same on our side."""
    params = GREEDY | {"max_new_tokens": new_tokens}
    answers = llm.generate(prompts, params, progress=False)
    assert all(len(answer["output_ids"]) == new_tokens for answer in answers)


def measure(llm: LLM, peer: Transformers, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of both sides for each piece of work, by turns."""
    prompts = Prompts(0)
    taken: dict[str, dict[str, list[float]]] = {}

    def note(what: str, side: str, spent: float) -> None:
        taken.setdefault(what, {}).setdefault(side, []).append(spent)

    for _ in range(rounds):
        prompt = prompts.fresh(512)
        ours = seconds(lockstep, llm, [prompt], 1)
        theirs = seconds(peer.generate, [prompt], 1)
        note("prefill of 512 tokens", "lockstep", ours)
        note("prefill of 512 tokens", "transformers", theirs)
        # What comes beyond the first token; the prompt is cached for us by now, so a fresh one is used.
        prompt = prompts.fresh(512)
        ours = seconds(lockstep, llm, [prompt], 1 + DECODED_TOKENS) - ours
        theirs = seconds(peer.generate, [prompt], 1 + DECODED_TOKENS) - theirs
        note("decode at batch 1, per token", "lockstep", ours / DECODED_TOKENS)
        note("decode at batch 1, per token", "transformers", theirs / DECODED_TOKENS)
        shared = prompts.fresh(SHARED_TOKENS)
        batch = [shared + prompts.fresh(OWN_TOKENS) for _ in range(REQUESTS)]
        name = f"{REQUESTS} requests, {SHARED_TOKENS} shared + {OWN_TOKENS} own, {DECODED_TOKENS} new"
        note(name, "lockstep", seconds(lockstep, llm, batch, DECODED_TOKENS))
        note(name, "transformers", seconds(peer.generate, batch, DECODED_TOKENS))
        long = prompts.fresh(LONG_TOKENS)
        name = f"first token of {LONG_TOKENS} tokens, cached against cold"
        note(name, "cold", seconds(lockstep, llm, [long], 1))
        note(name, "cached", seconds(lockstep, llm, [long], 1))
    return {
        what: {side: statistics.median(all_rounds) for side, all_rounds in sides.items()}
        for what, sides in taken.items()
    }


@contextlib.contextmanager
def serving(pp_size: int) -> Iterator[LLM]:
    """Ranks that serve, warmed up."""
    with LLM(pp_size=pp_size, dtype="float32", max_total_tokens=40_000) as llm:
        lockstep(llm, [Prompts(1).fresh(64)], 4)
        yield llm


def show(title: str, medians: dict[str, dict[str, float]]) -> None:
    """A line per piece of work: both sides and their ratio."""
    print(f"\n{title}")
    for what, sides in medians.items():
        (first, a), (second, b) = sides.items()
        print(
            f"  {what:55} {first} {a * 1000:9.2f} ms   {second} {b * 1000:9.2f} ms   {first}/{second} {a / b:.3f}"
        )


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 2], help="numbers of stages to try")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    peer = Transformers()
    peer.generate([Prompts(1).fresh(64)], 4)
    results = {}
    for pp_size in arguments.pp:
        with serving(pp_size) as llm:
            medians = measure(llm, peer, arguments.rounds)
        step = medians["decode at batch 1, per token"]["lockstep"]
        pure = statistics.median(decode_times(1))
        medians["scheduler, tree and digest in a decode step"] = {"apply": pure, "step": step}
        results[f"pp {pp_size}"] = medians
        if not arguments.json:
            show(f"pp {pp_size}, {usable_cores()} cores, medians of {arguments.rounds} rounds", medians)
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
