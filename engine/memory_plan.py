"""How much memory each pool of a rank may take, and whether all of it fits its machine. Settled before any is taken.

Arithmetic on measured numbers, and the host pool that follows from the device pool. What ranks agree about it, and in
which order, is said in `startup`. Nothing here allocates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.distributed.memory import HostMemory, MemoryNeed, check_memory
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.pool.host import (
    HostKVCache,
    MemoryProbe,
    pageable_memory,
    pinned_memory,
    sync_fixed_hicache_size,
)

CPU_BUDGET_BYTES = 4 * 10**9
CUDA_FRACTION = 0.85

log = logging.getLogger(__name__)


def ranks_per_device(local_ranks: int, device_type: str, cuda_devices: int) -> int:
    """How many ranks share the memory of one device: on the CPU all of the machine."""
    return -(-local_ranks // cuda_devices) if device_type == "cuda" else local_ranks


def pool_budget(fraction: float | None, device_type: str, free: int, weight_bytes: int, sharing: int) -> int:
    """Bytes one rank may take for its device pool, of `free` ones before loading that `sharing` ranks share.

    A share of what is free (--mem-fraction-static, on CUDA 0.85 unless given) is for weights and pools together. On the
    CPU, when no share is given, pools take 4 GB or a quarter of what is free, the smaller.
    """
    if fraction is None and device_type == "cpu":
        return min(CPU_BUDGET_BYTES, free // 4) // sharing
    return max(int(free * (fraction or CUDA_FRACTION)) // sharing - weight_bytes, 0)


def budget_problem(local_tokens: int, budget: int, bytes_per_token: int, page_size: int) -> str | None:
    """One line when a rank's budget holds not even one page."""
    if local_tokens >= page_size:
        return None
    return (
        f"--mem-fraction-static, --page-size: {budget} bytes for the device cache hold no page of {page_size} "
        f"tokens at {bytes_per_token} bytes each"
    )


def size_host_pool(
    config: EngineConfig, device_pool: DeviceKVPool, memory_probe: MemoryProbe
) -> HostKVCache | None:
    """The host pool that the flags ask for, sized together with all other stages; None without a host tier."""
    if not config.enable_hierarchical_cache:
        return None
    return HostKVCache(
        device_pool,
        config.hicache_ratio,
        config.hicache_size,
        config.page_size,
        allocator=pinned_memory if device_pool.device.type == "cuda" else pageable_memory,
        memory_probe=memory_probe,
        agree=_keep_own if config.debug_unagreed_hicache else sync_fixed_hicache_size,
    )


def tell_host_flags(config: EngineConfig) -> None:
    """Log what an operator should know about the flags of the host tier."""
    if config.debug_unagreed_hicache:
        log.warning(
            "--debug-unagreed-hicache: stages keep their own host capacity, and will part sooner or later"
        )
    if config.hicache_size > 0 and config.hicache_ratio != EngineConfig().hicache_ratio:
        log.info(
            "--hicache-size %g wins; --hicache-ratio %g is not used",
            config.hicache_size,
            config.hicache_ratio,
        )


def memory_problem(rows: Sequence[Sequence[Any]]) -> str | None:
    """One line when the ranks of a machine need more than it has.

    `rows` by rank: host name, bytes of weights and device pool, bytes of the host pool, total, available. A machine is
    as small as any of its ranks has seen it.
    """
    needs = [MemoryNeed(row[0], rank, row[1] + row[2], row[2]) for rank, row in enumerate(rows)]
    by_host: dict[str, HostMemory] = {}
    for host_name, _, _, total, available in rows:
        seen = by_host.get(host_name, HostMemory(total, available))
        by_host[host_name] = HostMemory(min(seen.total, total), min(seen.available, available))
    return check_memory(needs, by_host)


def _keep_own(size: int, _: float) -> int:
    """What --debug-unagreed-hicache puts in the place of the agreement."""
    return size
