"""The host tier's capacities of a whole model, stage by stage, before and after the stages agree.

Owns what the planner answers, as plain data, and the choice of the layer split that wastes least. All prices and
counts come from `mem_cache.sizing`, the functions by which the engine itself sizes and allocates. It reads no file
and prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from engine.config import ConfigError, check_values, engine_flag, flag
from engine.layer_split import even_split, least_limits
from engine.mem_cache.sizing import (
    PoolShape,
    gigabytes,
    host_pages,
    host_tokens,
    most_on_a_stage,
    split_budget,
)
from engine.model.cache_shapes import ModelCache, cache_of
from engine.topology import partition_layers, split_layers

SIDECARS = ("indexer",)
"""Pools that hold as many tokens as the main pool beside them: counted apart, not taken from the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerFlags:
    """What is asked. Names shared with the engine mean the same; GB are decimal and per rank."""

    config: str | None = flag(None, "model", "a model's config.json, or the folder that holds it")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "model", "of arithmetic, and so of convolution windows; auto is bfloat16"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8"] = flag(
        "auto",
        "model",
        "of keys, values and latents; auto is --dtype; fp8 packs sparse-indexed latents with scales",
    )
    pp_size: int = engine_flag("pp_size")
    tp_size: int = engine_flag("tp_size")
    pp_layer_partition: tuple[int, ...] | None = engine_flag("pp_layer_partition")
    page_size: int = engine_flag("page_size")
    hicache_size: float = engine_flag("hicache_size")
    hicache_ratio: float = engine_flag("hicache_ratio")
    device_tokens: int | None = flag(
        None, "host tier", "tokens of the device cache, agreed by all stages", low=1, high=10**12
    )
    state_slots: int | None = flag(
        None, "host tier", "recurrent states of the device cache, agreed by all stages", low=1, high=10**9
    )
    state_share: float | None = flag(
        None,
        "host tier",
        "share of --hicache-size for recurrent state beside keys and values; absent: as the device shares its memory "
        "by --device-tokens and --state-slots, or half",
        low=0.001,
        high=0.999,
    )
    json: bool = flag(False, "output", "print the plan as JSON, counts exact and sizes in bytes")


@dataclass(frozen=True, slots=True)
class PoolOnStage:
    """One pool on one stage, on each of its tp ranks. Counts are tokens, or slots of the pool `state`."""

    name: str
    bytes_each: int
    """Of one token or slot in the stage's layers; 0 where it owns none of this kind."""
    count_before: int | None
    """What the stage would take by its own price; None: it owns no such layers and sets no limit."""
    count_after: int
    """What all stages agree on."""
    bytes_pinned: int


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """One stage, on each of its tp ranks."""

    stage: int
    layers: tuple[int, int]
    """[start, end)."""
    pools: tuple[PoolOnStage, ...]
    bytes_pinned: int
    """Of all pools but sidecars."""
    bytes_sidecar: int
    bytes_unused: int
    """Of the budget; by ratio, what the heaviest stage pins more. Negative where the one extra page goes over it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the stages' capacities for one pool are apart without agreement."""

    name: str
    least: int
    most: int
    agreed: int


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A cut of the model into stages, and what comes of it."""

    partition: tuple[int, ...]
    """Layers of each stage."""
    counts: tuple[int, ...]
    """Agreed tokens or slots of each pool that is not a sidecar."""
    bytes_unused: int
    """Over one rank of every stage."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The planner's answer. It holds plain data only: `dataclasses.asdict` of it is its JSON."""

    model_type: str
    pools: tuple[PoolShape, ...]
    budget_bytes: int
    """Of each rank; 0: sized by ratio."""
    stages: tuple[StageCapacity, ...]
    unagreed: tuple[Spread, ...]
    split: LayerSplit
    best_split: LayerSplit
    """The contiguous split that leaves least unused, the evenest of equals; `split` itself where none is better."""


