"""The simulated cluster. Faked: the wire (entries arrive late), the model (shadow memory), the time.

Shadow memory: a page holds, per offset, the id that was written there last together with a hash of everything
before it. Each rank has its own. A span writes its rows, then reads every row before its end through its page table:
the chain must spell exactly the ids of its own sequence, so a page that was freed too early, repointed wrongly or
never filled is seen at once. The next token is a hash of what was read, so the right output is a pure function of the
prompt and can be computed without any cache.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec

from engine.scheduler.digest import hash64
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequencer import Sequencer
from engine.types import (
    Abort,
    Capacity,
    Control,
    Entry,
    Finish,
    FinishedStep,
    FinishReason,
    Plan,
    Report,
    Request,
    SamplingParams,
    Span,
)
from tests.sim.recount import recount

VOCABULARY = 7
"""Few ids, so that prompts share prefixes by chance and stop tokens come up often."""


def next_token(chain: int) -> int:
    """The simulated model: the token after a prefix with this hash."""
    return chain % VOCABULARY


def extend_chain(chain: int, token_id: int) -> int:
    """The hash of a prefix made longer by one id."""
    return hash64(chain.to_bytes(8, "little") + token_id.to_bytes(4, "little"))


def oracle(request: Request, salt_chain: int = 0) -> tuple[list[int], FinishReason]:
    """What a request must answer, computed without cache, pages or batches."""
    chain = salt_chain
    for token_id in request.prompt_ids:
        chain = extend_chain(chain, token_id)
    output: list[int] = list(request.delivered_ids)
    for token_id in output:
        chain = extend_chain(chain, token_id)
    while True:
        token = next_token(chain)
        output.append(token)
        chain = extend_chain(chain, token)
        sampling = request.sampling
        if token in sampling.stop_token_ids and len(output) >= sampling.min_new_tokens:
            return output, FinishReason(type="stop", matched=token)
        if len(output) >= sampling.max_new_tokens:
            return output, FinishReason(type="length")


class ShadowModel:
    """One rank's memory and arithmetic."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, plan: Plan, expected: dict[int, list[int]]) -> tuple[int, ...]:
        """Write and read as a batch does: all rows are written before any is read."""
        for span in plan.spans:
            self._write(span)
        tokens = []
        for span in plan.spans:
            chain = self._read(span, expected[span.request_id])
            if span.sample is not None:
                tokens.append(next_token(chain))
        return tuple(tokens)

    def _cell(self, span: Span, position: int) -> tuple[int, int]:
        return span.pages[position // self.page_size], position % self.page_size

    def _write(self, span: Span) -> None:
        chain = 0 if span.start == 0 else self.cells[self._cell(span, span.start - 1)][1]
        for position, token_id in enumerate(span.token_ids, start=span.start):
            chain = extend_chain(chain, token_id)
            self.cells[self._cell(span, position)] = (token_id, chain)

    def _read(self, span: Span, ids: list[int]) -> int:
        chain = 0
        for position in range(span.end):
            token_id, seen = self.cells[self._cell(span, position)]
            chain = extend_chain(chain, token_id)
            assert token_id == ids[position] and seen == chain, (
                f"request {span.request_id} reads id {token_id} at position {position} of page "
                f"{self._cell(span, position)[0]}, its own is {ids[position]}"
            )
        return chain


@dataclass
class Rank:
    """One simulated process: a replica, its memory, and entries on their way to it."""

    scheduler: Scheduler
    model: ShadowModel
    inbox: deque[tuple[bytes, int]] = field(default_factory=deque)
    work: deque[Plan] = field(default_factory=deque)


@dataclass
class Client:
    """What one request's client has seen."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    ending: str = ""
    stop_at: int = 0


class Cluster:
    """Drives ranks, wire and clients from one seed."""

    def __init__(self, seed: int, *, ranks: int | None = None, capacities: list[Capacity] | None = None) -> None:
        self.random = random.Random(seed)
        draw = self.random
        page_size = draw.choice((1, 2, 4, 16))
        pages = draw.choice((4, 8, 12, 40, 200)) * (4 if page_size < 4 else 1)
        self.ranks_count = ranks or draw.randint(1, 5)
        depth = draw.choice((1, self.ranks_count, self.ranks_count + 1))
        capacity = Capacity(
            page_size=page_size,
            device_pages=pages,
            max_running_requests=draw.choice((1, 2, 4, 16)),
            chunk_tokens=max(draw.choice((4, 16, 64, 1000)), page_size),
            depth=depth,
            context_length=draw.choice((30, 200)),
        )
        self.capacity = capacity
        policy, caching = draw.choice(("fcfs", "lpm")), draw.random() < 0.9
        per_rank = capacities or [capacity] * self.ranks_count
        self.ranks = [
            Rank(Scheduler(c, schedule_policy=policy, cache_prefixes=caching), ShadowModel(page_size)) for c in per_rank
        ]
        self.leader = self.ranks[0].scheduler
        self.sequencer = Sequencer(self.leader, world_size=len(self.ranks), queued_max=draw.choice((3, 50)))
        self.clients: dict[int, Client] = {}
        self.ids: dict[int, list[int]] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.now = 0.0
        self.shut_down = False
        self.control_id = 0
        self.abort_rate = draw.choice((0.0, 0.02, 0.3))
        self.flush_rate = draw.choice((0.0, 0.02))
        self.finish_rate = draw.choice((0.0, 0.05))
        self.lag = draw.choice((0.1, 0.5, 0.9))
        self.refused = 0
        self.digests: dict[int, int] = {}

    # ---- clients ----

    def arrive(self) -> None:
        """A client asks for something, often with a prefix that was asked for before."""
        draw = self.random
        prompt: tuple[int, ...] = ()
        if self.prompts and draw.random() < 0.7:
            known = draw.choice(self.prompts)
            prompt = known[: draw.randint(0, len(known))]
        prompt += tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 2, 15, 16, 17, 33))))
        delivered = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 0, 0, 3))))
        sampling = SamplingParams(
            max_new_tokens=len(delivered) + draw.choice((1, 2, 5, 40)),
            min_new_tokens=draw.choice((0, 0, 3)),
            stop_token_ids=draw.choice(((), (3,), (1, 5))),
            return_logprob=draw.random() < 0.1,
            logprob_start=draw.choice((-1, 0, 5)),
        )
        count = draw.choice((1, 1, 1, 4))
        first = len(self.clients) + self.refused + 1
        requests = tuple(
            Request(request_id=first + i, rid="r", prompt_ids=prompt, delivered_ids=delivered, sampling=sampling)
            for i in range(count)
        )
        refused = self.sequencer.submit(requests)
        if refused is not None:
            self.refused += count
            return
        self.prompts.append(prompt)
        for request in requests:
            self.clients[request.request_id] = Client(request)
            self.ids[request.request_id] = [*prompt, *delivered]

    def disturb(self) -> None:
        """Aborts, stop strings and flushes at any moment, for live and for ended requests."""
        draw = self.random
        if self.clients and draw.random() < self.abort_rate:
            for _ in range(draw.choice((1, 1, 8))):
                client = draw.choice(list(self.clients.values())[-20:])
                if client.finish is None and not client.ending:
                    client.ending = "abort"
                self.sequencer.abort(Abort(request_id=client.request.request_id, message="client left"))
        if self.clients and draw.random() < self.finish_rate:
            client = draw.choice(list(self.clients.values())[-20:])
            if client.finish is None and not client.ending and client.tokens:
                client.ending, client.stop_at = "finish", len(client.tokens)
                self.sequencer.finish(
                    Finish(request_id=client.request.request_id, kept_tokens=client.stop_at, matched="x")
                )
        if draw.random() < self.flush_rate:
            self.control_id += 1
            self.sequencer.control(Control(action="flush", control_id=self.control_id))

    # ---- the cluster ----

    def lead(self) -> bool:
        """The leader makes an entry if one is due, applies it and puts it on every wire."""
        entry = self.sequencer.next_entry(self.now)
        if entry is None:
            return False
        body = msgspec.msgpack.encode(entry)
        plan = self._apply(self.ranks[0], msgspec.msgpack.decode(body, type=Entry))
        self.sequencer.planned(empty=plan.empty)
        for rank in self.ranks[1:]:
            rank.inbox.append((body, plan.digest))
        for emission in plan.emissions:
            self._deliver(emission)
        for control in plan.controls:
            self.shut_down |= control.action == "shutdown"
        return True

    def _apply(self, rank: Rank, entry: Entry) -> Plan:
        plan = rank.scheduler.apply(entry)
        self.check_depth(rank.scheduler)
        recount(rank.scheduler)
        rank.work.append(plan)
        return plan

    def check_depth(self, scheduler: Scheduler) -> None:
        assert len(scheduler.in_flight) <= self.capacity.depth
        assert len(scheduler.running) <= self.capacity.max_running_requests

    def _deliver(self, emission) -> None:
        client = self.clients[emission.request_id]
        assert client.finish is None, f"request {emission.request_id} hears of itself after its end"
        delivered = len(client.request.delivered_ids)
        if emission.tokens:
            assert emission.first_position == delivered + len(client.tokens), "tokens lost or repeated"
        client.tokens += emission.tokens
        self.ids[emission.request_id] += emission.tokens
        client.finish = emission.finish

    def tick(self) -> bool:
        """Everything that can happen happens, or is late. Returns whether anything did."""
        self.now += 1.0
        moved = False
        for index, rank in enumerate(self.ranks):
            while rank.inbox and self.random.random() > self.lag:
                body, digest = rank.inbox.popleft()
                plan = self._apply(rank, msgspec.msgpack.decode(body, type=Entry))
                assert plan.digest == digest, self.divergence(index)
                moved = True
        for index, rank in enumerate(self.ranks):
            upstream = self.ranks[index - 1].work if index else None
            while rank.work and self.random.random() > self.lag:
                plan = rank.work[0]
                if upstream is not None and upstream and upstream[0].step <= plan.step:
                    break  # The hidden states of this step are not there yet.
                rank.work.popleft()
                moved = True
                self._work(index, rank, plan)
        while self.random.random() > self.lag / 2 and self.lead():
            moved = True
        return moved

    def _work(self, index: int, rank: Rank, plan: Plan) -> None:
        finished: tuple[FinishedStep, ...] = ()
        if plan.spans:
            tokens = rank.model.run(plan, self.ids)
            if index == len(self.ranks) - 1:
                finished = (FinishedStep(step=plan.step, tokens=tokens),)
        self.sequencer.report(Report(rank=index, watermark=plan.step, finished=finished))

    def divergence(self, index: int) -> str:
        """The first field in which a rank parted from the leader."""
        from engine.scheduler.scheduler import STATE_FIELDS

        mine, theirs = self.leader.vector, self.ranks[index].scheduler.vector
        if self.leader.step != self.ranks[index].scheduler.step:
            return f"rank {index} parted at step {self.ranks[index].scheduler.step}"
        name = next(f for f, a, b in zip(STATE_FIELDS, mine, theirs, strict=True) if a != b)
        return f"rank {index} parted at step {self.leader.step} in {name}"

    def run(self, ticks: int) -> None:
        """Load and faults for a while; then faults stop, and all must end within a bound, with every page back."""
        for _ in range(ticks):
            if self.random.random() < 0.3:
                self.arrive()
            self.disturb()
            self.tick()
        self.lag = 0.0
        idle = 0
        for _ in range(20_000):
            moved = self.tick()
            idle = 0 if moved else idle + 1
            if idle > 3:
                break
        stuck = [i for i, client in self.clients.items() if client.finish is None]
        assert not stuck, f"requests {stuck} never ended; waiting {len(self.leader.waiting)}, running {len(self.leader.running)}"
        self.check_end()
        self.sequencer.drain(self.now)
        while not self.shut_down:
            assert self.tick(), "the shutdown was never logged"

    def check_end(self) -> None:
        for client in self.clients.values():
            self.check_client(client)
        for rank in self.ranks:
            books = rank.scheduler.books()
            assert books.protected == 0 and not rank.scheduler.in_flight, books
            assert rank.scheduler.digest == self.leader.digest

    def check_client(self, client: Client) -> None:
        wanted, reason = oracle(client.request)
        got = list(client.request.delivered_ids) + client.tokens
        assert got == wanted[: len(got)], f"request {client.request.request_id} answered {got}, right is {wanted}"
        assert client.finish is not None
        if client.finish.type in ("stop", "length") and client.ending != "finish":
            already = len(client.request.delivered_ids) >= client.request.sampling.max_new_tokens
            assert already or (got == wanted and client.finish == reason), (got, wanted, client.finish, reason)
        if client.finish.type == "abort":
            assert client.ending == "abort"


def run_seed(seed: int, ticks: int = 150) -> Cluster:
    """One whole life of a cluster. Raises AssertionError when anything is not as it must be."""
    cluster = Cluster(seed)
    cluster.run(ticks)
    return cluster
