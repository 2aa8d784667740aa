"""Copies between the tiers: the named pages and no other, each transfer reported once, whatever goes wrong."""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import faults
from engine.distributed.memory import HostMemory
from engine.mem_cache.pool import mover as mover_file
from engine.mem_cache.pool.device import DeviceKVPool
from engine.mem_cache.pool.host import HostKVCache, pageable_memory
from engine.mem_cache.pool.mover import Mover
from engine.types import Transfer, TransferResult

CPU = torch.device("cpu")
PATIENCE_S = 30.0
PLENTY = HostMemory(10**15, 10**15)


class Tiers:
    """A device and a host pool with every number another than all others, and what both should hold."""

    def __init__(
        self, layers=2, pages=12, page_size=4, record=(2, 1, 3), dtype=torch.float32, ratio=1.5
    ) -> None:
        self.device = DeviceKVPool(layers, pages, page_size, record, dtype, CPU).allocate()
        self.host = HostKVCache(
            self.device,
            ratio,
            0.0,
            page_size,
            allocator=pageable_memory,
            memory_probe=lambda: PLENTY,
            agree=lambda size, gb: size,
        )
        self.host.allocate()
        generator = torch.Generator().manual_seed(7)
        self.device_bytes.random_(0, 256, generator=generator)
        self.host_bytes.random_(0, 256, generator=generator)
        for page in range(self.host.pages):
            self.host.store.seal(page)
        self.results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()

    @property
    def device_bytes(self) -> torch.Tensor:
        """[layers, pages, bytes of a page in a layer]"""
        return self.device.paged.view(torch.uint8)

    @property
    def host_bytes(self) -> torch.Tensor:
        """[pages, layers, bytes of a page in a layer]"""
        layers, _, size = self.device_bytes.shape
        return self.host.store.bytes.view(self.host.pages, layers, size)

    @contextmanager
    def mover(self, **options) -> Iterator[Mover]:
        mover = Mover(self.device, self.host, **{"report": self.results.put, **options})
        yield mover
        mover.close()

    def wait(self, count: int) -> dict[int, bool]:
        """The next results, by the transfers' ids. A transfer that is reported twice is found by `none_left`."""
        found = [self.results.get(timeout=PATIENCE_S) for _ in range(count)]
        assert len({result.transfer_id for result in found}) == count
        return {result.transfer_id: result.ok for result in found}

    def none_left(self) -> bool:
        """Nothing more was reported. To be asked when the mover is closed."""
        return self.results.empty()


def pairs(generator: random.Random, tiers: Tiers, most: int) -> list[tuple[int, int]]:
    count = generator.randrange(min(tiers.device.pages, tiers.host.pages, most) + 1)
    return list(
        zip(
            generator.sample(range(tiers.device.pages), count),
            generator.sample(range(tiers.host.pages), count),
            strict=True,
        )
    )


# ---- what is copied -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(0, 3),
    page_size=st.sampled_from((1, 4, 16)),
    record=st.sampled_from(((2, 1, 3), (2, 3, 8), (5,))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.uint8)),
    threads=st.integers(1, 3),
    part_bytes=st.sampled_from((1, 200, 1 << 20)),
)
def test_the_named_pages_are_copied_and_no_other(seed, layers, page_size, record, dtype, threads, part_bytes):
    generator = random.Random(seed)
    tiers = Tiers(layers, generator.randrange(1, 20), page_size, record, dtype)
    device, host = tiers.device_bytes.clone(), tiers.host_bytes.clone()
    moved = {"backup": 0, "load": 0}
    before = mover_file.PART_BYTES["cpu"]
    mover_file.PART_BYTES["cpu"] = part_bytes
    try:
        with tiers.mover(threads=threads) as mover:
            for batch in range(3):
                # Transfers that are under way together have no page in common: the books see to that.
                kinds = [("backup", "load")[generator.randrange(2)] for _ in range(3)]
                found = pairs(generator, tiers, most=12)
                shares = [found[number::3] for number in range(3)]
                for number, (kind, share) in enumerate(zip(kinds, shares, strict=True)):
                    moved[kind] += len(share) * page_size * tiers.device.bytes_per_token
                    for device_page, host_page in share:
                        if kind == "backup":
                            host[host_page] = device[:, device_page]
                        else:
                            device[:, device_page] = host[host_page]
                    pages = tuple(page for page, _ in share), tuple(page for _, page in share)
                    mover.submit(Transfer(3 * batch + number, kind, *pages))
                assert tiers.wait(3) == {3 * batch + number: True for number in range(3)}
                assert torch.equal(tiers.device_bytes, device) and torch.equal(tiers.host_bytes, host)
            assert mover.bytes_moved == moved
    finally:
        mover_file.PART_BYTES["cpu"] = before
    assert tiers.none_left()


