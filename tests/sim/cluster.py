"""The simulated cluster: the real sequencer and replicas; the wire, the pipeline, the clients and the time are faked.

Entries reach the ranks late, ranks work late, reports come late, all as the seed says. After every entry all plans
and digests are compared, the books are counted again, and pages in use are watched; what every client gets is
compared with what it must get. Then faults stop, and everything must end within a bound.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from engine.mem_cache.tier import DEVICE, HOST
from engine.scheduler import policy
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequencer import DRAIN_MESSAGE, LAG_STEPS_MAX, Sequencer
from engine.scheduler.state_vector import STATE_FIELDS, State
from engine.types import (
    Abort,
    Control,
    Emission,
    Entry,
    Finish,
    FinishedStep,
    FinishReason,
    Plan,
    Report,
    Request,
    Transfer,
    TransferResult,
)
from tests.sim.draws import World, draw_requests, draw_world
from tests.sim.model import Pins, ShadowMemory, Truth, extend_chain, oracle
from tests.sim.recount import recount
from tests.sim.sights import Sights

STEPS_PER_ROW = 2
"""After faults stop: entries that each row still to compute may take, retractions included."""


class Divergence(AssertionError):
    """A replica is not what the leader is. Names the step, the rank and the first field that differs."""

    def __init__(self, step: int, rank: int, field: str, leader: object, other: object) -> None:
        super().__init__(f"step {step}: {field} is {leader} on rank 0 and {other} on rank {rank}")
        self.step, self.rank, self.field = step, rank, field


@dataclass
class Rank:
    """One simulated process: a replica, entries on their way to it, plans it has still to work, copies it makes."""

    scheduler: Scheduler
    memory: ShadowMemory
    inbox: deque[tuple[bytes, Plan, State]] = field(default_factory=deque)
    work: deque[Plan] = field(default_factory=deque)
    copies: list[Transfer] = field(default_factory=list)
    watermark: int = 0
    reported: int = 0


@dataclass
class Client:
    """What one request's client did and saw."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    aborted: bool = False
    stop_at: int | None = None
    cached_tokens: int = 0
    retractions: int = 0


