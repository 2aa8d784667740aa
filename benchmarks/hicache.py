"""What the host tier is worth, and what agreement about it costs: `python -m benchmarks.hicache`.

    hit        time to the first token of a prompt of 4,097 tokens: cold, 4,096 of them on the device, or on the host,
               and the bytes that each stage copied for a hit on the host
    checksum   a hit on the host with and without `--disable-hicache-checksum`
    turns      8 clients, 10 turns each of 256 new tokens behind all that was said, 1 output token, a device pool of a
               quarter of what they hold in the end: without a host tier, and with one. Beside them the bound, by the
               rows that the scheduler alone has to plan for the same turns, and a device pool that holds everything
    digests    tokens/s of 16 requests, with digests and without (`benchmarks.undigested`)

The default model in float32, through the offline door; contestants take turns in one run, with the others idle, so
that a machine whose speed drifts slows all; numbers are medians. `--part` chooses parts, `--json` writes JSON. Run it
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

import engine.llm
from benchmarks import undigested
from benchmarks.against_transformers import GREEDY, Prompts
from engine.llm import LLM
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequencer import Sequencer
from engine.types import (
    Capacity,
    FinishedStep,
    Plan,
    Report,
    Request,
    SamplingParams,
    StageStatus,
    TransferResult,
)

HIT_TOKENS = 4096
CLIENTS, TURNS, TURN_TOKENS = 8, 10, 256
POLICIES = ("write_through", "write_back", "write_through_selective")
DECODING, DECODED_TOKENS, DECODE_PROMPT_TOKENS = 16, 24, 8

Rows = dict[str, dict[str, float]]
"""Name of a line -> name of a column -> number."""


@contextlib.contextmanager
def serving(tokens: int, *, host_ratio: float = 0.0, **flags: Any) -> Iterator[LLM]:
    """Ranks that serve, warmed up, with a device pool of `tokens` and a host pool `host_ratio` times as large."""
    if host_ratio:
        flags |= {"enable_hierarchical_cache": True, "hicache_ratio": host_ratio}
    with LLM(dtype="float32", max_total_tokens=tokens, **flags) as llm:
        first_token(llm, [Prompts(1).fresh(64)])
        yield llm


def first_token(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all prompts have their one token, and the answers."""
    began = time.perf_counter()
    answers = llm.generate(prompts, GREEDY | {"max_new_tokens": 1}, progress=False)
    return time.perf_counter() - began, answers


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens that came from the device and from the host."""
    details = answer["meta_info"]["cached_tokens_details"] or {"device": 0, "host": 0}
    return details["device"], details["host"]


def statuses(llm: LLM) -> tuple[StageStatus, ...]:
    """What every rank says of itself."""
    result = llm._runner.run(llm._front.link.control("status", 10.0))
    return result.stages


# ---- hit ----


def hits(pp_size: int, rounds: int) -> Rows:
    """Each round computes a new prompt, which pushes the one before to the host, repeats it, and asks for that again.

    The device holds one such prompt and no page more.
    """
    prompts = Prompts(0)
    seconds: dict[str, list[float]] = {"cold": [], "device hit": [], "host hit": []}
    with serving(HIT_TOKENS + 16, host_ratio=3.0, pp_size=pp_size) as llm:
        before = prompts.fresh(HIT_TOKENS + 1)
        first_token(llm, [before])
        loaded = [stage.bytes_copied["load"] for stage in statuses(llm)]
        for _ in range(rounds):
            prompt = prompts.fresh(HIT_TOKENS + 1)
            asked = {"cold": (prompt, (0, 0)), "device hit": (prompt, (HIT_TOKENS, 0))}
            asked["host hit"] = before, (0, HIT_TOKENS)
            for name, (ids, expected) in asked.items():
                spent, (answer,) = first_token(llm, [ids])
                assert cached(answer) == expected, f"{name}: {cached(answer)} tokens were cached"
                seconds[name].append(spent)
            before = prompt
        stages = statuses(llm)
    rows = {name: {"ms": statistics.median(taken) * 1000} for name, taken in seconds.items()}
    for row in rows.values():
        row["times sooner than cold"] = rows["cold"]["ms"] / row["ms"]
    for stage, at_first in zip(stages, loaded, strict=True):
        moved = (stage.bytes_copied["load"] - at_first) / rounds
        pages = HIT_TOKENS * stage.bytes_per_token
        rows[f"bytes copied for a host hit, stage {stage.pp_rank}"] = {"bytes": moved, "of its pages": pages}
        assert moved == pages, f"stage {stage.pp_rank} copied {moved:,} bytes; its pages have {pages:,}"
    return rows


# ---- checksum ----


def checksums(rounds: int) -> Rows:
    """Hits on the host, of two prompts that push each other out, verified and not."""
    seconds: dict[str, list[float]] = {"verified": [], "not verified": []}
    prompts = [Prompts(2).fresh(HIT_TOKENS + 1), Prompts(3).fresh(HIT_TOKENS + 1)]
    with (
        serving(HIT_TOKENS + 16, host_ratio=3.0) as verified,
        serving(HIT_TOKENS + 16, host_ratio=3.0, disable_hicache_checksum=True) as trusting,
    ):
        sides = dict(zip(seconds, (verified, trusting), strict=True))
        for llm in sides.values():
            for ids in prompts:
                first_token(llm, [ids])
        for _ in range(4 * rounds):
            for ids in prompts:
                for name, llm in sides.items():
                    spent, (answer,) = first_token(llm, [ids])
                    assert cached(answer) == (0, HIT_TOKENS), f"{cached(answer)} tokens were cached"
                    seconds[name].append(spent)
    return {
        name: {"ms": statistics.median(taken) * 1000, "least ms": min(taken) * 1000}
        for name, taken in seconds.items()
    }


# ---- turns ----


class Clients:
    """Conversations, each turn with all clients at once; and what it took to answer them."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seconds = 0.0
        self.rows = 0
        """Of prompts, computed and not taken from the cache."""
        self._said: list[list[int]] = [[] for _ in range(CLIENTS)]

    def turn(self, fresh: list[list[int]]) -> None:
        """Every client says something new and waits for the answer."""
        self._said = [said + new for said, new in zip(self._said, fresh, strict=True)]
        spent, answers = first_token(self.llm, self._said)
        self.seconds += spent
        for said, answer in zip(self._said, answers, strict=True):
            self.rows += len(said) - sum(cached(answer))
            said += answer["output_ids"]


