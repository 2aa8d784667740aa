"""How a rank comes to life: what is refused before anything is loaded, and that all measure before anyone loads."""

from __future__ import annotations

import io
import json
import logging
import random
import re
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from engine import memory_plan, startup
from engine.config import EngineConfig
from engine.distributed.agreement import Agreement, Refused
from engine.distributed.frames import BODY_BYTES_MAX
from engine.distributed.launch import Place
from engine.distributed.memory import HostMemory
from engine.distributed.pipe import HEAD
from engine.faults import Faults, MachineMemory
from engine.frontend.table import show_ready
from engine.mem_cache.pool.host import HostKVCache
from engine.mem_cache.sizing import NO_CONSTRAINT
from engine.memory_plan import memory_problem, pool_budget, ranks_per_device
from engine.model.source import ModelSource, open_source
from engine.model.weights import parameter_count
from engine.startup import Startup, device_problem, frame_problem
from engine.topology import Topology
from engine.types import Capacity, Ready, StageSize
from tests.service import run_to_end
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


def bring_up(
    source: ModelSource, events: list[str], pp_size: int = 1, faults: Faults | None = None, **flags
) -> startup.Started:
    config = EngineConfig(**{"pp_size": pp_size, "dtype": "float32", "device": "cpu", **flags})
    topology = Topology.build(
        0, tp_size=1, pp_size=pp_size, layer_count=source.spec.layer_count, partition=None
    )
    place = Place(role="rank", world_size=pp_size, local_world_size=pp_size)
    with torch.inference_mode():
        return Startup(config, source, topology, place, Alike(pp_size, events), faults or Faults()).run()


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
        "host capacity",
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
    assert len(started.sizes) == 1 and started.host_pool is None
    assert (started.capacity.host_pages, started.sizes[0].host_tokens) == (0, 0)


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
        available = [10 * GB + generator.randrange(1000) for _ in range(4)]
        rows = [("a", 0, int(gb_of_a_rank * GB), 10 * GB, one) for one in available]
        line = memory_problem(rows)
        assert (line is None) == starts
        if line is not None:
            assert line.startswith("memory of a: needed 10.00 GB by ranks 0, 1, 2, 3, but available 10.00 GB")
            assert line.endswith("; the host tier (--hicache-size, --hicache-ratio) takes 10.00 GB")


def test_a_machine_is_as_small_as_any_rank_has_seen_it():
    assert memory_problem([("a", 4 * GB, 0, 10 * GB, 10 * GB), ("b", 4 * GB, 0, 10 * GB, 5 * GB)]) is None
    line = memory_problem([("a", 3 * GB, GB, 10 * GB, 10 * GB), ("a", 4 * GB, 0, 10 * GB, 5 * GB)])
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


# ---- the host tier ------------------------------------------------------------------------------

FOUR_RANKS = {"pp_size": 4, "max_total_tokens": 64, "enable_hierarchical_cache": True}


def test_the_host_pool_is_sized_before_the_memory_check_and_taken_after_the_weights(source, monkeypatch):
    events: list[str] = []
    memory = HostMemory(8 * GB, 8 * GB)
    watch(monkeypatch, events, memory)
    for name in ("__init__", "allocate"):
        real = getattr(HostKVCache, name)

        def note(*arguments, _name=name, _real=real, **options):
            events.append(f"(host pool {_name})")
            return _real(*arguments, **options)

        monkeypatch.setattr(HostKVCache, name, note)
    started = bring_up(source, events, max_total_tokens=64, enable_hierarchical_cache=True)
    assert events[4:] == [
        "device capacity",
        "(host pool __init__)",
        "host capacity",
        "memory",
        "memory verdict",
        "capacity",
        "frames",
        "(load)",
        "weights",
        "(host pool allocate)",
        "(measure)",
        "pools",
        "warm-up",
        "table",
    ]
    # Twice 64 tokens and a page, of 5 layers of 256 bytes.
    size = started.sizes[0]
    assert (size.host_local_tokens, size.host_tokens, size.host_pool_bytes) == (144, 144, 144 * 1280)
    assert (started.capacity.host_pages, started.capacity.write_policy) == (9, "write_through")
    assert started.host_pool.store.bytes.shape == (9, 16 * 1280) and started.host_checksums


def test_a_fixed_size_and_its_flags(source, caplog):
    flags = {"hicache_size": 0.0005, "hicache_write_policy": "write_back", "disable_hicache_checksum": True}
    with caplog.at_level(logging.INFO):
        started = bring_up(
            source, [], max_total_tokens=64, enable_hierarchical_cache=True, hicache_ratio=3.0, **flags
        )
    # 500,000 bytes at 1,280 hold 390 tokens: 24 pages, and one.
    assert (started.capacity.host_pages, started.capacity.write_policy) == (25, "write_back")
    assert not started.host_checksums
    # sglang#9452: of two flags that contradict each other one wins, and is named.
    assert "--hicache-size 0.0005 wins; --hicache-ratio 3 is not used" in caplog.text


