"""How a rank comes to life: handshake, sizes, votes, weights, pools, warm-up. Rule 4 of the design, in one place.

Runs once, on the rank's compute thread, while its control thread keeps the links alive. Every rank walks through the
same phases in the same order; each phase ends in agreement or ends all ranks with the same line. Memory is measured
before the first of them ends and all sizes are settled before anything is loaded, so that no rank sees what another
has taken already. What comes out is agreed (`Capacity`) or local (weights, pool, bytes), and the pure half is built
from the agreed part alone.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

import engine
from engine.config import EngineConfig, flag_name
from engine.distributed import parallel_state
from engine.distributed.agreement import TIMEOUT_S, Agreement
from engine.distributed.frames import BODY_BYTES_MAX
from engine.distributed.launch import Place
from engine.distributed.memory import HostMemory, host_memory
from engine.distributed.pipe import HEAD
from engine.faults import Faults
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.pool.host import HostKVCache
from engine.mem_cache.sizing import attention_bytes_per_token, default_running_requests, tokens_for_budget
from engine.memory_plan import (
    budget_problem,
    memory_problem,
    pool_budget,
    ranks_per_device,
    size_host_pool,
    tell_host_flags,
)
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.readout import read_out
from engine.model.source import ModelSource
from engine.model.weights import StageWeights, load_weights, parameter_count, resolve_dtype
from engine.topology import Topology
from engine.types import Capacity, Sample, SamplingParams, Span, StageSize

LOCAL_FIELDS = ("host", "port", "api_key", "link_address", "log_level", "threads_per_rank", "model_path")
"""Flags that may differ between ranks: they belong to one process or machine. The model is compared by content."""
WARM_UP_ROWS = 32
LOADING_S = 3600.0
"""How much longer the slowest rank may read weights than the fastest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that can serve."""

    capacity: Capacity
    decoder: Decoder
    pool: DeviceKVPool
    host_pool: HostKVCache | None
    host_checksums: bool
    """Host pages are verified when they are loaded back."""
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    threads: int
    """CPU threads that this rank computes with."""
    sizes: tuple[StageSize, ...]
    """The start-up table, one line per rank, the same on every rank."""


class Startup:
    """One rank's way through the phases, which `run` lists in their order."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        topology: Topology,
        place: Place,
        agreement: Agreement,
        faults: Faults,
    ) -> None:
        self._config = config
        self._source = source
        self._topology = topology
        self._place = place
        self._agreement = agreement
        self._faults = faults
        self._device = _device(config, place)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._cache_dtype = self._dtype
        if config.kv_cache_dtype != "auto":
            self._cache_dtype = resolve_dtype(config.kv_cache_dtype, self._device)
        self._bytes_per_token = attention_bytes_per_token(
            source.spec, len(topology.layers), tp_size=topology.tp_size, dtype=_name(self._cache_dtype)
        )
        self._weight_bytes = parameter_count(source.spec, topology.layers) * self._dtype.itemsize

    def run(self) -> Started:
        """Agree, load and allocate. Raises Refused or RankLost, with the same line on every rank."""
        agreement, config, source, topology = self._agreement, self._config, self._source, self._topology
        agreement.vote("device", device_problem(config.device, torch.cuda.device_count()))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # Nobody passes the handshake, and so nobody loads, before every rank has come to it with its measurement.
        memory = self._machine_memory()
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else memory.available
        agreement.must_equal("handshake", self._must_equal())

        pool, local_tokens = self._size_pool(self._budget(free))
        if topology.is_leader:
            tell_host_flags(config)
        with _voting(agreement, "host capacity", parallel_state.TIMEOUT_S + TIMEOUT_S):
            host_pool = size_host_pool(config, pool, self._machine_memory)
        self._check_memory(pool, host_pool, memory)
        capacity = _capacity(config, source, topology, pool, host_pool)
        agreement.must_equal("capacity", _agreed_fields(capacity, config))
        agreement.vote("frames", frame_problem(capacity, source.spec.hidden_size, self._dtype))

        with _voting(agreement, "weights", LOADING_S):
            log.info("weights: %.2f GB to load", self._weight_bytes / 1e9)
            weights = self._load()
        with _voting(agreement, "pools", LOADING_S):
            log.info("pools: %d tokens, %.2f GB", pool.size, pool.byte_count / 1e9)
            pool.allocate()
            if host_pool is not None:
                log.info("host pool: %d tokens, %.2f GB", host_pool.size, host_pool.byte_count / 1e9)
                host_pool.allocate()
        decoder = Decoder(source.spec, weights)
        with _voting(agreement, "warm-up", LOADING_S):
            log.info("warm-up: a first prefill and a first decode")
            _warm_up(decoder, pool, capacity, topology, self._dtype, self._device)

        size = self._size(weights, pool, local_tokens, host_pool, memory)
        table = agreement.gather("table", msgspec.to_builtins(size))
        return Started(
            capacity=capacity,
            decoder=decoder,
            pool=pool,
            host_pool=host_pool,
            host_checksums=not config.disable_hicache_checksum,
            dtype=self._dtype,
            cache_dtype=self._cache_dtype,
            device=self._device,
            threads=torch.get_num_threads(),
            sizes=tuple(msgspec.convert(row, StageSize) for row in table),
        )

    def _must_equal(self) -> dict[str, Any]:
        """What may not differ between ranks, by the name an operator knows."""
        flags = {
            flag_name(item.name): getattr(self._config, item.name)
            for item in dataclasses.fields(self._config)
            if item.name not in LOCAL_FIELDS
        }
        return {
            "version of Lockstep": engine.__version__,
            "version of torch": str(torch.__version__),
            **flags,
            "model (configuration and tensor headers)": self._source.fingerprint,
            "kind of device": self._device.type,
            "resolved dtype": _name(self._dtype),
            "resolved KV cache dtype": _name(self._cache_dtype),
            "layers of the stages": self._topology.layer_ranges,
            "steps in flight": self._topology.pp_size,
            "byte order": sys.byteorder,
        }

    def _load(self) -> StageWeights:
        topology, fault = self._topology, self._faults.load
        if fault is not None and fault.rank == topology.rank:
            log.warning("a fault on purpose: weights take %g s longer", fault.seconds)
            time.sleep(fault.seconds)
        return load_weights(
            self._source,
            topology.layers,
            dtype=self._dtype,
            device=self._device,
            stage=topology.tag,
            progress=_Progress("weights"),
            seed=self._config.random_seed or 0,
        )

    def _machine_memory(self) -> HostMemory:
        fault = self._faults.host_memory
        return host_memory() if fault is None else HostMemory(fault.total, fault.available)

    def _budget(self, free: int) -> int:
        """Bytes that this rank may take for its pool, of the `free` ones of its device."""
        fault = self._faults.memory
        if fault is not None and fault.rank == self._topology.rank:
            return fault.bytes
        sharing = ranks_per_device(self._place.local_world_size, self._device.type, torch.cuda.device_count())
        return pool_budget(
            self._config.mem_fraction_static, self._device.type, free, self._weight_bytes, sharing
        )

    def _size_pool(self, budget: int) -> tuple[DeviceKVPool, int]:
        """The device pool, sized by what every rank can hold, and the tokens that this one could hold by itself.

        These come from its budget, and are at most what --max-total-tokens says.
        """
        config, spec, price = self._config, self._source.spec, self._bytes_per_token
        local_tokens = tokens_for_budget(budget, price, config.page_size)
        if config.max_total_tokens is not None:
            local_tokens = min(local_tokens, config.max_total_tokens // config.page_size * config.page_size)
        problem = budget_problem(local_tokens, budget, price, config.page_size)
        self._agreement.vote("budget", problem)
        tokens = self._agreement.minimum("device capacity", local_tokens)
        pool = DeviceKVPool(
            len(self._topology.layers),
            tokens // config.page_size,
            config.page_size,
            (2, max(spec.kv_heads // self._topology.tp_size, 1), spec.head_dim),
            self._cache_dtype,
            self._device,
        )
        assert pool.bytes_per_token == price, (
            f"a token takes {pool.bytes_per_token} bytes, priced were {price}"
        )
        return pool, local_tokens

    def _check_memory(self, pool: DeviceKVPool, host_pool: HostKVCache | None, memory: HostMemory) -> None:
        """One check per machine over all its ranks, by every rank on the same numbers. Raises Refused."""
        on_machine = self._weight_bytes + pool.byte_count if self._device.type == "cpu" else 0
        on_host_tier = 0 if host_pool is None else host_pool.byte_count
        row = (socket.gethostname(), on_machine, on_host_tier, memory.total, memory.available)
        rows = self._agreement.gather("memory", row)
        self._agreement.vote("memory verdict", memory_problem(rows))

    def _size(
        self,
        weights: StageWeights,
        pool: DeviceKVPool,
        local_tokens: int,
        host_pool: HostKVCache | None,
        memory: HostMemory,
    ) -> StageSize:
        """This rank's line of the start-up table."""
        topology = self._topology
        return StageSize(
            rank=topology.rank,
            pp_rank=topology.pp_rank,
            tp_rank=topology.tp_rank,
            host_name=socket.gethostname(),
            layers=(topology.layers.start, topology.layers.stop),
            weight_bytes=weights.byte_count,
            bytes_per_token=self._bytes_per_token,
            local_tokens=local_tokens,
            agreed_tokens=pool.size,
            pool_bytes=pool.byte_count,
            host_local_tokens=host_pool.local_size if host_pool else 0,
            host_tokens=host_pool.size if host_pool else 0,
            host_pool_bytes=host_pool.byte_count if host_pool else 0,
            machine_available_bytes=memory.available,
        )


def _device(config: EngineConfig, place: Place) -> torch.device:
    """The rank's device. Without any CUDA device it is the CPU, whatever was asked: `device_problem` refuses that."""
    count = torch.cuda.device_count()
    if config.device == "cpu" or count == 0:
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % count)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_problem(asked: str, cuda_devices: int) -> str | None:
    """One line when --device asks for what this machine does not have."""
    if asked == "cuda" and cuda_devices == 0:
        return "--device cuda: torch finds no CUDA device on this machine; allowed is cpu or auto"
    return None


def frame_problem(capacity: Capacity, hidden_size: int, dtype: torch.dtype) -> str | None:
    """One line when the hidden states of the largest step do not fit into one frame between two stages."""
    beside_chunk = capacity.page_size + capacity.max_running_requests
    rows_max = (BODY_BYTES_MAX - HEAD.size) // (hidden_size * dtype.itemsize)
    if capacity.depth == 1 or capacity.chunk_tokens + beside_chunk <= rows_max:
        return None
    return (
        f"--chunked-prefill-size {capacity.chunk_tokens}: hidden states of a step of "
        f"{capacity.chunk_tokens} + {beside_chunk} rows exceed the {BODY_BYTES_MAX} bytes that stages send at once; "
        f"allowed is at most {rows_max - beside_chunk}"
    )


def _capacity(
    config: EngineConfig,
    source: ModelSource,
    topology: Topology,
    pool: DeviceKVPool,
    host_pool: HostKVCache | None,
) -> Capacity:
    context = config.context_length or source.spec.context_length
    assert context <= source.spec.context_length, f"{context} > {source.spec.context_length}: see check_model"
    chunk = config.chunked_prefill_size
    if chunk is None:
        chunk = max(4096 if pool.device.type == "cuda" else 512, config.page_size)
    return Capacity(
        page_size=config.page_size,
        device_pages=pool.pages,
        max_running_requests=config.max_running_requests or default_running_requests(pool.size),
        chunk_tokens=context if chunk == -1 else chunk,
        depth=topology.pp_size,
        context_length=context,
        host_pages=host_pool.pages if host_pool else 0,
        write_policy=config.hicache_write_policy,
    )


def _agreed_fields(capacity: Capacity, config: EngineConfig) -> dict[str, Any]:
    """What of the capacity is compared: all of it, unless somebody wants to see what comes of it otherwise."""
    fields = dataclasses.asdict(capacity)
    host_pages = fields.pop("host_pages")
    if not config.debug_unagreed_hicache:
        fields["host pages (--hicache-size, --hicache-ratio)"] = host_pages
    return fields


def _warm_up(
    decoder: Decoder,
    pool: DeviceKVPool,
    capacity: Capacity,
    topology: Topology,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run this stage's layers on made-up rows, a prefill and a decode, so that the first request does not pay for it.

    The rows write into the first pages, which nobody owns yet and whoever gets them overwrites.
    """
    rows = min(WARM_UP_ROWS, capacity.device_pages * capacity.page_size, capacity.context_length)
    pages = tuple(range(-(-rows // capacity.page_size)))
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    choice = Sample(params=params, position=rows, random=0, banned_ids=(), prompt_ids=(), output_ids=())
    for start, stop in ((0, rows - 1), (rows - 1, rows)):
        if start == stop:
            continue
        span = Span(request_id=0, start=start, token_ids=(0,) * (stop - start), pages=pages, sample=choice)
        batch = Batch.build((span,), capacity.page_size, device, dtype)
        hidden = None
        if not topology.is_first_stage:
            hidden = torch.zeros(stop - start, decoder.spec.hidden_size, dtype=dtype, device=device)
        hidden = decoder.forward(batch, hidden, pool)
        if topology.is_last_stage:
            read_out(decoder, batch, hidden)


@contextmanager
def _voting(agreement: Agreement, phase: str, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Do local work that may fail; a failure on one rank is a failure of all, and named."""
    problem: str | None = None
    try:
        yield
    # torch reports a lack of memory as RuntimeError.
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        problem = f"{phase}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    agreement.vote(phase, problem, timeout_s=timeout_s)


class _Progress:
    """Logs how far a long piece of work is, at most once a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= 1.0:
            self._logged_at = now
            log.info("%s: %d of %d million numbers read", self._what, done // 10**6, total // 10**6)
