"""How a rank comes to life: handshake, weights, sizes, votes, pools, warm-up. Rule 4 of the design, in one place.

Runs once, on the rank's compute thread, while its control thread keeps the links alive. Every rank walks through the
same phases in the same order; each phase ends in agreement or ends all ranks with the same line. What comes out is
agreed (`Capacity`) or local (weights, pool, bytes), and the pure half is built from the agreed part alone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
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
from engine.distributed.agreement import Agreement
from engine.distributed.launch import Place
from engine.distributed.memory import HostMemory, MemoryNeed, check_memory, host_memory
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
    device: torch.device
    sizes: tuple[StageSize, ...]
    """The start-up table, one line per rank, the same on every rank."""
    pids: tuple[int, ...]


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

    def run(self) -> Started:
        """Agree, load and allocate. Raises Refused or RankLost, with the same line on every rank."""
        agreement = self._agreement
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        agreement.must_equal("handshake", self._must_equal())
        memory = host_memory()
        with _voting(agreement, "weights", LOADING_S):
            weights = self._load()
        local_tokens = self._local_tokens(memory)
        tokens = agreement.minimum("device capacity", local_tokens)
        if self._device.type == "cpu":
            _check_host_memory(agreement, memory, tokens * self._bytes_per_token)
        with _voting(agreement, "pools"):
            pool = self._allocate(tokens)
        capacity = _capacity(self._config, self._source, self._topology, self._device, tokens)
        decoder = Decoder(self._source.spec, weights)
        with _voting(agreement, "warm-up", LOADING_S):
            _warm_up(decoder, pool, capacity, self._topology, self._dtype, self._device)
        agreement.must_equal("capacity", dataclasses.asdict(capacity))
        size = self._size(weights, pool, local_tokens, tokens, memory)
        table = agreement.gather("table", (msgspec.to_builtins(size), os.getpid()))
        return Started(
            capacity,
            decoder,
            pool,
            self._dtype,
            self._device,
            tuple(msgspec.convert(row, StageSize) for row, _ in table),
            tuple(pid for _, pid in table),
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

    def _local_tokens(self, memory: HostMemory) -> int:
        """The tokens that this rank could hold: from its budget, at most what --max-total-tokens says."""
        config, fault = self._config, self._faults.memory
        weights_bytes = parameter_count(self._source.spec, self._topology.layers) * self._dtype.itemsize
        budget = _budget(config, self._device, memory, weights_bytes, self._place.local_world_size)
        if fault is not None and fault.rank == self._topology.rank:
            budget = fault.bytes
        tokens = tokens_for_budget(budget, self._bytes_per_token, config.page_size)
        if config.max_total_tokens is not None:
            tokens = min(tokens, config.max_total_tokens // config.page_size * config.page_size)
        self._agreement.vote("budget", _too_small(tokens, budget, self._bytes_per_token, config))
        return tokens

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
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.device(kind, place.local_rank % torch.cuda.device_count())
        if kind == "cuda"
        else torch.device(kind)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _budget(
    config: EngineConfig, device: torch.device, memory: HostMemory, weights_bytes: int, local_ranks: int
) -> int:
    """Bytes this rank may take for its device pool.

    CPU: 4 GB or a quarter of what was available before loading, the smaller, shared by the ranks of this machine; a
    given --mem-fraction-static is a share of the available memory for weights and pool together. CUDA: the share of
    what was free before loading (default 0.85), less the weights.
    """
    fraction = config.mem_fraction_static
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(int((free + weights_bytes) * (fraction or 0.85)) - weights_bytes, 0)
    if fraction is None:
        return min(CPU_BUDGET_BYTES, memory.available // 4) // local_ranks
    return max(int(memory.available * fraction) // local_ranks - weights_bytes, 0)


def _too_small(local_tokens: int, budget: int, bytes_per_token: int, config: EngineConfig) -> str | None:
    if local_tokens >= config.page_size:
        return None
    return (
        f"--mem-fraction-static, --page-size: {budget} bytes for the device cache hold no page of {config.page_size} "
        f"tokens at {bytes_per_token} bytes each"
    )


def _check_host_memory(agreement: Agreement, memory: HostMemory, need: int) -> None:
    """One check per machine over all its ranks, on what was available before anyone loaded anything."""
    rows = agreement.gather("memory", (socket.gethostname(), need, memory.total, memory.available))
    needs = [MemoryNeed(host_name, rank, asked) for rank, (host_name, asked, _, _) in enumerate(rows)]
    by_host: dict[str, HostMemory] = {}
    for host_name, _, total, available in rows:
        seen = by_host.get(host_name, HostMemory(total, available))
        by_host[host_name] = HostMemory(min(seen.total, total), min(seen.available, available))
    agreement.vote("memory", check_memory(needs, by_host))


def _capacity(
    config: EngineConfig, source: ModelSource, topology: Topology, device: torch.device, tokens: int
) -> Capacity:
    context = source.spec.context_length
    if config.context_length is not None:
        context = min(context, config.context_length)
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
    except (
        ValueError,
        OSError,
        RuntimeError,
        MemoryError,
    ) as error:  # torch reports a lack of memory as RuntimeError
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