class Cluster:
    """Drives ranks, wire and clients from one seed."""

    def __init__(
        self,
        seed: int,
        ticks: int = 150,
        change: Callable[[World], World] = lambda world: world,
        *,
        host_counts: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.ticks = ticks
        self.world = world = change(draw_world(self.random, ticks))
        counts = world.capacity
        self.ranks = [
            Rank(
                Scheduler(
                    counts,
                    schedule_policy=world.policy,
                    cache_prefixes=world.cache_prefixes,
                    host_counts=host_counts,
                ),
                ShadowMemory(
                    counts.page_size, counts.device_pages, counts.host_pages, reports=rank == world.ranks - 1
                ),
            )
            for rank in range(world.ranks)
        ]
        self.leader = self.ranks[0].scheduler
        self.sequencer = Sequencer(self.leader, world_size=world.ranks, queued_max=world.queued_max)
        self.pins = Pins(world.capacity.page_size)
        self.clients: dict[int, Client] = {}
        self.truths: dict[int, Truth] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.answers: list[int] = []
        self.next_id, self.controls_sent = 1, 0
        self.now = 0.0
        self.lag = world.lag
        self.healed = False
        self.drained_by = 0.0
        self.shut_down = False
        self.sights = Sights(self.leader)
        self.seen = self.sights.seen
        self.before_apply: Callable[[int, Scheduler, Entry], Entry] = lambda rank, scheduler, entry: entry

    # ---- clients ----

    def arrive(self) -> None:
        requests = draw_requests(self.random, self.world, self.next_id, self.prompts)
        self.next_id += len(requests)
        refused = self.sequencer.submit(requests)
        fits = not any(policy.does_not_fit(request, self.world.capacity) for request in requests)
        if refused is not None:
            self.seen[f"refused {refused.status}"] += 1
            assert (refused.status == 400) == (not fits)
            assert refused.request_ids == tuple(request.request_id for request in requests)
            return
        assert fits and not self.sequencer.draining
        if requests[0].prompt_ids not in self.prompts:
            self.prompts.append(requests[0].prompt_ids)
        for request in requests:
            self.clients[request.request_id] = Client(request)
            self.truths[request.request_id] = Truth(request)
        if self.random.random() < self.world.abort_new_rate:
            self.abort(self.clients[self.random.choice(requests).request_id])

    def abort(self, client: Client) -> None:
        client.aborted = client.aborted or client.finish is None
        self.sequencer.abort(Abort(request_id=client.request.request_id, message="client left"))

    def disturb(self) -> None:
        """Aborts, stop strings and flushes at any moment, for live, ended and unknown requests."""
        draw, world = self.random, self.world
        recent = list(self.clients.values())[-20:]
        if recent and draw.random() < world.abort_rate:
            for _ in range(draw.choice((1, 1, 8))):
                self.abort(draw.choice(recent))
            self.sequencer.abort(Abort(request_id=10**9, message="nobody"))
        live = [client for client in self.clients.values() if client.finish is None]
        if draw.random() < world.storm_rate:
            self.seen["storms"] += 1
            for client in draw.sample(live, draw.randint(len(live) // 2, len(live))):
                self.abort(client)
        for client in live:
            missing = client.request.sampling.max_new_tokens - self.generated(client)
            if missing == 1 and draw.random() < world.abort_last_rate:
                self.abort(client)
        for sequence in list(self.leader.loading.values()):
            if draw.random() < world.abort_loading_rate:
                self.abort(self.clients[sequence.request.request_id])
        if recent and draw.random() < world.finish_rate:
            client = draw.choice(recent)
            if client.tokens:
                if client.finish is None and client.stop_at is None:
                    client.stop_at = self.generated(client)
                stop = Finish(
                    request_id=client.request.request_id, kept_tokens=client.stop_at or 0, matched="x"
                )
                self.sequencer.finish(stop)
        leader = self.leader
        # Often in the rare moment when only copies are under way.
        only_copies = bool(leader.hicache.under_way) and not leader.live and not leader.in_flight
        if draw.random() < world.flush_rate * (20 if only_copies else 1):
            self.control("flush")
        if world.frozen_from < self.now <= world.frozen_to:
            self.control("status")  # News without end: only the limit on lag stops the leader now.

    def control(self, action: str) -> None:
        self.controls_sent += 1
        self.sequencer.control(Control(action=action, control_id=self.controls_sent))

    def generated(self, client: Client) -> int:
        return len(client.request.delivered_ids) + len(client.tokens)

    # ---- the cluster ----

    def tick(self) -> bool:
        """Everything that can happen happens, or is late. Returns whether anything did."""
        self.now += 1.0
        moved = False
        for index, rank in enumerate(self.ranks):
            while rank.inbox and self.in_time(index):
                self.follow(index, rank)
                moved = True
        for index, rank in enumerate(self.ranks):
            while rank.work and self.in_time(index):
                if index and self.ranks[index - 1].watermark < rank.work[0].step:
                    break  # The hidden states of this step are not there yet.
                self.work(index, rank, rank.work.popleft())
                moved = True
        for index, rank in enumerate(self.ranks):
            moved |= self.copy(index, rank)
        while not self.shut_down and self.random.random() > self.lag / 2 and self.lead():
            moved = True
        return moved

    def in_time(self, index: int) -> bool:
        frozen = self.world.frozen_from < self.now <= self.world.frozen_to
        return self.random.random() > self.lag and not (frozen and index == self.world.frozen_rank)

    def lead(self) -> bool:
        """The leader makes an entry if one is due, applies it and puts it on every wire."""
        entry = self.sequencer.next_entry(self.now)
        lag = self.leader.step + 1 - min(rank.reported for rank in self.ranks)
        assert entry is None or lag <= LAG_STEPS_MAX, f"an entry although a rank lags by {lag} steps"
        if entry is None:
            self.seen["stopped for a laggard"] += lag > LAG_STEPS_MAX
            return False
        self.sights.before(entry)
        plan = self.leader.apply(entry)
        self.sights.after(entry, plan)
        self.sequencer.planned(empty=plan.empty)
        self.pins.settle([result.transfer_id for result in entry.settled])
        self.pins.retire([retired.step for retired in entry.retired])
        self.pins.plan(plan)
        recount(self.leader)
        self.ranks[0].work.append(plan)
        body = msgspec.msgpack.encode(entry)
        for rank in self.ranks[1:]:
            rank.inbox.append((body, plan, self.leader.state))
        for emission in plan.emissions:
            self.deliver(emission)
        self.answer(plan)
        self.observe()
        return True

    def follow(self, index: int, rank: Rank) -> None:
        """A rank applies an entry and compares itself with the leader before it works."""
        body, plan, state = rank.inbox.popleft()
        entry = msgspec.msgpack.decode(body, type=Entry)
        mine = rank.scheduler.apply(self.before_apply(index, rank.scheduler, entry))
        if mine.digest != plan.digest:
            for name, leader, other in zip(
                STATE_FIELDS, state.numbers, rank.scheduler.state.numbers, strict=True
            ):
                if leader != other:
                    raise Divergence(plan.step, index, name, leader, other)
            raise Divergence(plan.step, index, "an earlier step", plan.digest, mine.digest)
        assert mine == plan, f"step {plan.step}: equal digests, but rank {index} plans {mine} and not {plan}"
        rank.work.append(mine)

    def work(self, index: int, rank: Rank, plan: Plan) -> None:
        """Do a step's work; the last stage samples. News is reported, else now and then the watermark."""
        self.begin(rank, plan, "load")
        finished: tuple[FinishedStep, ...] = ()
        if plan.spans and (self.world.capacity.host_pages or index == len(self.ranks) - 1):
            tokens = rank.memory.run(plan, self.truths)
            finished = (FinishedStep(step=plan.step, tokens=tokens),) if index == len(self.ranks) - 1 else ()
        self.begin(rank, plan, "backup")
        rank.watermark = plan.step
        if finished or rank.watermark - rank.reported >= self.world.report_steps:
            self.report(index, rank, finished=finished)

    def begin(self, rank: Rank, plan: Plan, kind: str) -> None:
        """Loads begin before a step's spans are computed, backups after."""
        for transfer in plan.transfers:
            if transfer.kind == kind:
                rank.memory.begin(transfer)
                rank.copies.append(transfer)

    def copy(self, index: int, rank: Rank) -> bool:
        """Copies end in any order, at any time, well or not. Returns whether any is under way or has ended."""
        world, draw, done = self.world, self.random, list[TransferResult]()
        lag = 0.0 if self.healed else world.copy_lag[index]
        under_way = bool(rank.copies)
        for transfer in draw.sample(rank.copies, len(rank.copies)):
            if draw.random() >= lag and self.in_time(index):
                rank.copies.remove(transfer)
                fails = not self.healed and draw.random() < world.copy_fail_rate
                damage = draw.random() < world.copy_damage_rate
                ok = not fails and rank.memory.finish(transfer, damage=damage)
                self.seen["damaged pages found"] += not fails and not ok
                done.append(TransferResult(transfer_id=transfer.transfer_id, ok=ok))
        if done:
            self.report(index, rank, transfers=tuple(done))
        return under_way

    def report(self, index: int, rank: Rank, **news: tuple) -> None:
        rank.reported = rank.watermark
        self.sequencer.report(Report(rank=index, watermark=rank.watermark, **news))

    def observe(self) -> None:
        """Look for what must never be, and count what tests want to have seen."""
        leader, capacity, seen = self.leader, self.world.capacity, self.seen
        assert (
            len(leader.in_flight) <= capacity.depth and len(leader.running) <= capacity.max_running_requests
        )
        patient = self.world.policy == "lpm" or capacity.host_pages
        patience = capacity.max_running_requests + (policy.OVERTAKEN_MAX if patient else 0)
        for sequence in leader.live.values():
            assert sequence.overtaken <= patience, f"overtaken {sequence.overtaken} times"
            client = self.clients[sequence.request.request_id]
            if sequence.retractions > client.retractions:
                client.retractions = sequence.retractions
                seen["retracted"] += 1
                seen["retracted while prefilling"] += sequence.generated == len(client.request.delivered_ids)
                seen["retracted again"] += sequence.retractions > 1
                seen["retracted with prompt log probabilities"] += bool(
                    self.truths[client.request.request_id].positions_wanted()
                )
        seen["steps with duplicate pages"] += leader.allocator.pending > 0

    def deliver(self, emission: Emission) -> None:
        client = self.clients[emission.request_id]
        assert client.finish is None, f"request {emission.request_id} hears of itself after its end"
        assert emission.tokens or emission.finish is not None
        first = self.generated(client)
        assert emission.first_position == first, "tokens lost or repeated"
        client.tokens += emission.tokens
        for token in emission.tokens:
            self.truths[emission.request_id].append(token)
        client.finish = emission.finish
        if first == len(client.request.delivered_ids):
            client.cached_tokens = emission.cached_tokens
            self.seen["host hits"] += emission.cached_host_tokens > 0
        assert emission.cached_tokens == client.cached_tokens < len(client.request.prompt_ids) + first
        assert 0 <= emission.cached_host_tokens <= emission.cached_tokens
        assert emission.retractions == client.retractions

    def answer(self, plan: Plan) -> None:
        """Each control is answered once; a flush is refused exactly while something is under way."""
        busy = bool(self.leader.live or self.leader.in_flight)
        copying = bool(self.leader.hicache.under_way)
        for control in plan.controls:
            self.answers += [control.control_id] if control.control_id else []
            if control.action == "flush":
                self.seen["flushed"] += 1
                assert self.leader.cache.device.books().available == self.leader.cache.device.books().capacity
            if control.action == "shutdown":
                assert self.sequencer.draining and not busy
                assert not copying or self.now >= self.drained_by
                self.shut_down = True
        for result in plan.control_failures:
            self.answers.append(result.control_id)
            self.seen["flush refused"] += 1
            assert (busy or copying) and not result.ok and "not flushed" in result.message
            self.seen["flush refused for copies"] += not busy

    # ---- a life ----

    def run(self) -> None:
        """Load and faults for a while; then faults stop, and all must end within a bound, with every page back."""
        for tick in range(self.ticks):
            if self.shut_down:
                break
            if self.random.random() < self.world.arrival_rate:
                self.arrive()
            self.disturb()
            if tick == self.world.drain_tick:
                self.seen["drained under load"] += bool(self.leader.live)
                self.seen["drained while copying"] += bool(self.leader.hicache.under_way)
                self.drained_by = self.now + self.world.drain_ticks
                self.sequencer.drain(self.drained_by)
            self.tick()
        self.lag, self.healed = 0.0, True
        self.settle()
        if not self.sequencer.draining:
            assert not self.leader.live, f"requests {list(self.leader.live)} never ended"
            self.drained_by = self.now + 10**9
            self.sequencer.drain(self.drained_by)
            self.settle()
        assert self.shut_down, "the shutdown was never logged"
        self.check_end()

    def settle(self) -> None:
        """Without faults, go on until nothing moves; every row has its share of steps, and no more."""
        requests = [client.request for client in self.clients.values() if client.finish is None]
        rows = sum(len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests)
        queued = sum(len(rank.inbox) + len(rank.work) for rank in self.ranks)
        last = self.leader.step + STEPS_PER_ROW * rows * self.world.capacity.depth + queued + 100
        still = 0
        while still < 3:
            still = 0 if self.tick() or self.now <= self.world.frozen_to else still + 1
            copies = self.seen["loads"] + self.seen["backups"]
            assert self.leader.step <= last + copies, f"{len(self.leader.live)} requests do not end"

    def check_end(self) -> None:
        for client in self.clients.values():
            self.check_client(client)
        assert sorted(self.answers) == list(range(1, self.controls_sent + 1)), (
            "a control was not answered once"
        )
        for rank in self.ranks:
            recount(rank.scheduler)
            assert not rank.scheduler.in_flight and not rank.scheduler.loading
            if rank.scheduler.hicache.under_way:
                self.seen["ended while copying"] += 1
                assert self.now >= self.drained_by
            else:
                assert rank.scheduler.cache.device.books().protected == 0
            assert rank.scheduler.digest == self.leader.digest
            self.check_cache(rank)
        cache = self.leader.cache
        self.seen["evicted"] = cache.device.pages_evicted
        self.seen["demoted"] = cache.device.pages_kept
        self.seen["evicted from the host"] = cache.host.pages_evicted - cache.host.pages_kept
        self.seen["mirrors dropped"] = cache.host.pages_kept

    def check_cache(self, rank: Rank) -> None:
        """Every page that a tier says it holds holds on this rank what its path spells; damage is known as such."""
        size, cache, memory = self.world.capacity.page_size, rank.scheduler.cache, rank.memory
        for node in cache.nodes() if self.world.capacity.host_pages else ():
            path = [each for _, each in cache.path(node)]
            salt, ids = path[0].edge[: -size * 4], array("I", b"".join(each.key for each in path))
            chains = [zlib.crc32(salt) + 1]
            for token_id in ids:
                chains.append(extend_chain(chains[-1], token_id))
            begin = len(ids) // size - node.page_count
            for tier, pages in ((DEVICE, memory.pages), (HOST, memory.host_pages)):
                for place, page in enumerate(node.held[tier], start=begin):
                    right = chains[place * size + 1 : (place + 1) * size + 1]
                    known_bad = tier == HOST and page in memory.damaged
                    assert pages[page] == right or known_bad, f"tier {tier} page {page} holds other rows"

    def check_client(self, client: Client) -> None:
        """An end that nobody forced is the oracle's; a forced one comes after a prefix of the oracle's answer."""
        request, finish = client.request, client.finish
        wanted, reason = oracle(request)
        got = [*request.delivered_ids, *client.tokens]
        name = f"request {request.request_id}"
        assert got == wanted[: len(got)], f"{name} answered {got}, right is {wanted}"
        assert finish is not None, f"{name} never ended"
        self.seen[f"ended by {finish.type}"] += 1
        truth = self.truths[request.request_id]
        assert len(set(truth.positions_told)) == len(truth.positions_told), (
            f"{name}: a log probability came twice"
        )
        if finish.type == "abort":
            assert client.aborted or finish.message == DRAIN_MESSAGE, f"{name} was aborted by nobody"
            return
        if client.tokens:
            assert sorted(truth.positions_told) == truth.positions_wanted(), f"{name} lacks log probabilities"
        if finish.matched == "x":
            self.seen["ended at a stop string"] += 1
            assert client.stop_at is not None and len(got) >= client.stop_at
        else:
            assert got == wanted and finish == reason, f"{name}: {got} {finish}, right is {wanted} {reason}"


def run_seed(seed: int, ticks: int = 150) -> Cluster:
    """One whole life of a cluster. Raises AssertionError when anything is not as it must be."""
    cluster = Cluster(seed, ticks)
    cluster.run()
    return cluster
