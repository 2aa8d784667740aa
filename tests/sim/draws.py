"""What a seed decides: the sizes of a cluster, how unkind its world is, and what its clients ask for.

Each cluster draws its own sizes and rates (some of them zero), so that some seeds are calm and others are storms:
more faults are found by many different worlds than by one average world.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from engine.types import Capacity, Request, SamplingParams
from tests.sim.model import VOCABULARY

RANKS_MAX = 8


@dataclass(frozen=True)
class World:
    """Sizes and rates of one cluster."""

    ranks: int
    capacity: Capacity
    policy: str
    cache_prefixes: bool
    queued_max: int
    arrival_rate: float
    repeat_rate: float
    """Chance that a client comes with a known prompt as it is."""
    known_max: int
    """Clients know only so many of the latest new prompts."""
    prompt_lengths: tuple[int, ...]
    answer_lengths: tuple[int, ...]
    logprob_rate: float
    salt_rate: float
    abort_rate: float
    abort_new_rate: float
    """Aborts in the very entry of the arrival."""
    abort_last_rate: float
    """Aborts while the last token is under way."""
    abort_loading_rate: float
    """Aborts while its prefix comes back from the host."""
    storm_rate: float
    """Storms that abort half or all of what lives."""
    finish_rate: float
    flush_rate: float
    lag: float
    """Chance that something which could happen in a tick is late."""
    report_steps: int
    """A rank without other news reports after so many steps."""
    frozen_rank: int
    """This rank does nothing from `frozen_from` until `frozen_to`, in ticks."""
    frozen_from: int
    frozen_to: int
    copy_lag: tuple[float, ...]
    """For each rank that there may be: chance that a copy which could end in a tick does not."""
    copy_fail_rate: float
    copy_damage_rate: float
    """Backups that leave a damaged page, which only its checksum tells."""
    drain_tick: int | None
    drain_ticks: int
    """How long a drain leaves to requests before it aborts them."""


def draw_world(draw: Random, ticks: int) -> World:
    """Sizes small enough that pages are short and steps are many."""
    ranks = draw.choice((1, 2, 2, 3, 4, 5, RANKS_MAX))
    page_size = draw.choice((1, 2, 4, 16))
    tokens = draw.choice((32, 48, 64, 96, 160, 400, 800))
    host_tokens = draw.choice((0, 0, 16, 64, 200, 1000, 4000))
    # Most of the worlds with a host tier make use of it: clients come back to a few prompts, which are more than the
    # device holds, and leave the cluster the time to answer.
    busy = host_tokens > 0 and draw.random() < 0.7
    if busy:
        tokens, host_tokens = draw.choice((96, 160, 240)), draw.choice((200, 400, 1000, 4000))
    slow = draw.choice((0.0, 0.0, 0.9, 0.97))  # Of the copies of some ranks.
    frozen = draw.random() < 0.2
    frozen_from = draw.randrange(ticks)
    return World(
        ranks=ranks,
        capacity=Capacity(
            page_size=page_size,
            device_pages=tokens // page_size,
            max_running_requests=draw.choice((2, 4, 16, 16) if busy else (1, 2, 4, 16, 16)),
            chunk_tokens=max(
                draw.choice((16, 64, 64, 1000) if busy else (4, 4, 16, 23, 64, 1000)), page_size
            ),
            depth=draw.choice((1, ranks, ranks, ranks + 1)),
            context_length=draw.choice((200, 200, 200) if busy else (30, 200, 200)),
            growth_tokens=draw.choice((0, 0, 0, 8, 64)),
            host_pages=host_tokens // page_size,
            write_policy=draw.choice(("write_through", "write_through_selective", "write_back")),
        ),
        policy=draw.choice(("fcfs", "lpm")),
        cache_prefixes=draw.random() < 0.9,
        queued_max=draw.choice((3, 50)),
        arrival_rate=draw.choice((0.3, 0.6) if busy else (0.1, 0.3, 0.6)),
        repeat_rate=draw.choice((0.5, 0.7)) if busy else draw.choice((0.0, 0.3)),
        known_max=draw.choice((8, 16)) if busy else 1000,
        prompt_lengths=(33, 60, 90) if busy else (1, 2, 15, 16, 17, 33, 90),
        answer_lengths=(1, 2, 5) if busy else (0, 1, 2, 5, 40, 120, 120),
        logprob_rate=0.2 if busy else 0.3,
        salt_rate=draw.choice((0.0, 0.0, 0.5)),
        abort_rate=draw.choice((0.0, 0.0, 0.02, 0.1)),
        abort_new_rate=draw.choice((0.0, 0.0, 0.3)),
        abort_last_rate=draw.choice((0.0, 0.0, 0.0, 0.3)),
        abort_loading_rate=draw.choice((0.0, 0.0, 0.2)),
        storm_rate=draw.choice((0.0, 0.0, 0.0, 0.03)),
        finish_rate=draw.choice((0.0, 0.05)),
        flush_rate=draw.choice((0.0, 0.0, 0.0, 0.01) if busy else (0.0, 0.03)),
        lag=draw.choice((0.1, 0.1, 0.5) if busy else (0.1, 0.5, 0.9)),
        report_steps=draw.choice((1, 16)),
        frozen_rank=draw.randrange(ranks),
        frozen_from=frozen_from if frozen else ticks,
        frozen_to=frozen_from + 100 if frozen else ticks,
        copy_lag=tuple(draw.choice((0.0, 0.0, 0.0, 0.5, slow)) for _ in range(RANKS_MAX)),
        copy_fail_rate=draw.choice((0.0, 0.0, 0.03, 0.1) if busy else (0.0, 0.0, 0.0, 0.03, 0.3)),
        copy_damage_rate=draw.choice((0.0, 0.0, 0.1)),
        drain_tick=draw.randrange(ticks) if draw.random() < 0.2 else None,
        drain_ticks=draw.choice((0, 20, 10**9)),
    )


def draw_requests(
    draw: Random, world: World, first_id: int, known: list[tuple[int, ...]]
) -> tuple[Request, ...]:
    """One submission: now and then several alike, often with a prefix (or the whole) of an earlier prompt."""
    prompt: tuple[int, ...] = ()
    held = world.capacity.device_pages * world.capacity.page_size
    known = known[-world.known_max :]
    if known and draw.random() < world.repeat_rate:
        prompt = draw.choice(known)
    else:
        if known and draw.random() < 0.6:
            prompt = draw.choice(known)
            prompt = prompt[: draw.randint(0, len(prompt))]
        prompt += tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice(world.prompt_lengths)))
    delivered = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 0, 0, 3))))
    new = len(delivered) + draw.choice(world.answer_lengths)
    if draw.random() < 0.9:  # Mostly such that it fits, often exactly.
        length_max = min(world.capacity.context_length, held + 1)
        prompt = prompt[: draw.choice((length_max - 1, length_max // 2))]
        new = min(new, length_max - len(prompt))
    sampling = SamplingParams(
        max_new_tokens=max(new, 1),
        min_new_tokens=draw.choice((0, 0, 3)),
        temperature=draw.choice((0.0, 1.0)),
        seed=draw.choice((7, draw.getrandbits(64))),
        frequency_penalty=draw.choice((0.0, 0.0, 0.5)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.5)),
        stop_token_ids=draw.choice(((), (), (3,), (1, 5))),
        return_logprob=draw.random() < world.logprob_rate,
        logprob_start=draw.choice((-1, 0, 5, 16)),
        top_logprobs=draw.choice((0, 2)),
    )
    salt = draw.choice(("a", "bc")) if draw.random() < world.salt_rate else ""
    return tuple(
        Request(
            request_id=first_id + i,
            rid="r",
            prompt_ids=prompt,
            delivered_ids=delivered[: sampling.max_new_tokens],
            sampling=sampling,
            cache_salt=salt,
        )
        for i in range(draw.choice((1, 1, 1, 4)))
    )
