"""The bytes of the host tier (L2): how many pages every stage has, and the memory that holds them.

Counts are agreed, bytes are local. A pool settles its count once, in its constructor, and takes memory only in
`allocate`, when all ranks know that all of it fits. A fixed size in GB is another number of tokens on each stage,
since stages own different layers, so it goes through a MIN over the PP group (`sync_fixed_hicache_size`); a ratio of
the agreed device size is agreed already. Every rank that calls a constructor calls this collective, layers or not.

    bytes [page][layer][token of the page][record]        one page is one run of memory, so that its checksum is one
                                                          call and it can go to a file or a wire as it is

Which page belongs to whom is said by the books, never here, and nothing here is read or written by the step loop: the
mover does that, on its own threads.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine.distributed.memory import HostMemory
from engine.distributed.parallel_state import get_pp_group
from engine.mem_cache.pool.device import DeviceKVPool, DeviceStatePool
from engine.mem_cache.sizing import NO_CONSTRAINT, gigabytes, host_pages, host_tokens

Allocator = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes the tensor that holds a host pool, not initialised. Raises RuntimeError when it cannot."""
MemoryProbe = Callable[[], HostMemory]
Agree = Callable[[int, float], int]
"""From this rank's own count and the fixed size in GB to the count of all stages."""

log = logging.getLogger(__name__)


def sync_fixed_hicache_size(size: int, host_size: float) -> int:
    """The smallest `size`, in tokens or slots, of all stages, when it comes from a fixed `host_size` in GB.

    Returns `size` as it is when it comes from a ratio (`host_size` <= 0) or when there is no other stage. The MIN is
    taken over this rank's PP group: TP peers of a stage have the same number anyway. A collective: every stage calls
    it, in the same order. Raises RuntimeError when a stage does not come.
    """
    if host_size <= 0:
        return size
    if not dist.is_available():
        return size
    if not dist.is_initialized():
        return size
    try:
        group = get_pp_group()
    except AssertionError:
        return size
    if group.world_size <= 1:
        return size
    agreed = torch.tensor([size], dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group.cpu_group)
    least = int(agreed.item())
    if least < size:
        log.info("host pool: room for %d here, but only %d on another stage; all take that", size, least)
    return least


