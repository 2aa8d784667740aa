"""The sequencer: when an entry is due, what the inbox refuses, how far the leader runs ahead, how it drains."""

from __future__ import annotations

import pytest

from engine.scheduler import sequencer
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequencer import DRAIN_MESSAGE, LAG_STEPS_MAX, Sequencer
from engine.types import (
    Abort,
    Control,
    Entry,
    Finish,
    FinishedStep,
    Plan,
    Report,
    RetiredStep,
    TransferResult,
)
from tests.sim.single import capacity, request


class Leader:
    """A sequencer with its replica, as the leader joins them."""

    def __init__(self, *, world_size: int = 1, queued_max: int = 100, **changes: int) -> None:
        self.scheduler = Scheduler(capacity(**changes))
        self.sequencer = Sequencer(self.scheduler, world_size=world_size, queued_max=queued_max)

    def turn(self, now: float = 0.0) -> tuple[Entry, Plan] | None:
        entry = self.sequencer.next_entry(now)
        if entry is None:
            return None
        plan = self.scheduler.apply(entry)
        self.sequencer.planned(empty=plan.empty)
        return entry, plan

    def finish_step(self, step: int, *tokens: int, rank: int = 0) -> None:
        finished = (FinishedStep(step=step, tokens=tokens),)
        self.sequencer.report(Report(rank=rank, watermark=step, finished=finished))

    def copied(self, transfer_id: int, *, rank: int = 0, ok: bool = True) -> None:
        result = TransferResult(transfer_id=transfer_id, ok=ok)
        self.sequencer.report(Report(rank=rank, watermark=self.scheduler.step, transfers=(result,)))


def test_an_idle_leader_makes_no_entry():
    assert Leader().turn() is None


def test_news_makes_an_entry_and_a_full_pipeline_waits_for_more():
    leader = Leader(depth=2, chunk_tokens=4)
    leader.sequencer.submit((request(1, range(20)),))
    entry, plan = leader.turn()
    assert entry.step == 1 and len(entry.arrivals) == 1 and not plan.empty
    entry, plan = leader.turn()
    assert entry == Entry(step=2) and not plan.empty, "no news, but a second step may be in flight"
    assert leader.turn() is None, "two are in flight"
    leader.finish_step(1)
    entry, plan = leader.turn()
    assert entry.retired == (RetiredStep(step=1),) and not plan.empty


def test_an_empty_plan_waits_for_news():
    leader = Leader(depth=3)
    leader.sequencer.submit((request(1, range(4)),))
    assert not leader.turn()[1].empty
    assert leader.turn()[1].empty, "one token is being sampled, there is nothing else to do"
    assert leader.turn() is None
    leader.finish_step(1, 50)
    assert not leader.turn()[1].empty


def test_news_is_coalesced_in_the_order_of_the_entrys_fields():
    leader = Leader()
    leader.sequencer.submit((request(1, range(4)),))
    leader.turn()
    leader.sequencer.control(Control(action="flush", control_id=5))
    leader.sequencer.abort(Abort(request_id=1, message="left"))
    leader.sequencer.submit((request(2, range(4)), request(3, range(4))))
    leader.finish_step(1, 50)
    entry, plan = leader.turn()
    assert [r.request_id for r in entry.arrivals] == [2, 3]
    assert len(entry.retired) == len(entry.aborts) == len(entry.controls) == 1
    assert [(e.tokens, e.finish.type) for e in plan.emissions if e.finish] == [((50,), "abort")]


def test_nobody_hears_of_requests_that_are_not_alive():
    leader = Leader()
    leader.sequencer.abort(Abort(request_id=1, message="left"))
    leader.sequencer.finish(Finish(request_id=1, kept_tokens=1, matched="x"))
    assert leader.turn() is None
    leader.sequencer.submit((request(1, range(4)),))
    leader.sequencer.abort(Abort(request_id=1, message="left"))
    entry, plan = leader.turn()
    assert entry.arrivals and entry.aborts and plan.empty, "alive from its submission on"


def test_the_leader_stops_when_a_rank_lags_and_goes_on_when_it_catches_up():
    leader = Leader(world_size=2, depth=1)
    leader.sequencer.report(Report(rank=0, watermark=10**6))
    for i in range(LAG_STEPS_MAX):
        leader.sequencer.control(Control(action="status", control_id=i))
        assert leader.turn() is not None
    leader.sequencer.control(Control(action="status", control_id=99))
    assert leader.turn() is None and leader.scheduler.step == LAG_STEPS_MAX
    leader.sequencer.report(Report(rank=1, watermark=1))
    entry, _ = leader.turn()
    assert entry.step == LAG_STEPS_MAX + 1 and [c.control_id for c in entry.controls] == [99]


