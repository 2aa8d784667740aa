"""The compute thread: copies at their place in the order of work, and what a step wrote is what its backup holds."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from engine import worker as worker_file
from engine.config import EngineConfig
from engine.distributed.agreement import Agreement
from engine.distributed.launch import Place
from engine.faults import Copy, Faults
from engine.model.source import open_source
from engine.startup import Started, Startup
from engine.topology import Topology
from engine.types import FinishedStep, Plan, Sample, SamplingParams, Span, Transfer, TransferResult
from engine.worker import Copied, Done, Failed, Worker
from tests.tiny_models import make_tiny

PATIENCE_S = 60.0
TOPOLOGY = Topology.build(0, tp_size=1, pp_size=1, layer_count=5)


class Running:
    """A worker of a rank that is alone, and its news in order."""

    def __init__(self, model, faults: Faults | None = None, **flags) -> None:
        self._woken = threading.Event()
        self._waiting: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.worker = Worker(TOPOLOGY, None, faults or Faults(), self._woken.set)
        config = EngineConfig(dtype="float32", device="cpu", max_total_tokens=256, **flags)
        start = Startup(
            config, open_source(model), TOPOLOGY, Place(role="rank"), Agreement(0, 1, {}), Faults()
        )
        self.worker.start(start.run)
        self.started = self.next()
        assert isinstance(self.started, Started), self.started

    def next(self) -> object:
        while self._waiting.empty():
            assert self._woken.wait(PATIENCE_S), "no news"
            self._woken.clear()
            for news in self.worker.news():
                self._waiting.put(news)
        return self._waiting.get()

    def run(self, plan: Plan) -> list[object]:
        """All news of a plan: `Done` and one `Copied` for each transfer, in the order in which they came."""
        self.worker.submit(plan)
        return [self.next() for _ in range(1 + len(plan.transfers))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("worker"))


def span(start: int, ids: tuple[int, ...], pages: tuple[int, ...]) -> Span:
    params = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True)
    end = start + len(ids)
    return Span(0, start, ids, pages, Sample(params, end, 0, (), (), ()))


def token(news: list[object]) -> FinishedStep:
    return next(one.finished for one in news if isinstance(one, Done))


PROMPT = tuple(range(3, 36))
"""Two pages of 16, and one id."""


def test_a_prefix_that_comes_back_from_the_host_is_the_prefix_that_was_computed(model):
    """The same token with the same log probability, with the prefix in its own pages and, loaded back, in others."""
    running = Running(model, enable_hierarchical_cache=True)
    backup = Transfer(1, "backup", (4, 2), (30, 0))
    news = running.run(Plan(1, 0, spans=(span(0, PROMPT[:32], (4, 2)),), transfers=(backup,)))
    assert Copied(TransferResult(transfer_id=1, ok=True)) in news
    warm = token(running.run(Plan(2, 0, spans=(span(32, PROMPT[32:], (4, 2, 7)),))))
    with torch.inference_mode():
        running.started.pool.records.fill_(torch.nan)
    load = Transfer(2, "load", (9, 11), (30, 0))
    # A plan without spans is done at once and finishes no step.
    news = running.run(Plan(3, 0, transfers=(load,)))
    assert sorted(map(str, news)) == sorted(
        map(str, (Done(3, None), Copied(TransferResult(transfer_id=2, ok=True))))
    )
    back = token(running.run(Plan(4, 0, spans=(span(32, PROMPT[32:], (9, 11, 1)),))))
    assert back.tokens == warm.tokens and back.logprobs == warm.logprobs
    page_bytes = 16 * 5 * 256
    assert running.worker.bytes_copied() == {"backup": 2 * page_bytes, "load": 2 * page_bytes}


def test_loads_go_before_the_compute_of_their_step_and_backups_after_it(model, monkeypatch):
    order: list[str] = []

    class Recorder:
        def __init__(self, *_, **__) -> None:
            pass

        def submit(self, transfer: Transfer) -> None:
            order.append(f"{transfer.kind} {transfer.transfer_id}")

    compute = Worker._compute

    def note(self, plan, started):
        order.append(f"compute {plan.step}")
        return compute(self, plan, started)

    monkeypatch.setattr(worker_file, "Mover", Recorder)
    monkeypatch.setattr(Worker, "_compute", note)
    running = Running(model, enable_hierarchical_cache=True)
    transfers = (
        Transfer(1, "backup", (1,), (1,)),
        Transfer(2, "load", (2,), (2,)),
        Transfer(3, "backup", (3,), (3,)),
    )
    running.worker.submit(Plan(1, 0, spans=(span(0, PROMPT[:16], (1,)),), transfers=transfers))
    running.worker.submit(Plan(2, 0, transfers=(Transfer(4, "load", (4,), (4,)),)))
    assert [running.next() for _ in range(2)][1] == Done(2, None)
    assert order == ["load 2", "compute 1", "backup 1", "backup 3", "load 4"]


def test_a_copy_that_fails_is_news_and_work_goes_on(model):
    running = Running(model, Faults(copy=Copy(rank=-1, damage_every=1)), enable_hierarchical_cache=True)
    backup = Transfer(1, "backup", (4,), (30,))
    running.run(Plan(1, 0, spans=(span(0, PROMPT[:16], (4,)),), transfers=(backup,)))
    news = running.run(Plan(2, 0, transfers=(Transfer(2, "load", (9,), (30,)),)))
    assert Copied(TransferResult(transfer_id=2, ok=False)) in news
    assert token(running.run(Plan(3, 0, spans=(span(16, PROMPT[16:17], (4, 5)),)))).step == 3


def test_checksums_are_off_when_the_operator_says_so(model):
    faults = Faults(copy=Copy(rank=0, damage_every=1))
    running = Running(model, faults, enable_hierarchical_cache=True, disable_hicache_checksum=True)
    backup = Transfer(1, "backup", (4,), (30,))
    running.run(Plan(1, 0, spans=(span(0, PROMPT[:16], (4,)),), transfers=(backup,)))
    news = running.run(Plan(2, 0, transfers=(Transfer(2, "load", (9,), (30,)),)))
    assert Copied(TransferResult(transfer_id=2, ok=True)) in news


def test_a_copy_without_a_host_tier_is_a_programmers_error(model):
    running = Running(model)
    assert running.started.host_pool is None and running.worker.bytes_copied() == {}
    running.worker.submit(Plan(1, 0, transfers=(Transfer(1, "load", (1,), (1,)),)))
    news = running.next()
    assert isinstance(news, Failed) and "step 1 copies, but there is no host tier" in str(news.error)
