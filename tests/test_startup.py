"""How a rank comes to life: what is refused before anything is loaded, and that all measure before anyone loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import startup
from engine.config import EngineConfig
from engine.distributed.agreement import Agreement, Refused
from engine.distributed.frames import BODY_BYTES_MAX
from engine.distributed.launch import Place
from engine.distributed.memory import HostMemory
from engine.distributed.pipe import HEAD
from engine.faults import Faults
from engine.model.source import ModelSource, open_source
from engine.model.weights import parameter_count
from engine.startup import (
    Startup,
    device_problem,
    frame_problem,
    memory_problem,
    pool_budget,
    ranks_per_device,
)
from engine.topology import Topology
from engine.types import Capacity
from tests.tiny_models import make_tiny

GB = 10**9
MIB = 1 << 20


class Alike(Agreement):
    """Rank 0 of a world whose other ranks say just what it says. Keeps the order of what happens."""

    def __init__(self, world_size: int, events: list[str]) -> None:
        super().__init__(0, world_size, {})
        self.alike, self.events = world_size, events

    def gather(self, phase, value, *, timeout_s=0.0):
        self.events.append(phase)
        return [value] * self.alike


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    return open_source(make_tiny(tmp_path_factory.mktemp("startup")))


def bring_up(source: ModelSource, events: list[str], pp_size: int = 1, **flags) -> startup.Started:
    config = EngineConfig(**{"pp_size": pp_size, "dtype": "float32", "device": "cpu", **flags})
    topology = Topology.build(
        0, tp_size=1, pp_size=pp_size, layer_count=source.spec.layer_count, partition=None
    )
    place = Place(role="rank", world_size=pp_size, local_world_size=pp_size)
    with torch.inference_mode():
        return Startup(config, source, topology, place, Alike(pp_size, events), Faults()).run()


def watch(monkeypatch, events: list[str], memory: HostMemory) -> None:
    """Let the machine have this memory, and note when it is read and when weights are."""
    load_weights = startup.load_weights

    def read() -> HostMemory:
        events.append("(measure)")
        return memory

    def load(*arguments, **options):
        events.append("(load)")
        return load_weights(*arguments, **options)

    monkeypatch.setattr(startup, "host_memory", read)
    monkeypatch.setattr(startup, "load_weights", load)


def test_memory_is_measured_before_anyone_can_load(source, monkeypatch):
    """sglang#35540: a slow rank must not see the others' memory already gone."""
    events: list[str] = []
    watch(monkeypatch, events, HostMemory(8 * GB, 8 * GB))
    started = bring_up(source, events, max_total_tokens=4096, chunked_prefill_size=64)
    assert events == [
        "device",
        "(measure)",
        "handshake",
        "budget",
        "device capacity",
        "memory",
        "memory verdict",
        "capacity",
        "frames",
        "(load)",
        "weights",
        "pools",
        "warm-up",
        "table",
    ]
    assert (started.capacity.chunk_tokens, started.capacity.context_length) == (64, 2048)
    assert (started.cache_dtype, started.threads) == (torch.float32, torch.get_num_threads())
    assert len(started.sizes) == 1


def test_what_does_not_fit_is_refused_before_anything_is_loaded(source, monkeypatch):
    """Weights count: the pools alone would have fitted."""
    events: list[str] = []
    available = 20_000_000
    weights = parameter_count(source.spec, range(2)) * 4
    assert 0.92 * available - 2 * weights < 0.9 * available
    watch(monkeypatch, events, HostMemory(available, available))
    refused = r"rank 0: memory of .*: needed 0\.018\d* GB by ranks 0, 1, but available"
    with pytest.raises(Refused, match=refused):
        bring_up(source, events, pp_size=2, mem_fraction_static=0.92)
    assert "(load)" not in events and events[-1] == "memory verdict"


@pytest.mark.parametrize(("gb_of_a_rank", "starts"), [(2.0, True), (2.5, False)])
def test_memory_of_four_ranks_of_one_machine(gb_of_a_rank, starts):
    """sglang#35540: 10 GB available, 1 GB reserved; four ranks may take 2.0 GB each, not 2.5, whoever comes last."""
    generator = random.Random(0)
    for _ in range(10):
        rows = [("a", int(gb_of_a_rank * GB), 10 * GB, 10 * GB + generator.randrange(1000)) for _ in range(4)]
        line = memory_problem(rows)
        assert (line is None) == starts
        if line is not None:
            assert line.startswith("memory of a: needed 10.00 GB by ranks 0, 1, 2, 3, but available 10.00 GB")