def test_a_late_report_does_not_set_a_watermark_back():
    leader = Leader()
    leader.sequencer.report(Report(rank=0, watermark=70))
    leader.sequencer.report(Report(rank=0, watermark=2))
    for i in range(70):
        leader.sequencer.control(Control(action="status", control_id=i))
        assert leader.turn() is not None


def test_a_submission_is_taken_or_refused_as_a_whole():
    leader = Leader(page_size=4, device_pages=5)
    refused = leader.sequencer.submit((request(1, range(4)), request(2, range(18), new=4)))
    assert (refused.status, refused.request_ids) == (400, (1, 2))
    assert "18" in refused.message and "24" in refused.message and "20" in refused.message
    assert leader.turn() is None
    assert leader.sequencer.submit((request(1, range(4)), request(2, range(17), new=4))) is None


def test_a_full_queue_answers_429_and_counts_free_slots():
    """sglang#33858: with 2 slots and 3 places in the queue, 5 are taken and the 6th hears of it at once."""
    leader = Leader(max_running_requests=2, queued_max=3)
    for i in range(5):
        assert leader.sequencer.submit((request(i, range(4), new=50),)) is None
    assert leader.sequencer.submit((request(9, range(4)),)).status == 429
    leader.turn()
    leader.finish_step(1, 5, 5)
    leader.turn()
    assert len(leader.scheduler.running) == 2
    refused = leader.sequencer.submit((request(9, range(4)),))
    assert refused.status == 429 and "4 requests would wait, at most 3 may" in refused.message
    leader.sequencer.abort(Abort(request_id=0, message="left"))
    leader.turn()
    assert leader.sequencer.submit((request(9, range(4)),)) is None


def test_the_ids_that_wait_to_be_logged_are_limited(monkeypatch: pytest.MonkeyPatch):
    """An entry takes all that waits, and must fit into a frame; what comes alone has come in a frame."""
    monkeypatch.setattr(sequencer, "INBOX_IDS_MAX", 50)
    leader = Leader()
    assert leader.sequencer.submit((request(1, range(60)),)) is None
    refused = leader.sequencer.submit((request(2, range(4)),))
    assert refused.status == 429 and "64 tokens would wait to be logged, at most 50 may" in refused.message
    leader.turn()
    assert leader.sequencer.submit((request(2, range(40)),)) is None
    assert leader.sequencer.submit((request(3, range(10)),)) is None
    assert leader.sequencer.submit((request(4, range(1)),)).status == 429


def test_a_second_abort_is_no_news():
    leader = Leader()
    leader.sequencer.submit((request(1, range(4)),))
    for message in ("left", "left again"):
        leader.sequencer.abort(Abort(request_id=1, message=message))
    entry, _ = leader.turn()
    assert [abort.message for abort in entry.aborts] == ["left"]


def test_a_drain_refuses_newcomers_lets_the_rest_finish_and_shuts_down():
    leader = Leader()
    leader.sequencer.submit((request(1, range(4), new=2),))
    leader.sequencer.drain(deadline=100.0)
    refused = leader.sequencer.submit((request(2, range(4)),))
    assert (refused.status, refused.message) == (503, DRAIN_MESSAGE)
    leader.turn()
    leader.finish_step(1, 50)
    leader.turn()
    assert leader.turn(now=99.0) is None
    leader.finish_step(2, 51)
    entry, plan = leader.turn(now=99.0)
    assert plan.emissions[0].finish.type == "length" and not entry.controls
    entry, plan = leader.turn(now=99.0)
    assert [control.action for control in plan.controls] == ["shutdown"]
    assert leader.turn(now=1000.0) is None, "it is logged once"


def test_what_lives_at_the_deadline_of_a_drain_is_aborted():
    leader = Leader(depth=1)
    leader.sequencer.submit((request(1, range(4), new=9),))
    leader.turn()
    leader.sequencer.submit((request(2, range(4), new=9),))
    leader.sequencer.drain(deadline=5.0)
    leader.sequencer.abort(Abort(request_id=1, message="left"))
    aborted = []
    for _ in range(3):
        turn = leader.turn(now=5.0)
        aborted += [(a.request_id, a.status) for a in turn[0].aborts] if turn else []
    assert aborted == [(1, 499), (2, 503)], "each once, those not logged yet as well"
    leader.finish_step(1, 50)
    leader.turn(now=5.0)
    entry, _ = leader.turn(now=5.0)
    assert entry.controls[0].action == "shutdown"