def test_a_page_comes_back_to_another_place_as_it_was():
    tiers = Tiers()
    written = tiers.device_bytes[:, [3, 9]].clone()
    with tiers.mover() as mover:
        mover.submit(Transfer(1, "backup", (3, 9), (17, 0)))
        tiers.wait(1)
        tiers.device_bytes.zero_()
        mover.submit(Transfer(2, "load", (5, 4), (17, 0)))
        tiers.wait(1)
    assert torch.equal(tiers.device_bytes[:, [5, 4]], written)
    assert tiers.device_bytes.any(dim=2).sum() == 2 * 2


def test_a_transfer_of_no_pages_is_reported():
    tiers = Tiers()
    with tiers.mover() as mover:
        mover.submit(Transfer(1, "load", (), ()))
        assert tiers.wait(1) == {1: True}
        assert mover.bytes_moved == {"backup": 0, "load": 0}


def test_tables_of_two_lengths_are_a_programmers_error():
    tiers = Tiers()
    with tiers.mover() as mover, pytest.raises(ValueError, match="argument 2 is shorter"):
        mover.submit(Transfer(1, "load", (1, 2), (3,)))


def test_nothing_is_reported_before_its_last_page_is_there(monkeypatch):
    """LMCache#4991: a copy that is not finished must not be found. Parts of a transfer end on several threads."""
    monkeypatch.setitem(mover_file.PART_BYTES, "cpu", 1)
    tiers = Tiers(pages=40)
    expected = tiers.host_bytes[:40].transpose(0, 1).clone()
    seen: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def report(result: TransferResult) -> None:
        seen.put(result.ok and torch.equal(tiers.device_bytes, expected))

    slow = faults.Copy(rank=0, seconds=0.001)
    with tiers.mover(report=report, threads=3, fault=slow) as mover:
        mover.submit(Transfer(1, "load", tuple(range(40)), tuple(range(40))))
        assert seen.get(timeout=PATIENCE_S)
    assert seen.empty()


def test_copies_on_a_stream_go_to_the_same_places_between_the_same_marks(monkeypatch):
    """What CUDA's copies do, with a stand-in for its streams: the bytes as on the CPU, after the fence, then a wait."""
    order: list[str] = []
    stream = SimpleNamespace(wait_event=lambda event: order.append(f"wait for {event}"))
    ended = SimpleNamespace(
        record=lambda on: order.append(f"mark {on is stream}"),
        synchronize=lambda: order.append("synchronize"),
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda on: nullcontext(order.append(f"copy {on is stream}")))
    monkeypatch.setattr(mover_file, "_event", lambda: ended)
    ours, theirs = Tiers(dtype=torch.bfloat16), Tiers(dtype=torch.bfloat16)
    lanes = mover_file._CudaLane(ours.device, ours.host), mover_file._CpuLane(theirs.device, theirs.host)
    for lane in lanes:
        lane.begin("a fence")
        lane.backup(3, 7)
        lane.load(5, 2)
        lane.finish()
    assert torch.equal(ours.device_bytes, theirs.device_bytes) and torch.equal(
        ours.host_bytes, theirs.host_bytes
    )
    assert torch.equal(ours.host_bytes[7], ours.device_bytes[:, 3])
    assert order == ["wait for a fence", "copy True", "copy True", "mark True", "synchronize"]


# ---- what goes wrong ----------------------------------------------------------------------------


def test_a_damaged_page_fails_its_transfer_and_no_other(caplog):
    tiers = Tiers()
    kept = tiers.device_bytes[:, 6].clone()
    tiers.host.store.rows[7, 11] ^= 4
    with tiers.mover() as mover:
        mover.submit(Transfer(1, "load", (0, 1), (2, 3)))
        mover.submit(Transfer(2, "load", (5, 6), (8, 7)))
        assert tiers.wait(2) == {1: True, 2: False}
        # The thread lives on, and the page can be used again once it has been written anew.
        mover.submit(Transfer(3, "backup", (4,), (7,)))
        tiers.wait(1)
        mover.submit(Transfer(4, "load", (6,), (7,)))
        assert tiers.wait(1) == {4: True}
        assert mover.bytes_moved["load"] == 4 * 4 * tiers.device.bytes_per_token
    assert tiers.none_left()
    assert not torch.equal(tiers.device_bytes[:, 6], kept)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("load 2 failed at host page 7: its checksum is ")