def test_a_machine_is_as_small_as_any_rank_has_seen_it():
    assert memory_problem([("a", 4 * GB, 10 * GB, 10 * GB), ("b", 4 * GB, 10 * GB, 5 * GB)]) is None
    line = memory_problem([("a", 4 * GB, 10 * GB, 10 * GB), ("a", 4 * GB, 10 * GB, 5 * GB)])
    assert line is not None and "needed 8.00 GB by ranks 0, 1, but available 5.00 GB" in line


def test_a_device_that_is_not_there_is_refused(source, monkeypatch):
    assert device_problem("cuda", 0) == (
        "--device cuda: torch finds no CUDA device on this machine; allowed is cpu or auto"
    )
    assert [device_problem(*given) for given in (("cuda", 1), ("auto", 0), ("cpu", 0))] == [None] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    events: list[str] = []
    with pytest.raises(Refused, match="--device cuda: torch finds no CUDA device"):
        bring_up(source, events, device="cuda")
    assert events == ["device"]


def test_ranks_share_the_memory_of_their_device():
    shared = [
        ranks_per_device(*given) for given in ((4, "cuda", 4), (4, "cuda", 1), (5, "cuda", 4), (4, "cpu", 0))
    ]
    assert shared == [1, 4, 2, 4]
    # Two ranks on a GPU with 80 GB free: 0.85 of it is 34 GB each, of which 14 GB are weights.
    assert pool_budget(None, "cuda", 80 * GB, 14 * GB, 2) == 20 * GB
    assert pool_budget(0.5, "cuda", 80 * GB, 14 * GB, 1) == 26 * GB
    assert pool_budget(0.5, "cpu", 80 * GB, 14 * GB, 2) == 6 * GB
    assert pool_budget(0.5, "cpu", 80 * GB, 44 * GB, 1) == 0
    # No share given, on CPUs: 4 GB or a quarter, for all ranks of the machine.
    assert pool_budget(None, "cpu", 80 * GB, 14 * GB, 2) == 2 * GB
    assert pool_budget(None, "cpu", 8 * GB, 14 * GB, 2) == 1 * GB


def capacity(chunk_tokens: int, depth: int) -> Capacity:
    return Capacity(
        page_size=16,
        device_pages=1 << 20,
        max_running_requests=240,
        chunk_tokens=chunk_tokens,
        depth=depth,
        context_length=1 << 17,
    )


def test_a_step_that_fits_into_no_frame_is_refused():
    """256 MiB hold 16,384 rows of 4,096 float32 numbers, but for the frame's own head."""
    assert BODY_BYTES_MAX == 256 * MIB and 0 < HEAD.size < 4096 * 4
    fits = 16_383 - 16 - 240
    assert frame_problem(capacity(fits, 2), 4096, torch.float32) is None
    assert frame_problem(capacity(fits + 1, 1), 4096, torch.float32) is None
    assert frame_problem(capacity(2 * fits, 2), 4096, torch.bfloat16) is None
    assert frame_problem(capacity(fits + 1, 2), 4096, torch.float32) == (
        "--chunked-prefill-size 16128: hidden states of a step of 16128 + 256 rows exceed the 268435456 bytes "
        "that stages send at once; allowed is at most 16127"
    )


def test_a_model_whose_every_step_is_too_large_is_refused_in_its_phase(source, monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(startup, "BODY_BYTES_MAX", 100_000)
    with pytest.raises(Refused, match=r"--chunked-prefill-size 2048: .* allowed is at most "):
        bring_up(source, events, pp_size=2, max_total_tokens=4096, chunked_prefill_size=-1)
    assert events[-1] == "frames"


def test_a_cache_of_another_type_comes_up(source: ModelSource):
    started = bring_up(source, [], max_total_tokens=64, kv_cache_dtype="bfloat16")
    assert (started.dtype, started.cache_dtype) == (torch.float32, torch.bfloat16)
    assert started.pool.byte_count == 64 * 5 * 2 * 2 * 16 * 2 and isinstance(source.path, Path)
