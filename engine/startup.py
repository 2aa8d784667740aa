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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

import engine
from engine.config import EngineConfig, flag_name
from engine.distributed.agreement import Agreement
from engine.distributed.frames import BODY_BYTES_MAX
from engine.distributed.launch import Place
from engine.distributed.memory import HostMemory, MemoryNeed, check_memory, host_memory
from engine.distributed.pipe import HEAD
from engine.faults import Faults
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.sizing import attention_bytes_per_token, default_running_requests, tokens_for_budget
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
CPU_BUDGET_BYTES = 4 * 10**9
CUDA_FRACTION = 0.85
LOADING_S = 3600.0
"""How much longer the slowest rank may read weights than the fastest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A rank that can serve."""

    capacity: Capacity
    decoder: Decoder
    pool: DeviceKVPool
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
        memory = host_memory()
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else memory.available
        agreement.must_equal("handshake", self._must_equal())

        budget = self._budget(free)
        local_tokens = self._local_tokens(budget)
        agreement.vote("budget", _budget_problem(local_tokens, budget, self._bytes_per_token, config))
        tokens = agreement.minimum("device capacity", local_tokens)
        if self._device.type == "cpu":
            need = self._weight_bytes + tokens * self._bytes_per_token
            rows = agreement.gather("memory", (socket.gethostname(), need, memory.total, memory.available))
            agreement.vote("memory verdict", memory_problem(rows))
        capacity = _capacity(config, source, topology, self._device, tokens)
        agreement.must_equal("capacity", dataclasses.asdict(capacity))
        agreement.vote("frames", frame_problem(capacity, source.spec.hidden_size, self._dtype))

        with _voting(agreement, "weights", LOADING_S):
            log.info("weights: %.2f GB to load", self._weight_bytes / 1e9)
            weights = self._load()
        with _voting(agreement, "pools"):
            log.info("pools: %d tokens, %.2f GB", tokens, tokens * self._bytes_per_token / 1e9)
            pool = self._allocate(tokens)
        decoder = Decoder(source.spec, weights)
        with _voting(agreement, "warm-up", LOADING_S):
            log.info("warm-up: a first prefill and a first decode")
            _warm_up(decoder, pool, capacity, topology, self._dtype, self._device)

        size = self._size(weights, pool, local_tokens, tokens, memory)
        table = agreement.gather("table", msgspec.to_builtins(size))
        return Started(
            capacity=capacity,
            decoder=decoder,
            pool=pool,
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

    def _budget(self, free: int) -> int:
        """Bytes that this rank may take for its pool, of the `free` ones of its device."""
        fault = self._faults.memory
        if fault is not None and fault.rank == self._topology.rank:
            return fault.bytes
        sharing = ranks_per_device(self._place.local_world_size, self._device.type, torch.cuda.device_count())
        return pool_budget(
            self._config.mem_fraction_static, self._device.type, free, self._weight_bytes, sharing
        )

    def _local_tokens(self, budget: int) -> int:
        """The tokens that this rank could hold: from its budget, at most what --max-total-tokens says."""
        page_size, most = self._config.page_size, self._config.max_total_tokens
        tokens = tokens_for_budget(budget, self._bytes_per_token, page_size)
        return tokens if most is None else min(tokens, most // page_size * page_size)

    def _allocate(self, tokens: int) -> DeviceKVPool:
        spec, page_size = self._source.spec, self._config.page_size
        kv_heads = max(spec.kv_heads // self._topology.tp_size, 1)
        layer_count = len(self._topology.layers)
        pool = DeviceKVPool(
            layer_count,
            tokens // page_size,
            page_size,
            kv_heads,
            spec.head_dim,
            self._cache_dtype,
            self._device,
        )
        priced = tokens * self._bytes_per_token
        assert pool.byte_count == priced, f"the pool has {pool.byte_count} bytes, priced were {priced}"
        return pool

    def _size(
        self, weights: StageWeights, pool: DeviceKVPool, local_tokens: int, tokens: int, memory: HostMemory
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
            agreed_tokens=tokens,
            pool_bytes=pool.byte_count,
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


def _budget_problem(local_tokens: int, budget: int, bytes_per_token: int, config: EngineConfig) -> str | None:
    if local_tokens >= config.page_size:
        return None
    return (
        f"--mem-fraction-static, --page-size: {budget} bytes for the device cache hold no page of {config.page_size} "
        f"tokens at {bytes_per_token} bytes each"
    )


def memory_problem(rows: Sequence[tuple[str, int, int, int]]) -> str | None:
    """One line when the ranks of a machine need more than it has; `rows` by rank: host name, need, total, available.

    A machine is as small as any of its ranks has seen it.
    """
    needs = [MemoryNeed(host_name, rank, need) for rank, (host_name, need, _, _) in enumerate(rows)]
    by_host: dict[str, HostMemory] = {}
    for host_name, _, total, available in rows:
        seen = by_host.get(host_name, HostMemory(total, available))
        by_host[host_name] = HostMemory(min(seen.total, total), min(seen.available, available))
    return check_memory(needs, by_host)


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
    config: EngineConfig, source: ModelSource, topology: Topology, device: torch.device, tokens: int
) -> Capacity:
    context = config.context_length or source.spec.context_length
    assert context <= source.spec.context_length, f"{context} > {source.spec.context_length}: see check_model"
    chunk = config.chunked_prefill_size
    if chunk is None:
        chunk = max(4096 if device.type == "cuda" else 512, config.page_size)
    return Capacity(
        page_size=config.page_size,
        device_pages=tokens // config.page_size,
        max_running_requests=config.max_running_requests or default_running_requests(tokens),
        chunk_tokens=context if chunk == -1 else chunk,
        depth=topology.pp_size,
        context_length=context,
    )


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
def _voting(agreement: Agreement, phase: str, timeout_s: float = 50.0) -> Iterator[None]:
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
