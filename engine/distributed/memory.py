"""How much memory a machine has left for pools, and whether what all its ranks ask for fits. No torch.

Ranks of one machine share its memory, so the check is made per machine over all of them, by every rank on the same
gathered numbers. A container's limit (cgroup v1 or v2) counts as the machine's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

RESERVE_BYTES_MAX = 10 * 10**9
NO_LIMIT_BYTES = 1 << 60
"""Limits from here on are how cgroup v1 says "none"."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of one machine or container, in bytes."""

    total: int
    available: int

    @property
    def reserve(self) -> int:
        """What pools must leave free: the smaller of 10 GB and 10 % of memory."""
        return min(RESERVE_BYTES_MAX, self.total // 10)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one rank is about to allocate on its machine, in bytes."""

    host_name: str
    rank: int
    bytes: int
    host_pool_bytes: int = 0
    """How many of them are the host tier's, which a flag can make smaller."""


def check_memory(needs: Iterable[MemoryNeed], memory_by_host: Mapping[str, HostMemory]) -> str | None:
    """One line for the first machine whose ranks need more than available - reserve, or None if all fits.

    Machines are taken in the order of their lowest rank, so every rank comes to the same line.
    """
    needs_by_host: dict[str, list[MemoryNeed]] = {}
    for need in sorted(needs, key=lambda one: one.rank):
        needs_by_host.setdefault(need.host_name, []).append(need)
    for host_name, here in needs_by_host.items():
        memory, needed = memory_by_host[host_name], sum(need.bytes for need in here)
        if needed > memory.available - memory.reserve:
            shown = _in_gb(needed, memory.available, memory.reserve)
            named = ", ".join(str(need.rank) for need in here)
            host_pools = sum(need.host_pool_bytes for need in here)
            tier = f"; the host tier (--hicache-size, --hicache-ratio) takes {host_pools / 1e9:.2f} GB"
            return (
                f"memory of {host_name}: needed {shown[0]} GB by ranks {named}, "
                f"but available {shown[1]} GB - reserve {shown[2]} GB is less" + tier * (host_pools > 0)
            )
    return None


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """This machine's memory, or its container's where that is less. Page cache counts as available."""
    read_machine: Callable[[], Any] = psutil.virtual_memory
    machine = read_machine()
    total, available = int(machine.total), int(machine.available)
    for limit, used in _cgroup_limits(proc / "self" / "cgroup", cgroups):
        if limit < NO_LIMIT_BYTES:
            total = min(total, limit)
            available = min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _in_gb(needed: int, available: int, reserve: int) -> tuple[str, str, str]:
    """The numbers in GB with as many decimals as it takes to see in them that needed > available - reserve."""
    decimals = 2
    while decimals < 9:
        unit = 10 ** (9 - decimals)
        rounded = [(number + unit // 2) // unit for number in (needed, available, reserve)]
        if rounded[0] > rounded[1] - rounded[2]:
            break
        decimals += 1
    first, second, third = (
        f"{(number + 10 ** (9 - decimals) // 2) // 10 ** (9 - decimals) / 10**decimals:.{decimals}f}"
        for number in (needed, available, reserve)
    )
    return first, second, third


def _cgroup_limits(membership: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of this process' memory group and every group around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _walk(root, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            files = ("total_inactive_file", "total_active_file")
            yield from _walk(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", files)


def _walk(
    root: Path, path: str, limit_name: str, usage_name: str, cache_names: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """The group at `path` and its parents up to `root`. A container may see its own group as the root."""
    folder = root / path.lstrip("/")
    while folder == root or root in folder.parents:
        try:
            limit_text = (folder / limit_name).read_text().strip()
            if limit_text != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cache = sum(int(stat.get(name, 0)) for name in cache_names)
                yield int(limit_text), int((folder / usage_name).read_text()) - cache
        except OSError:
            pass
        folder = folder.parent
