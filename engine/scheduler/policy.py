"""Small pure questions of the scheduler: does a request fit, who comes next, who must give way.

Each is a function of values; none changes anything. Numbers are integers, so every replica answers alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.mem_cache.radix_cache import RadixCache
from engine.scheduler.sequence import Sequence
from engine.types import Capacity, Request

LPM_WINDOW = 128
"""Waiting sequences that `lpm` looks at; a match for each of a long queue would cost more than it saves."""
OVERTAKEN_MAX = 32
"""How often later arrivals may be admitted before a waiting sequence: then it goes first, under any policy."""

LOAD_TOKENS_MIN = 10
"""A prefix on the host that would save fewer tokens is computed again, not loaded."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def pages_to_load(host_pages: int, page_size: int) -> int:
    """Pages worth loading of those that only the host holds behind a prefix on the device: all of them or none."""
    return host_pages if host_pages * page_size >= LOAD_TOKENS_MIN else 0


def does_not_fit(request: Request, capacity: Capacity) -> str:
    """Why a request can never run, or an empty text if it can.

    The last token of an answer has no KV, so prompt + max_new - 1 tokens must fit, in whole pages.
    """
    prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
    if prompt < 1:
        return "the prompt has no tokens; at least 1 is needed"
    if prompt + new > capacity.context_length:
        return (
            f"prompt of {prompt} tokens + max_new_tokens {new} = {prompt + new} tokens, "
            f"but the context length is {capacity.context_length}"
        )
    need = pages_for(prompt + new - 1, capacity.page_size) * capacity.page_size
    held = capacity.device_pages * capacity.page_size
    if need > held:
        return (
            f"prompt of {prompt} tokens + max_new_tokens {new} needs {need} tokens of cache, "
            f"but the capacity is {held}"
        )
    return ""


def waiting_order(waiting: list[Sequence], policy: str, cache: RadixCache, page_size: int) -> list[Sequence]:
    """The order in which waiting sequences (given by arrival) are considered for admission.

    `lpm` puts the longest cached prefix first, but whoever was overtaken often enough comes before all.
    """
    if policy == "fcfs":
        return waiting
    window = waiting[:LPM_WINDOW]
    return sorted(
        window, key=lambda s: (s.overtaken < OVERTAKEN_MAX, -_cached(s, cache, page_size), s.number)
    )


def _cached(sequence: Sequence, cache: RadixCache, page_size: int) -> int:
    if sequence.overtaken >= OVERTAKEN_MAX:
        return 0
    found = cache.peek(sequence.salt, bytes(sequence.key), sequence.cache_pages_max(page_size))
    return found.pages + found.host_pages


def committed_pages(running: Iterable[Sequence], capacity: Capacity) -> int:
    """Pages that running sequences have not taken yet but will soon: the rest of their ids and some growth."""
    total = 0
    for sequence in running:
        soon = min(len(sequence.ids) + capacity.growth_tokens, sequence.rows_max)
        total += max(pages_for(soon, capacity.page_size) - len(sequence.pages), 0)
    return total


def victim(running: list[Sequence], needy: Sequence) -> Sequence | None:
    """Who is retracted so that `needy` gets pages: the latest arrival without a span in flight or a load.

    Never the oldest of the running, so the oldest always ends; never one older than `needy`, which rather waits or
    is itself the victim. None if nobody can be.
    """
    oldest = min(sequence.number for sequence in running)
    idle = [s for s in running if not (s.in_flight or s.loading)]
    idle = [s for s in idle if s.number != oldest and s.number >= needy.number]
    return max(idle, key=lambda s: s.number, default=None)
