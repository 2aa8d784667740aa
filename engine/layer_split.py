"""Contiguous splits of layers: the search behind the planner's advice. Exact, and quick for any real model.

A layer has a cost of one or two kinds (bytes of keys and values, bytes of recurrent state); a split is as good as its
heaviest stage, of each kind. Owns nothing; plain integers in, ranges of layers out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def least_limits(costs: Sequence[Sequence[int]], stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the least that the heaviest of `stages` stages can cost, one number per kind of cost.

    `costs[kind][layer]`; one kind has one answer. Two kinds may pull apart: then every pair is yielded of which
    neither number can be lowered without raising the other.
    """
    everything = [sum(cost) for cost in costs]
    limits = list(everything)
    while _fits(costs, limits, stages):
        for kind in range(len(costs)):
            limits[kind] = _least(costs, limits, kind, stages)
        yield tuple(limits)
        if len(costs) == 1:
            return
        # Next the best first number among splits whose second is lower than any so far.
        limits = [everything[0], limits[1] - 1]


def even_split(
    costs: Sequence[Sequence[int]], limits: Sequence[int], stages: int
) -> tuple[tuple[int, int], ...]:
    """The evenest split with no stage over `limits`: one [start, end) per stage, none empty.

    Evenest: the fewest layers on the fullest stage, then the least sum of squares, then the longer stages last, as
    `topology.split_layers` has them. Some split must keep to the limits.
    """
    layer_count = len(costs[0])
    counted = [*costs, [1] * layer_count]
    fullest = _least(counted, [*limits, layer_count], len(costs), stages)
    reach = _reach(counted, [*limits, fullest])
    # squares[i] is the least sum of squares of the stages from layer i on; ends[k][i] where the first of k ends.
    squares: list[int | None] = [None] * layer_count + [0]
    ends: list[list[int]] = []
    for _ in range(stages):
        best: list[int | None] = [None] * (layer_count + 1)
        end = [0] * layer_count
        for start in range(layer_count):
            for stop in range(start + 1, reach[start] + 1):
                rest, least = squares[stop], best[start]
                if rest is not None and (least is None or rest + (stop - start) ** 2 < least):
                    best[start], end[start] = rest + (stop - start) ** 2, stop
        squares = best
        ends.append(end)
    assert squares[0] is not None, f"no split of {layer_count} layers into {stages} keeps to {limits}"
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in reversed(ends):
        ranges.append((start, end[start]))
        start = end[start]
    return tuple(ranges)


def _least(costs: Sequence[Sequence[int]], limits: Sequence[int], kind: int, stages: int) -> int:
    """The least limit of one kind with which `limits` of the others can be kept."""
    low, high = max(costs[kind]), limits[kind]
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, [*limits[:kind], middle, *limits[kind + 1 :]], stages):
            high = middle
        else:
            low = middle + 1
    return high


def _fits(costs: Sequence[Sequence[int]], limits: Sequence[int], stages: int) -> bool:
    """Whether `stages` stages suffice, each filled as far as its limits go. Fewer suffice for more: any may be cut."""
    layer_count = len(costs[0])
    reach = _reach(costs, limits)
    start = used = 0
    while start < layer_count and used < stages and reach[start] > start:
        start, used = reach[start], used + 1
    return start == layer_count


def _reach(costs: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """For each layer, the furthest end of a stage that starts with it and keeps to the limits."""
    layer_count = len(costs[0])
    loads = [0] * len(costs)
    reach: list[int] = []
    end = 0
    for start in range(layer_count):
        end = max(end, start)
        while end < layer_count and all(
            load + cost[end] <= limit for load, cost, limit in zip(loads, costs, limits, strict=True)
        ):
            loads = [load + cost[end] for load, cost in zip(loads, costs, strict=True)]
            end += 1
        reach.append(end)
        if end > start:
            loads = [load - cost[start] for load, cost in zip(loads, costs, strict=True)]
    return reach