def turns(pp_size: int, policies: Sequence[str]) -> Rows:
    """The same conversations without a host tier, with one under each policy, and all on the device, turn by turn."""
    working_set = CLIENTS * TURNS * (TURN_TOKENS + 1)
    quarter, running = working_set // 4, working_set // 4 // 512
    services = {"no host tier": serving(quarter, pp_size=pp_size)}
    for policy in policies:
        services[policy] = serving(quarter, host_ratio=5.0, hicache_write_policy=policy, pp_size=pp_size)
    # As many at once as the others run, so that they differ in what they hold and not in their batches.
    services["all on the device"] = serving(2 * working_set, pp_size=pp_size, max_running_requests=running)
    prompts = Prompts(4)
    with contextlib.ExitStack() as open_sides:
        sides = {name: Clients(open_sides.enter_context(llm)) for name, llm in services.items()}
        for _ in range(TURNS):
            fresh = [prompts.fresh(TURN_TOKENS) for _ in range(CLIENTS)]
            for clients in sides.values():
                clients.turn(fresh)
        planned = {name: planned_rows(_capacity(clients.llm)) for name, clients in sides.items()}
    rows: Rows = {}
    without, bare_rows = sides["no host tier"], planned["no host tier"]
    for name, clients in sides.items():
        gain, bound = without.seconds / clients.seconds, bare_rows / planned[name]
        rows[name] = {
            "requests/s": CLIENTS * TURNS / clients.seconds,
            "rows computed": clients.rows,
            "rows, scheduler alone": planned[name],
            "throughput, times": gain,
            "bound, times": bound,
            "fraction reached": gain / bound,
        }
    return rows


def planned_rows(capacity: Capacity) -> int:
    """Prompt rows that inbox and scheduler of one rank plan for the conversations when copies take no time."""
    scheduler, prompts = Scheduler(capacity), Prompts(4)
    inbox = Sequencer(scheduler, world_size=1, queued_max=CLIENTS)
    said: list[list[int]] = [[] for _ in range(CLIENTS)]
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    rows, running = 0, deque[Plan]()
    for turn in range(TURNS):
        said = [ids + prompts.fresh(TURN_TOKENS) for ids in said]
        for number, ids in enumerate(said, start=turn * CLIENTS):
            refused = inbox.submit(
                (Request(request_id=number, rid="", prompt_ids=tuple(ids), sampling=greedy),)
            )
            assert refused is None, refused
        while (entry := inbox.next_entry(0.0)) is not None or running:
            if entry is not None:
                plan = scheduler.apply(entry)
                inbox.planned(empty=plan.empty)
                running += [plan] if plan.spans else []
                copied = tuple(TransferResult(transfer_id=one.transfer_id, ok=True) for one in plan.transfers)
                inbox.report(Report(rank=0, watermark=plan.step, transfers=copied))
            else:
                plan = running.popleft()
                rows += sum(span.count for span in plan.spans)
                tokens = tuple(0 for span in plan.spans if span.sample is not None)
                finished = FinishedStep(step=plan.step, tokens=tokens)
                inbox.report(Report(rank=0, watermark=plan.step, finished=(finished,)))
        for ids in said:
            ids.append(0)
    return rows


def _capacity(llm: LLM) -> Capacity:
    """The counts of a service, for a scheduler that has one step in flight."""
    ready = llm.ready
    return Capacity(
        page_size=ready.page_size,
        device_pages=ready.capacity_tokens // ready.page_size,
        max_running_requests=ready.max_running_requests,
        chunk_tokens=ready.chunked_prefill_size,
        depth=1,
        context_length=ready.context_length,
        host_pages=ready.stages[0].host_tokens // ready.page_size,
        write_policy=llm.config.hicache_write_policy,
    )


# ---- digests ----


def digests(pp_size: int, rounds: int) -> Rows:
    """Requests that decode together, with digests and without, by turns; the first of a pair changes each time."""
    prompts = Prompts(5)
    speed: dict[str, list[float]] = {"with digests": [], "without": []}
    tokens = DECODING * (DECODE_PROMPT_TOKENS + DECODED_TOKENS + 16) * 2
    with contextlib.ExitStack() as open_sides:
        sides = [open_sides.enter_context(serving(tokens, host_ratio=4.0, pp_size=pp_size))]
        with mock.patch.object(engine.llm, "SERVER", undigested.SELF):
            sides.append(open_sides.enter_context(serving(tokens, host_ratio=4.0, pp_size=pp_size)))
        zeros = [set(stage.digest) == {"0"} for llm in sides for stage in statuses(llm)]
        assert zeros == [False] * pp_size + [True] * pp_size, f"digests are zero: {zeros}"
        named = list(zip(speed, sides, strict=True))
        for number in range(8 * rounds):
            batch = [prompts.fresh(DECODE_PROMPT_TOKENS) for _ in range(DECODING)]
            for name, llm in named if number % 2 else reversed(named):
                began = time.perf_counter()
                llm.generate(batch, GREEDY | {"max_new_tokens": DECODED_TOKENS}, progress=False)
                speed[name].append(DECODING * DECODED_TOKENS / (time.perf_counter() - began))
    ratios = [a / b for a, b in zip(*speed.values(), strict=True)]
    rows: Rows = {name: _spread(taken) for name, taken in speed.items()}
    rows["with / without, pair by pair"] = _spread(ratios)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"lower quartile": low, "median": median, "upper quartile": high}


# ---- all ----


def show(title: str, rows: Rows) -> None:
    """A table; lines with other columns than the first begin another one."""
    groups: list[tuple[tuple[str, ...], Rows]] = []
    for name, numbers in rows.items():
        if not groups or groups[-1][0] != tuple(numbers):
            groups.append((tuple(numbers), {}))
        groups[-1][1][name] = numbers
    for columns, group in groups:
        table = Table("", *columns, title=title)
        for name, numbers in group.items():
            table.add_row(name, *(f"{number:,.{0 if number >= 1000 else 3}f}" for number in numbers.values()))
        Console().print(table)


def main() -> None:
    """Run the parts that are asked for and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("hit", "checksum", "turns", "digests")
    parser.add_argument("--part", nargs="*", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--pp", type=int, nargs="*", default=[1, 2], help="numbers of stages to try hits with"
    )
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=POLICIES[:1])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Rows] = {}

    def keep(title: str, rows: Rows) -> None:
        results[title] = rows
        if not arguments.json:
            show(title, rows)

    rounds = arguments.rounds
    if "hit" in arguments.part:
        for pp_size in arguments.pp:
            keep(f"first token of {HIT_TOKENS + 1:,} tokens, pp {pp_size}", hits(pp_size, rounds))
    if "checksum" in arguments.part:
        keep(f"host hit of {HIT_TOKENS:,} tokens, pp 1", checksums(rounds))
    if "turns" in arguments.part:
        title = f"{CLIENTS} clients, {TURNS} turns of {TURN_TOKENS} new tokens, pp 1"
        keep(title, turns(1, arguments.policies))
    if "digests" in arguments.part:
        keep(f"tokens/s of {DECODING} requests, pp 2, host tier", digests(2, rounds))
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