def plan_capacity(config: Mapping[str, Any], flags: PlannerFlags) -> CapacityPlan:
    """Plan the host tier of a model. Raises ConfigError or ValueError with one line naming the flag or the field."""
    check_values(flags)
    dtype = "bfloat16" if flags.dtype == "auto" else flags.dtype
    kv_cache_dtype = dtype if flags.kv_cache_dtype == "auto" else flags.kv_cache_dtype
    model = cache_of(config, tp_size=flags.tp_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    if flags.pp_layer_partition is None:
        ranges = split_layers(model.layer_count, flags.pp_size)
    else:
        ranges = partition_layers(flags.pp_layer_partition, model.layer_count, flags.pp_size)
    _check_flags(model, flags)
    stages = _stages(model.shapes, ranges, flags)
    split = _split_of(stages)
    return CapacityPlan(
        model_type=model.model_type,
        pools=model.shapes,
        budget_bytes=gigabytes(flags.hicache_size),
        stages=stages,
        unagreed=_unagreed(stages),
        split=split,
        best_split=_best_split(model, split, flags),
    )


def _check_flags(model: ModelCache, flags: PlannerFlags) -> None:
    """Check what no single flag shows. Raises ConfigError."""
    names = [pool.name for pool in _main_pools(model.shapes)]
    if flags.hicache_size > 0 and gigabytes(flags.hicache_size) == 0:
        raise ConfigError(f"--hicache-size {flags.hicache_size}: allowed is 0 or at least one byte, 1e-09")
    if flags.device_tokens is not None and flags.device_tokens < flags.page_size:
        raise ConfigError(
            f"--device-tokens {flags.device_tokens}: allowed is at least --page-size, which is {flags.page_size}"
        )
    if flags.hicache_size == 0:
        given = {"--state-slots": flags.state_slots} if "state" in names else {}
        if names != ["state"]:
            given["--device-tokens"] = flags.device_tokens
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ConfigError(
                f"--hicache-size {flags.hicache_size}: allowed is more than 0, or {' and '.join(missing)} "
                "to size by --hicache-ratio"
            )
    if flags.state_share is not None and (len(names) == 1 or flags.hicache_size == 0):
        raise ConfigError(
            f"--state-share {flags.state_share}: allowed where --hicache-size is divided between tokens and state; "
            f"here it is {flags.hicache_size}, and {model.model_type} keeps {' and '.join(names)}"
        )


# ---- counts ----------------------------------------------------------------------------------------


def _stages(
    pools: Sequence[PoolShape], ranges: Sequence[tuple[int, int]], flags: PlannerFlags
) -> tuple[StageCapacity, ...]:
    counts = _counts(pools, ranges, flags)
    rows: list[tuple[PoolOnStage, ...]] = []
    for stage, layers in enumerate(ranges):
        row = []
        for pool in pools:
            before, after = counts[pool.name]
            each = pool.bytes_on(range(*layers))
            row.append(PoolOnStage(pool.name, each, before[stage] if each else None, after, after * each))
        rows.append(tuple(row))
    pinned = [sum(pool.bytes_pinned for pool in row if pool.name not in SIDECARS) for row in rows]
    allowed = gigabytes(flags.hicache_size) or max(pinned)
    return tuple(
        StageCapacity(
            stage=stage,
            layers=ranges[stage],
            pools=row,
            bytes_pinned=pinned[stage],
            bytes_sidecar=sum(pool.bytes_pinned for pool in row) - pinned[stage],
            bytes_unused=allowed - pinned[stage],
        )
        for stage, row in enumerate(rows)
    )


def _counts(
    pools: Sequence[PoolShape], ranges: Sequence[tuple[int, int]], flags: PlannerFlags
) -> dict[str, tuple[list[int], int]]:
    """By pool: each stage's count before agreement, and the one that all agree on."""
    main = _main_pools(pools)
    counts: dict[str, tuple[list[int], int]] = {}
    for pool, budget in zip(main, _budgets(main, ranges, flags), strict=True):
        slots = pool.name == "state"
        device, page_size = (flags.state_slots, 1) if slots else (flags.device_tokens, flags.page_size)
        raw = [
            host_tokens(device or 0, flags.hicache_ratio, budget, pool.bytes_on(range(*layers)))
            for layers in ranges
        ]
        before = [host_pages(count, page_size) * page_size for count in raw]
        counts[pool.name] = before, host_pages(min(raw), page_size) * page_size
    return {pool.name: counts.get(pool.name, counts[main[0].name]) for pool in pools}


def _budgets(main: Sequence[PoolShape], ranges: Sequence[tuple[int, int]], flags: PlannerFlags) -> list[int]:
    """Bytes of the budget for each pool that is no sidecar; 0 means by ratio."""
    budget = gigabytes(flags.hicache_size)
    if budget == 0 or len(main) == 1:
        return [budget for _ in main]
    token_bytes, slot_bytes = (most_on_a_stage(pool, ranges) for pool in main)
    page_bytes = token_bytes * flags.page_size
    if flags.state_share is None and flags.device_tokens and flags.state_slots:
        pages, slots = flags.device_tokens // flags.page_size, flags.state_slots
    else:
        # As many pages and slots as make their bytes stand to each other as the shares do.
        share = Fraction(str(flags.state_share or "0.5"))
        pages, slots = (share.denominator - share.numerator) * slot_bytes, share.numerator * page_bytes
    return list(split_budget(budget, page_bytes, slot_bytes, pages, slots))


def _main_pools(pools: Sequence[PoolShape]) -> list[PoolShape]:
    return [pool for pool in pools if pool.name not in SIDECARS]


def _unagreed(stages: Sequence[StageCapacity]) -> tuple[Spread, ...]:
    spreads = []
    for place, pool in enumerate(stages[0].pools):
        local = [row.pools[place].count_before for row in stages]
        counts = [count for count in local if count is not None]
        if pool.name not in SIDECARS:
            spreads.append(Spread(pool.name, min(counts), max(counts), pool.count_after))
    return tuple(spreads)


# ---- the best split --------------------------------------------------------------------------------


def _split_of(stages: Sequence[StageCapacity]) -> LayerSplit:
    return LayerSplit(
        partition=tuple(row.layers[1] - row.layers[0] for row in stages),
        counts=tuple(pool.count_after for pool in stages[0].pools if pool.name not in SIDECARS),
        bytes_unused=sum(row.bytes_unused for row in stages),
    )


def _best_split(model: ModelCache, split: LayerSplit, flags: PlannerFlags) -> LayerSplit:
    """The split that leaves least unused, the evenest where several do; `split` itself where none is better.

    With one budget for one pool, least is left where the heaviest stage is lightest. With a budget shared by two, or
    sizes by ratio, the candidates are the splits whose heaviest stage cannot be lighter in one without the other.
    """
    main = _main_pools(model.shapes)
    by_ratio = flags.hicache_size == 0
    weights = split.counts if by_ratio else [1] * len(main)
    costs = [
        [weight * pool.bytes_on(range(layer, layer + 1)) for layer in range(model.layer_count)]
        for pool, weight in zip(main, weights, strict=True)
    ]
    if by_ratio:
        # Counts are given, so what a stage pins is one sum.
        costs = [[sum(layer) for layer in zip(*costs, strict=True)]]
    best = split
    for limits in least_limits(costs, flags.pp_size):
        ranges = even_split(costs, limits, flags.pp_size)
        found = _split_of(_stages(model.shapes, ranges, flags))
        best = min(best, found, key=_unused_then_unevenness)
    return best


def _unused_then_unevenness(split: LayerSplit) -> tuple[int, int, int]:
    counts = split.partition
    return split.bytes_unused, max(counts), sum(count**2 for count in counts)
