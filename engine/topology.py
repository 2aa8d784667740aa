"""Who owns what: rank -> stage, tp rank, layer range, neighbours. Pure arithmetic, computed once, never changed.

Ranks are laid out pp outer, tp inner: rank = pp_rank * tp_size + tp_rank. The leader is rank 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


def split_layers(layer_count: int, pp_size: int) -> tuple[tuple[int, int], ...]:
    """Cut `layer_count` layers over `pp_size` stages; the last `layer_count % pp_size` stages get one more.

    Returns one [start, end) per stage. Raises ValueError when a stage would own no layer.
    78 over 4 gives 19, 19, 20, 20 layers (the rule of SGLang's `get_pp_indices`).
    """
    if not 1 <= pp_size <= layer_count:
        raise ValueError(
            f"--pp-size {pp_size}: the model has {layer_count} layers, "
            f"so allowed is a number from 1 to {layer_count}"
        )
    base, extra = divmod(layer_count, pp_size)
    counts = [base + (stage >= pp_size - extra) for stage in range(pp_size)]
    return _ranges(counts)


def partition_layers(
    partition: tuple[int, ...], layer_count: int, pp_size: int
) -> tuple[tuple[int, int], ...]:
    """Cut layers as `--pp-layer-partition` says: one positive count per stage, summing to the model's layers."""
    shown = ",".join(map(str, partition))
    if len(partition) != pp_size:
        raise ValueError(
            f"--pp-layer-partition {shown}: has {len(partition)} counts, but --pp-size is {pp_size}: "
            "one count per stage is allowed"
        )
    if min(partition) < 1:
        raise ValueError(f"--pp-layer-partition {shown}: every stage needs at least 1 layer")
    if sum(partition) != layer_count:
        raise ValueError(
            f"--pp-layer-partition {shown}: sums to {sum(partition)}, but the model has {layer_count} layers"
        )
    return _ranges(list(partition))


def _ranges(counts: list[int]) -> tuple[tuple[int, int], ...]:
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of one rank among all."""

    rank: int
    tp_size: int
    pp_size: int
    layer_ranges: tuple[tuple[int, int], ...]
    """[start, end) per stage."""

    @staticmethod
    def build(
        rank: int, *, tp_size: int, pp_size: int, layer_count: int, partition: tuple[int, ...] | None = None
    ) -> Topology:
        """Lay out `tp_size * pp_size` ranks over a model. Raises ValueError naming the flag that does not fit."""
        if partition is None:
            ranges = split_layers(layer_count, pp_size)
        else:
            ranges = partition_layers(partition, layer_count, pp_size)
        assert 0 <= rank < tp_size * pp_size, f"rank {rank} outside 0..{tp_size * pp_size - 1}"
        return Topology(rank, tp_size, pp_size, ranges)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size

    @property
    def pp_rank(self) -> int:
        """The stage."""
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        """The slice of each layer."""
        return self.rank % self.tp_size

    @property
    def layers(self) -> range:
        """The model's layers that this rank owns."""
        return range(*self.layer_ranges[self.pp_rank])

    @property
    def is_leader(self) -> bool:
        """True on the one rank that makes the log."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """True where token ids come in."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where logits come out."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_tokens(self) -> bool:
        """True on the one rank that samples and reports finished steps: last stage, tp rank 0."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def previous_rank(self) -> int | None:
        """Where hidden states come from, or None on the first stage."""
        return None if self.is_first_stage else self.rank - self.tp_size

    @property
    def next_rank(self) -> int | None:
        """Where hidden states go, or None on the last stage."""
        return None if self.is_last_stage else self.rank + self.tp_size

    @property
    def tag(self) -> str:
        """The prefix of this rank's log lines."""
        return f"[PP{self.pp_rank} TP{self.tp_rank}]"
