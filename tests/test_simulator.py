"""Simulated clusters: a few dozen seeds, planted divergences, and what the seeds must have met along the way.

More seeds by hand: `python -m tests.sim --seeds 0..10000`; planted faults in the code: `python -m tests.sim.mutants`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import pytest

from engine.scheduler.scheduler import Scheduler
from engine.types import Entry
from tests.sim.cluster import Cluster, Divergence, run_seed
from tests.sim.draws import World
from tests.sim.faults import FAULTS
from tests.sim.mutants import MUTANTS, ROOT

SEEDS = range(150)
SEEDS_PER_FAULT = 100


def test_seeds():
    """Safety in every step, and an end within bounds; and no seed is so kind that nothing happens.

    TensorRT-LLM#8813, LMCache#4385: with a host tier, answers never hold another prompt's text.
    """
    seen = Counter[str]()
    for seed in SEEDS:
        try:
            seen += run_seed(seed).seen
        except Exception as error:
            raise AssertionError(f"python -m tests.sim {seed}") from error
    for name in (
        "retracted",
        "retracted again",
        "retracted while prefilling",
        "retracted with prompt log probabilities",
        "evicted",
        "steps with duplicate pages",
        "storms",
        "flushed",
        "flush refused",
        "refused 400",
        "refused 429",
        "refused 503",
        "stopped for a laggard",
        "drained under load",
        "ended by abort",
        "ended by length",
        "ended by stop",
        "ended at a stop string",
        "loads",
        "host hits",
        "backups",
        "write-backs",
        "demoted",
        "evicted from the host",
        "mirrors dropped",
        "loads that failed",
        "backups that failed",
        "damaged pages found",
        "aborted while loading",
        "loads that nobody waited for",
        "loads of what was computed meanwhile",
        "waits for another's copy",
        "flush refused for copies",
        "drained while copying",
        "ended while copying",
    ):
        assert seen[name] > 0, f"no seed met: {name}; seen were {dict(seen)}"


def test_a_seed_is_a_whole_life():
    """The same seed leads to the same digest, whatever ran before."""
    first, again = run_seed(3), run_seed(3)
    assert first.leader.digest == again.leader.digest and first.seen == again.seen


def several_ranks(world: World) -> World:
    return dataclasses.replace(world, ranks=max(world.ranks, 3), frozen_rank=0)


def spoilt(name: str, seed: int, *, host_counts: bool = True) -> Divergence | None:
    """Run a seed in which one rank (not the leader) goes wrong from some step on; how that came to light."""
    cluster = Cluster(seed, ticks=100, change=several_ranks, host_counts=host_counts)
    draw = Random(seed)
    rank, from_step = draw.randrange(1, 3), draw.choice((1, 30, 100))

    def spoil(index: int, scheduler: Scheduler, entry: Entry) -> Entry:
        if index != rank or (entry.step < from_step and not name.startswith("fewer")):
            return entry
        return FAULTS[name](scheduler, entry, draw)

    cluster.before_apply = spoil
    try:
        cluster.run()
    except Divergence as divergence:
        assert divergence.rank == rank
        return divergence
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_parts_is_caught_by_its_digest(name: str):
    """On apply, before any work: never as a wrong token, a failed assertion or a hang."""
    assert any(spoilt(name, seed) for seed in range(SEEDS_PER_FAULT))


def test_one_page_less_is_caught_at_the_first_step_and_named():
    """sglang#29258: capacities that differ between stages."""
    divergence = spoilt("fewer pages", 1)
    assert (divergence.step, divergence.field) == (1, "pages available")


def test_one_host_page_less_is_caught_at_the_first_step_and_named():
    divergences = [divergence for seed in range(8) if (divergence := spoilt("fewer host pages", seed))]
    assert divergences
    assert {(d.step, d.field) for d in divergences} == {(1, "host pages available")}


def test_with_the_capacity_left_out_of_the_digest_one_host_page_less_is_caught_at_a_decision():
    """sglang#29258 as it was met: nothing compares the capacities, and the stages part under pressure."""
    divergences = [
        divergence
        for seed in range(25)
        if (divergence := spoilt("fewer host pages", seed, host_counts=False))
    ]
    assert len(divergences) >= 3 and all(divergence.step > 1 for divergence in divergences)
    assert all("pages available" not in divergence.field for divergence in divergences)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("abort unheard", "inputs"),
        ("token misheard", "inputs"),
        ("limit misheard", "inputs"),
        ("counter flipped", "retractions"),
        ("clock ahead", "tree clock"),
    ],
)
def test_the_report_names_the_first_field_that_differs(name: str, field: str):
    fields = {divergence.field for seed in range(8) if (divergence := spoilt(name, seed))}
    assert fields == {field}


def test_every_mutant_still_applies():
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant
