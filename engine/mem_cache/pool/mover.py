"""Copies of pages between the device and the host tier, beside the compute thread.

Takes `Transfer`s, copies exactly the pages that they name, and reports each transfer once, by its id. It decides
nothing: which pages, when, and what a result means are the scheduler's business, on every rank alike. A transfer of
which anything failed (a checksum, an exception) is reported as failed, and the next one is taken; the pages of a
failed load may hold anything. Transfers end in any order.

    compute thread:   loads of plan n, compute of step n, backups of plan n
                            |                                |
    copy threads:           parts (runs of a transfer's pages) from one queue; the last part of a transfer reports it

On the CPU a transfer is submitted when all compute before it has ended. On CUDA it has only been queued, so a transfer
carries an event that was recorded at its place in the order of compute, for which the copies wait on their own stream.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine import faults
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.pool.host import HostKVCache
from engine.types import Transfer, TransferResult

PART_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""About what a thread copies in one go. On the CPU a page is checked while it is still in the core's own cache; on
CUDA it takes more to be worth an event."""

log = logging.getLogger(__name__)


class Mover:
    """The copy threads of one rank."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_pool: HostKVCache,
        *,
        report: Callable[[TransferResult], None],
        checksums: bool = True,
        threads: int = 2,
        fault: faults.Copy | None = None,
    ) -> None:
        """Start the threads. Both pools have their memory; `report` is called on a copy thread."""
        self._device, self._store = device_pool.device, host_pool.store
        self._report, self._checksums, self._fault = report, checksums, fault
        self._page_bytes = host_pool.page_size * host_pool.bytes_per_token
        self._part_pages = max(PART_BYTES[device_pool.device.type] // max(self._page_bytes, 1), 1)
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._submitted = {"backup": 0, "load": 0}
        self._bytes_moved = {"backup": 0, "load": 0}
        self._lock = threading.Lock()  # guards jobs and the counter of bytes
        # Daemons: a copy must not keep a process that ends.
        self._threads = [
            threading.Thread(
                target=self._run, args=(_lane(device_pool, host_pool),), name=f"copy-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer. Called on the compute thread, at the transfer's place in the order of its work."""
        pages = list(zip(transfer.device_pages, transfer.host_pages, strict=True))
        size = self._part_pages
        runs = [pages[start : start + size] for start in range(0, len(pages), size)] or [[]]
        job = _Job(transfer, self._fence(), len(runs), *self._planned_faults(transfer))
        for run in runs:
            self._parts.put(_Part(job, run))

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes copied since the start, by kind of transfer."""
        with self._lock:
            return dict(self._bytes_moved)

    def close(self) -> None:
        """End the threads after the transfers that are queued, and wait for them."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    # ---- the copy threads ----

    def _run(self, lane: _Lane) -> None:
        with torch.inference_mode():
            while (part := self._parts.get()) is not None:
                self._copy(part, lane)

    def _copy(self, part: _Part, lane: _Lane) -> None:
        """Copy one part, and report its transfer if no other part is left. Nothing that fails ends the thread."""
        job, done = part.job, _Progress()
        problem = None
        try:
            if job.problem is None:
                self._copy_pages(part, lane, done)
        except Exception as error:
            problem = f"at host page {done.host_page}: {str(error) or type(error).__name__}"
        with self._lock:
            self._bytes_moved[job.transfer.kind] += done.pages * self._page_bytes
            first = problem is not None and job.problem is None
            job.problem = job.problem or problem
            job.parts_left -= 1
            ended = job.parts_left == 0
        if first:
            log.warning("%s %d failed %s", job.transfer.kind, job.transfer.transfer_id, problem)
        if ended:
            self._report(TransferResult(transfer_id=job.transfer.transfer_id, ok=job.problem is None))

    def _copy_pages(self, part: _Part, lane: _Lane, done: _Progress) -> None:
        job, backup = part.job, part.job.transfer.kind == "backup"
        lane.begin(job.fence)
        try:
            for device_page, host_page in part.pages:
                done.host_page = host_page
                self._suffer(job, host_page)
                if backup:
                    lane.backup(device_page, host_page)
                else:
                    if self._checksums:
                        self._store.check(host_page)
                    lane.load(host_page, device_page)
                done.pages += 1
        finally:
            # Even after a failure: nothing may be under way when the transfer is reported and its pages change hands.
            lane.finish()
        if backup and self._checksums:
            for _, host_page in part.pages:
                self._store.seal(host_page)
        if job.damages and done.host_page == job.transfer.host_pages[-1]:
            self._store.rows[done.host_page][-1:] ^= 1

    # ---- what transfers wait for, and what tests make them suffer ----

    def _fence(self) -> torch.cuda.Event | None:
        """A mark behind all that this thread has queued on the device so far."""
        if self._device.type != "cuda":
            return None
        fence = _event()
        fence.record(torch.cuda.current_stream(self._device))
        return fence

    def _planned_faults(self, transfer: Transfer) -> tuple[bool, bool]:
        """Whether this transfer is to fail, and whether it is to leave damage."""
        self._submitted[transfer.kind] += 1
        if self._fault is None:
            return False, False
        fails = _is_due(sum(self._submitted.values()), self._fault.fail_every)
        damages = transfer.kind == "backup" and _is_due(self._submitted["backup"], self._fault.damage_every)
        return fails, damages

    def _suffer(self, job: _Job, host_page: int) -> None:
        """Be slow, or fail on the last page, with the others copied."""
        if self._fault is not None:
            time.sleep(self._fault.seconds)
            if job.fails and host_page == job.transfer.host_pages[-1]:
                raise RuntimeError("a fault on purpose")


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