@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize(("gb_of_a_rank", "starts"), [(2.0, True), (2.5, False)])
def test_host_memory_is_shared_by_the_ranks_of_a_machine(source, gb_of_a_rank, starts, attempt, monkeypatch):
    """sglang#35540: of 10 GB, 1 GB stays free. Refused before anything is taken, and before anything is loaded."""
    events: list[str] = []
    taken: list[tuple[int, ...]] = []

    def on_meta(shape, dtype):
        taken.append(shape)
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(memory_plan, "pageable_memory", on_meta)
    faults = Faults(host_memory=MachineMemory(total=10 * GB, available=10 * GB))
    if starts:
        started = bring_up(source, events, faults=faults, hicache_size=gb_of_a_rank, **FOUR_RANKS)
        assert started.sizes[0].machine_available_bytes == 10 * GB
        assert 2.0 * GB < started.sizes[0].host_pool_bytes < 2.0 * GB + 2 * 16 * 256 and len(taken) == 1
    else:
        with pytest.raises(
            Refused, match=r"needed 10\.00 GB by ranks 0, 1, 2, 3, but available 10\.00 GB - reserve"
        ):
            bring_up(source, events, faults=faults, hicache_size=gb_of_a_rank, **FOUR_RANKS)
        assert events[-1] == "memory verdict" and not taken


@pytest.mark.process
def test_a_host_tier_that_does_not_fit_is_refused_by_all_processes(source):
    """sglang#35540, from the command line. Once agreed, the stage of two layers takes 4 GB, the others 2: 10 of 10."""
    memory = json.dumps({"host_memory": {"total": 10 * GB, "available": 10 * GB}})
    flags = ["--model-path", str(source.path), "--dtype", "float32", "--device", "cpu", "--pp-size", "4"]
    flags += ["--max-total-tokens", "4096", "--enable-hierarchical-cache", "--hicache-size", "4"]
    code, lines = run_to_end(*flags, LOCKSTEP_FAULTS=memory)
    assert code == 3
    assert (
        "needed 10.01 GB by ranks 0, 1, 2, 3, but available 10.00 GB - reserve 1.00 GB is less" in lines[-1]
    )
    assert not any("pools: " in line for line in lines)


def test_another_host_capacity_on_one_rank_is_refused_by_name(source):
    """sglang#29258: had the sizes not been agreed, the start would end here."""
    name = "host pages (--hicache-size, --hicache-ratio)"
    with pytest.raises(Refused, match=re.escape(f"{name} differs: 9 on rank 0, 8 on rank 1")):
        bring_up_beside(source, **{name: 8})


def test_without_agreement_every_stage_keeps_its_own_and_is_warned(source, caplog):
    assert bring_up_beside(source, host_pages=8, debug_unagreed_hicache=True).capacity.host_pages == 9
    assert "--debug-unagreed-hicache: stages keep their own host capacity" in caplog.text


def test_without_agreement_everything_else_is_compared(source):
    with pytest.raises(Refused, match="write_policy differs"):
        bring_up_beside(source, write_policy="write_back", debug_unagreed_hicache=True)


def bring_up_beside(source: ModelSource, debug_unagreed_hicache: bool = False, **other) -> startup.Started:
    """Rank 0 of two, the other of which has another capacity."""

    class Beside(Alike):
        def gather(self, phase, value, *, timeout_s=0.0):
            if phase == "capacity":
                return [value, {name: other.get(name, field) for name, field in value.items()}]
            return super().gather(phase, value)

    config = EngineConfig(
        pp_size=2,
        dtype="float32",
        device="cpu",
        max_total_tokens=64,
        enable_hierarchical_cache=True,
        debug_unagreed_hicache=debug_unagreed_hicache,
    )
    topology = Topology.build(0, tp_size=1, pp_size=2, layer_count=source.spec.layer_count)
    place = Place(role="rank", world_size=2, local_world_size=2)
    with torch.inference_mode():
        return Startup(config, source, topology, place, Beside(2, []), Faults()).run()


def test_the_start_up_table_shows_what_each_stage_could_hold_and_what_was_agreed():
    def size(rank: int, own: int) -> StageSize:
        return StageSize(
            rank=rank,
            pp_rank=rank,
            tp_rank=0,
            host_name="a",
            layers=(rank * 3, rank * 3 + 3),
            weight_bytes=GB,
            bytes_per_token=768,
            local_tokens=4096,
            agreed_tokens=2048,
            pool_bytes=2 * GB,
            host_local_tokens=own,
            host_tokens=7_621_952,
            host_pool_bytes=3 * GB,
            machine_available_bytes=20 * GB,
        )

    def shown(*sizes: StageSize) -> str:
        console = Console(file=io.StringIO(), width=80)
        ready = Ready(
            capacity_tokens=2048,
            max_running_requests=4,
            page_size=16,
            context_length=2048,
            dtype="float32",
            device="cpu",
            stages=sizes,
        )
        show_ready(ready, "http://a", console)
        return console.file.getvalue()

    text = shown(size(0, 8_023_168), size(1, 7_621_952), size(2, NO_CONSTRAINT))
    assert "…" not in text, "fits a terminal of 80 columns"
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("PP")]
    assert [row[-4:] for row in rows[3:]] == [
        [own, "7,621,952", "3.00", "GB"] for own in ("8,023,168", "7,621,952", "any")
    ]
    assert "memory of a: 18.00 GB taken, of 20.00 GB" in text
    without = shown(msgspec.structs.replace(size(0, 0), host_tokens=0, host_pool_bytes=0))
    assert "host" not in without.replace("memory of", "") and "3.00 GB taken" in without
