"""How long copies between the device and the host tier take: `python -m benchmarks.copy_speed`.

4,096 tokens of the default model in float32 (30 layers, 46,080 bytes a token, pages of 16), so 256 pages and 189 MB a
transfer, through the mover, with one and two copy threads, with and without checksums, between scattered pages and
between runs of neighbours. Both tiers are on the CPU and their memory has been touched before. Medians in milliseconds,
with the least and the greatest.
"""

from __future__ import annotations

import queue
import statistics
import time
from random import Random
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from engine.distributed.memory import host_memory
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.pool.host import HostKVCache, pageable_memory
from engine.mem_cache.pool.mover import Mover
from engine.types import Transfer, TransferResult

LAYERS, RECORD, PAGE_SIZE = 30, (2, 3, 64), 16
POOL_PAGES, COPIED_PAGES, ROUNDS = 600, 256, 9


class Tiers:
    """Two pools of equal size, filled, and a backup of every page so that each has a checksum."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        self.device = DeviceKVPool(LAYERS, POOL_PAGES, PAGE_SIZE, RECORD, torch.float32, cpu).allocate()
        self.device.records.normal_()
        self.host = HostKVCache(
            self.device, 1.0, 0.0, PAGE_SIZE, allocator=pageable_memory, memory_probe=host_memory
        )
        self.host.allocate()
        self.times(1, checksums=True, kind="backup", scattered=False, pages=POOL_PAGES, rounds=1)

    def times(
        self,
        threads: int,
        *,
        checksums: bool,
        kind: Literal["backup", "load"],
        scattered: bool,
        pages: int = COPIED_PAGES,
        rounds: int = ROUNDS,
    ) -> list[float]:
        """Milliseconds of several transfers, one after the other."""
        results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        mover = Mover(self.device, self.host, report=results.put, checksums=checksums, threads=threads)
        draw, times = Random(0), []
        for number in range(rounds):
            tables = [
                draw.sample(range(POOL_PAGES), pages) if scattered else range(POOL_PAGES - pages, POOL_PAGES)
                for _ in range(2)
            ]
            began = time.perf_counter()
            mover.submit(Transfer(number, kind, tuple(tables[0]), tuple(tables[1])))
            assert results.get().ok
            times.append((time.perf_counter() - began) * 1e3)
        mover.close()
        return times


def main() -> None:
    """Measure and print."""
    tiers = Tiers()
    table = Table(title=f"{COPIED_PAGES} pages of {PAGE_SIZE} tokens, 46,080 bytes a token; ms")
    for heading in ("copy", "pages", "threads", "with crc32", "without"):
        table.add_column(heading, justify="left" if heading in ("copy", "pages") else "right")
    kinds: tuple[Literal["backup", "load"], ...] = ("backup", "load")
    for kind in kinds:
        for scattered in (False, True):
            for threads in (1, 2):
                cells = []
                for checksums in (True, False):
                    times = tiers.times(threads, checksums=checksums, kind=kind, scattered=scattered)
                    cells.append(f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})")
                table.add_row(kind, "scattered" if scattered else "neighbours", str(threads), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