@dataclass(slots=True)
class _Job:
    """A transfer under way."""

    transfer: Transfer
    fence: torch.cuda.Event | None
    parts_left: int
    fails: bool
    damages: bool
    problem: str | None = None
    """The first thing that went wrong."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some pages of a transfer, (device page, host page) each."""

    job: _Job
    pages: list[tuple[int, int]]


@dataclass(slots=True)
class _Progress:
    """How far a part is."""

    host_page: int | None = None
    pages: int = 0


class _Lane(Protocol):
    """How one thread copies: pages in any number between `begin` and `finish`, which waits until all are copied."""

    def begin(self, fence: torch.cuda.Event | None) -> None:
        """What comes next is copied after all that the fence stands behind."""

    def backup(self, device_page: int, host_page: int) -> None:
        """Start copying a page to the host."""

    def load(self, host_page: int, device_page: int) -> None:
        """Start copying a page to the device."""

    def finish(self) -> None:
        """Wait for the copies."""


def _lane(device_pool: DeviceKVPool, host_pool: HostKVCache) -> _Lane:
    return (_CudaLane if device_pool.device.type == "cuda" else _CpuLane)(device_pool, host_pool)


class _CpuLane:
    """Plain copies by numpy, which lets other threads run meanwhile and, unlike torch, starts none of its own."""

    def __init__(self, device_pool: DeviceKVPool, host_pool: HostKVCache) -> None:
        device = device_pool.paged.view(torch.uint8)
        self._device = device.numpy()
        self._host = host_pool.store.rows.reshape(host_pool.pages, device_pool.layer_count, device.shape[2])

    def begin(self, fence: torch.cuda.Event | None) -> None:
        pass

    def backup(self, device_page: int, host_page: int) -> None:
        np.copyto(self._host[host_page], self._device[:, device_page])

    def load(self, host_page: int, device_page: int) -> None:
        np.copyto(self._device[:, device_page], self._host[host_page])

    def finish(self) -> None:
        pass


class _CudaLane:
    """Copies between pinned memory and the device on a stream of this thread's own."""

    def __init__(self, device_pool: DeviceKVPool, host_pool: HostKVCache) -> None:
        self._device = device_pool.paged
        shape = host_pool.pages, device_pool.layer_count, self._device.shape[2]
        self._host = host_pool.store.bytes.view(device_pool.dtype).view(shape)
        make_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make_stream(device_pool.device)

    def begin(self, fence: torch.cuda.Event | None) -> None:
        assert fence is not None, "a transfer on CUDA carries an event"
        self._stream.wait_event(fence)

    def backup(self, device_page: int, host_page: int) -> None:
        # torch gathers the layers of the page on the device first, so what crosses the bus is one piece.
        with torch.cuda.stream(self._stream):
            self._host[host_page].copy_(self._device[:, device_page], non_blocking=True)

    def load(self, host_page: int, device_page: int) -> None:
        with torch.cuda.stream(self._stream):
            self._device[:, device_page].copy_(self._host[host_page], non_blocking=True)

    def finish(self) -> None:
        event = _event()
        event.record(self._stream)
        event.synchronize()


def _event() -> torch.cuda.Event:
    """An event; a thread that waits for it leaves its core to others."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(blocking=True)