def test_an_idle_leader_that_drains_shuts_down_at_once():
    leader = Leader()
    leader.sequencer.drain(deadline=100.0)
    assert leader.sequencer.draining
    entry, _ = leader.turn()
    assert entry.controls[0].action == "shutdown"


# ---- copies ----


def copying(*, world_size: int = 2, requests: int = 1, **changes: int) -> Leader:
    """Requests have run, and the copies of their prefixes to the host, numbered from 1 on, are under way."""
    leader = Leader(world_size=world_size, host_pages=32, depth=requests, **changes)
    for number in range(1, requests + 1):
        leader.sequencer.submit((request(number, [number] * 9, new=1),))
        _, plan = leader.turn()
        assert [transfer.transfer_id for transfer in plan.transfers] == [number]
    for number in range(1, requests + 1):
        leader.finish_step(number, 50)
    leader.turn()
    assert not leader.scheduler.live and leader.turn() is None
    return leader


def test_a_copy_settles_when_every_rank_has_reported_it():
    leader = copying(world_size=3)
    for rank in (2, 0):
        leader.copied(1, rank=rank)
        assert leader.turn() is None
    leader.copied(1, rank=1)
    entry, _ = leader.turn()
    assert entry == Entry(step=3, settled=(TransferResult(transfer_id=1, ok=True),))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_on_one_rank_is_one_for_all(failing: int):
    leader = copying(world_size=3)
    for rank in range(3):
        leader.copied(1, rank=rank, ok=rank != failing)
    entry, _ = leader.turn()
    assert entry.settled == (TransferResult(transfer_id=1, ok=False),)


def test_copies_are_told_apart_by_their_ids_and_not_counted():
    """sglang#27285: two ranks that have each finished one copy have not finished the same one."""
    leader = copying(requests=2)
    leader.copied(1, rank=0)
    leader.copied(2, rank=1)
    assert leader.turn() is None
    leader.copied(2, rank=0)
    entry, _ = leader.turn()
    assert [result.transfer_id for result in entry.settled] == [2]
    leader.copied(1, rank=1)
    entry, _ = leader.turn()
    assert [result.transfer_id for result in entry.settled] == [1]


def test_a_rank_that_reports_a_copy_twice_is_a_programmers_error():
    leader = copying()
    leader.copied(1)
    with pytest.raises(AssertionError, match="rank 0 reports transfer 1 twice"):
        leader.copied(1)


def test_a_load_that_has_settled_does_not_wait_since_somebody_waits_for_it():
    leader = Leader(host_pages=32, device_pages=8)
    for number, prompt in ((1, [1] * 13), (2, [2] * 32)):  # The second pushes the first out of the device.
        leader.sequencer.submit((request(number, prompt, new=1),))
        step = leader.turn()[0].step
        leader.finish_step(step, 50)
        leader.copied(number)
        leader.turn()
    leader.sequencer.submit((request(3, [3] * 3, new=9), request(4, [1] * 13, new=1)))
    _, plan = leader.turn()
    [load] = plan.transfers
    assert load.kind == "load" and len(plan.spans) == 1 and leader.turn() is None
    leader.copied(load.transfer_id)
    entry, _ = leader.turn()
    assert len(entry.settled) == 1 and not entry.retired


def test_a_drain_waits_for_copies():
    """LMCache#4185: nothing is shut down under a copy, as long as there is time."""
    leader = copying()
    leader.sequencer.drain(deadline=1000.0)
    leader.copied(1, rank=0)
    for now in (0.0, 2.0, 999.0):
        assert leader.turn(now=now) is None
    leader.copied(1, rank=1)
    entry, plan = leader.turn(now=999.0)
    assert len(entry.settled) == 1 and not plan.controls
    entry, _ = leader.turn(now=999.0)
    assert [control.action for control in entry.controls] == ["shutdown"]


def test_a_copy_that_hangs_does_not_outlast_a_drain():
    leader = copying()
    leader.sequencer.drain(deadline=10.0)
    assert leader.turn(now=9.0) is None
    entry, _ = leader.turn(now=10.0)
    assert [control.action for control in entry.controls] == ["shutdown"]