def test_damage_goes_unseen_without_checksums():
    tiers = Tiers()
    tiers.host.store.rows[7, 0] ^= 4
    with tiers.mover(checksums=False) as mover:
        mover.submit(Transfer(1, "load", (6,), (7,)))
        assert tiers.wait(1) == {1: True}
    assert torch.equal(tiers.device_bytes[:, 6], tiers.host_bytes[7])


def test_a_page_that_is_not_there_fails_its_transfer_once(caplog, monkeypatch):
    monkeypatch.setitem(mover_file.PART_BYTES, "cpu", 1)
    tiers = Tiers()
    with tiers.mover() as mover:
        mover.submit(Transfer(1, "backup", (1, 99, 98, 2), (0, 1, 2, 3)))
        mover.submit(Transfer(2, "backup", (1,), (1,)))
        assert tiers.wait(2) == {1: False, 2: True}
    assert tiers.none_left()
    assert len(caplog.records) == 1 and "backup 1 failed at host page" in caplog.text


def test_two_pages_that_fail_at_once_are_one_failure(caplog, monkeypatch):
    monkeypatch.setitem(mover_file.PART_BYTES, "cpu", 1)
    tiers = Tiers()
    both = threading.Barrier(2)

    def check(page: int) -> None:
        both.wait(PATIENCE_S)
        raise ValueError(f"no {page}")

    monkeypatch.setattr(tiers.host.store, "check", check)
    with tiers.mover(threads=2) as mover:
        mover.submit(Transfer(1, "load", (1, 2), (3, 4)))
        assert tiers.wait(1) == {1: False}
    assert tiers.none_left() and len(caplog.records) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_every_nth_transfer_fails_when_a_test_says_so(threads, caplog):
    tiers = Tiers()
    with tiers.mover(threads=threads, fault=faults.Copy(rank=0, fail_every=3)) as mover:
        for number in range(1, 8):
            mover.submit(Transfer(number, ("backup", "load")[number % 2], (number,), (number,)))
        assert tiers.wait(7) == {number: number % 3 != 0 for number in range(1, 8)}
    assert sorted(record.getMessage() for record in caplog.records) == [
        "backup 6 failed at host page 6: a fault on purpose",
        "load 3 failed at host page 3: a fault on purpose",
    ]


def test_a_transfer_that_fails_on_purpose_is_half_done():
    """What makes the fault worth having: pages of a failed load hold anything."""
    tiers = Tiers()
    kept = tiers.device_bytes[:, 2].clone()
    with tiers.mover(threads=1, fault=faults.Copy(rank=0, fail_every=1)) as mover:
        mover.submit(Transfer(1, "load", (1, 2), (1, 2)))
        assert tiers.wait(1) == {1: False}
    assert torch.equal(tiers.device_bytes[:, 1], tiers.host_bytes[1])
    assert torch.equal(tiers.device_bytes[:, 2], kept)


def test_every_nth_backup_leaves_damage_when_a_test_says_so():
    tiers = Tiers()
    with tiers.mover(fault=faults.Copy(rank=0, damage_every=2)) as mover:
        for number in (1, 2, 3, 4):
            mover.submit(Transfer(number, "backup", (number, number + 4), (number, number + 4)))
        assert tiers.wait(4) == dict.fromkeys((1, 2, 3, 4), True)
        for number in (1, 2, 3, 4):
            mover.submit(Transfer(10 + number, "load", (number, number + 4), (number, number + 4)))
        assert tiers.wait(4) == {11: True, 12: False, 13: True, 14: False}


def test_the_faults_of_copies_are_read_from_the_environment(monkeypatch):
    text = json.dumps({"copy": {"rank": 1, "seconds": 0.02}, "host_memory": {"total": 10, "available": 9}})
    monkeypatch.setenv(faults.VARIABLE, text)
    found = faults.read_faults()
    assert found.copy_of(1) == faults.Copy(rank=1, seconds=0.02, fail_every=0, damage_every=0)
    assert found.copy_of(0) is None
    assert found.host_memory == faults.MachineMemory(total=10, available=9)
    everywhere = faults.Faults(copy=faults.Copy(rank=-1))
    assert [everywhere.copy_of(rank) for rank in (0, 5)] == [everywhere.copy] * 2
    assert faults.Faults().copy_of(0) is None