def pageable_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Plain memory, for a device tier on the CPU. Untouched, it costs neither time nor room."""
    return torch.empty(shape, dtype=dtype)


def pinned_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that CUDA copies to and from beside its compute. Raises RuntimeError when it cannot be pinned.

    Registered as it is, since torch's own allocator of pinned memory may round a size up to a power of two. It stays
    pinned until the process ends.
    """
    memory = torch.empty(shape, dtype=dtype)
    if memory.nbytes:
        runtime: Callable[[], Any] = torch.cuda.cudart
        code = int(runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code != 0:
            raise RuntimeError(
                f"{memory.nbytes / 1e9:.2f} GB of host memory cannot be pinned: CUDA error {code}"
            )
    return memory


class HostPool:
    """Host pages of one kind: a count, settled with all other stages when it is made, and memory, taken later.

    Sized by the one rule for every kind, in whole pages of `page_size` tokens (or slots).
    """

    def __init__(
        self,
        what: str,
        device_size: int,
        bytes_each: int,
        host_to_device_ratio: float,
        host_size: float | Decimal,
        page_size: int,
        *,
        allocator: Allocator,
        memory_probe: MemoryProbe,
        agree: Agree,
    ) -> None:
        """`bytes_each` is the price of a token or slot on this rank, 0 on one without layers of the kind."""
        self.page_size = page_size
        self._bytes_each = bytes_each
        self._allocator, self._memory_probe = allocator, memory_probe
        self._store: HostStore | None = None
        # A size of less than one byte is a fixed size all the same: it must not turn into a ratio on one rank.
        budget = max(gigabytes(host_size), 1) if host_size > 0 else 0
        local = host_tokens(device_size, host_to_device_ratio, budget, bytes_each)
        agreed = agree(local, float(host_size))
        if agreed == NO_CONSTRAINT:
            # No stage pays anything, so any count will do.
            agreed = host_tokens(device_size, host_to_device_ratio, 0, bytes_each)
        self.size = host_pages(agreed, page_size) * page_size
        """Tokens (or slots) of every stage."""
        self.local_size = min(host_pages(local, page_size) * page_size, NO_CONSTRAINT)
        """The same by this rank's own budget and price; `NO_CONSTRAINT` where neither sets a limit."""
        if agreed <= device_size:
            log.warning("%s: %d add little to the %d on the device", what, self.size, device_size)

    @property
    def pages(self) -> int:
        """Pages of `page_size` tokens (or slots)."""
        return self.size // self.page_size

    @property
    def byte_count(self) -> int:
        """Bytes of all pages, allocated or not."""
        return self.size * self._bytes_each

    def allocate(self) -> None:
        """Take the memory, once. Raises ValueError or RuntimeError, in one line, when the machine does not have it."""
        assert self._store is None, "the host pool has its memory already"
        bytes_of_a_page = self.page_size * self._bytes_each
        self._store = HostStore(self.pages, bytes_of_a_page, self._allocator, self._memory_probe)

    @property
    def store(self) -> HostStore:
        """The memory."""
        assert self._store is not None, "the host pool has no memory yet"
        return self._store


class HostKVCache(HostPool):
    """Host pages of the records that a `DeviceKVPool` keeps, MHA/GQA and MLA alike."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_to_device_ratio: float,
        host_size: float | Decimal,
        page_size: int,
        *,
        allocator: Allocator,
        memory_probe: MemoryProbe,
        agree: Agree = sync_fixed_hicache_size,
    ) -> None:
        """Settle the count, together with all other stages. `host_size` is in GB; 0 means by ratio."""
        assert page_size == device_pool.page_size, f"pages of {page_size} and {device_pool.page_size} tokens"
        self.device_pool = device_pool
        self.bytes_per_token = device_pool.bytes_per_token
        super().__init__(
            "host KV pool, tokens",
            device_pool.size,
            self.bytes_per_token,
            host_to_device_ratio,
            host_size,
            page_size,
            allocator=allocator,
            memory_probe=memory_probe,
            agree=agree,
        )


class MambaPoolHost(HostPool):
    """Host slots of the recurrent states that a `DeviceStatePool` keeps: a page is one slot."""

    def __init__(
        self,
        device_pool: DeviceStatePool,
        host_to_device_ratio: float,
        host_size: float | Decimal,
        *,
        allocator: Allocator,
        memory_probe: MemoryProbe,
        agree: Agree = sync_fixed_hicache_size,
    ) -> None:
        """Settle the count, together with all other stages. A slot is priced by the layers of this stage."""
        self.device_pool = device_pool
        self.bytes_per_slot = device_pool.bytes_per_slot
        super().__init__(
            "host state pool, slots",
            device_pool.size,
            self.bytes_per_slot,
            host_to_device_ratio,
            host_size,
            1,
            allocator=allocator,
            memory_probe=memory_probe,
            agree=agree,
        )


class HostStore:
    """The memory of a host pool: pages (or slots) of equal size, each with the checksum that it had when written."""

    def __init__(self, pages: int, bytes_each: int, allocator: Allocator, memory_probe: MemoryProbe) -> None:
        """Allocate. Raises ValueError when the machine no longer has so much.

        Whether it leaves a reserve was checked before anything was allocated, over all ranks; they take their memory
        at their own pace, so asking for a reserve again would refuse, by chance of timing, what fits.
        """
        needed, available = pages * bytes_each, memory_probe().available
        if needed > available:
            raise ValueError(
                f"host pool of {needed:,} bytes: the machine has only {available:,} available now"
            )
        self.bytes = allocator((pages, bytes_each), torch.uint8)
        self._checksums = np.zeros(pages, np.uint32)

    @cached_property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The same memory, [pages, bytes of a page]."""
        rows: npt.NDArray[np.uint8] = self.bytes.numpy()
        return rows

    def seal(self, page: int) -> None:
        """Remember the checksum of a page that has been written."""
        self._checksums[page] = zlib.crc32(self.rows[page])

    def check(self, page: int) -> None:
        """Raise ValueError unless a page is as it was when it was sealed."""
        found, sealed = zlib.crc32(self.rows[page]), int(self._checksums[page])
        if found != sealed:
            raise ValueError(f"its checksum is {found:08x}, and was {sealed:08x} when it was written")
