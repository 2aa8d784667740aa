"""The replicated state machine: `Scheduler.apply(entry) -> Plan`, the one door through which its state changes.

It is a pure function of the entries so far: no clock, no randomness, no order that a hash decides, integers only.
Every rank runs one; given the same entries all make the same plans, and each plan's digest proves it. The order
inside one step is that of the entry's fields, then admission, then the plan:

    settled transfers -> retired steps and their tokens -> finishes -> arrivals -> aborts -> controls -> plan

It owns the sequences and the books (allocators, radix cache, copies). It never moves a byte: plans name pages, ranks
copy.
"""

from __future__ import annotations

import bisect
from collections import deque

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.hicache import HiCache
from engine.mem_cache.radix_cache import TOKEN_BYTES, RadixCache
from engine.mem_cache.tier import Node
from engine.scheduler import policy
from engine.scheduler.digest import fold_digest
from engine.scheduler.sequence import Sequence, State
from engine.scheduler.state_vector import Events, take_state
from engine.types import (
    Abort,
    Capacity,
    Control,
    ControlResult,
    Emission,
    Entry,
    Finish,
    FinishReason,
    Plan,
    Request,
    RetiredStep,
    Span,
    TransferResult,
)

_RETIRED, _FINISH, _ARRIVAL, _ABORT, _CONTROL = range(1, 6)


class Scheduler:
    """One replica. Built from agreed counts, never from bytes."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        schedule_policy: str = "fcfs",
        cache_prefixes: bool = True,
        host_counts: bool = True,
    ) -> None:
        """Without `host_counts` the digest covers what the host's capacity leads to, but not the capacity."""
        self.capacity = capacity
        self.step = 0
        self.digest = 0
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended: dict[int, Sequence] = {}
        self.in_flight: deque[tuple[int, list[tuple[Sequence, bool]]]] = deque()
        self.arrived = self.finished = self.retractions = 0
        self.loading: dict[int, Sequence] = {}
        self.events = events = Events()
        self.allocator = PageAllocator(capacity.device_pages, events.device_allocator)
        host_allocator = PageAllocator(capacity.host_pages, events.host_allocator)
        self.cache = RadixCache(capacity.page_size, self.allocator, events.tree, host_allocator)
        self.hicache = HiCache(self.cache, capacity.write_policy, events.copies)
        self._policy = schedule_policy
        self._cache_prefixes = cache_prefixes
        self._host_counts = host_counts
        self.state = take_state(self, host_counts=host_counts)
        self._news: dict[int, Emission] = {}

    # ---- the one door ----

    def apply(self, entry: Entry) -> Plan:
        """Take the next entry and say what its step does."""
        assert entry.step == self.step + 1, f"entry {entry.step} applied after step {self.step}"
        self.step = entry.step
        self._news = {}
        for result in entry.settled:
            self._settle(result)
        for retired in entry.retired:
            self._retire(retired)
        for finish in entry.finishes:
            self._finish(finish)
        for request in entry.arrivals:
            self._arrive(request)
        for abort in entry.aborts:
            self._abort(abort)
        done, failed = self._control(entry.controls)
        spans = self._plan()
        transfers = self.hicache.plan()
        self.state = take_state(self, host_counts=self._host_counts)
        self.digest = fold_digest(self.digest, self.state.counters, self.state.events)
        return Plan(
            step=self.step,
            digest=self.digest,
            spans=tuple(spans),
            transfers=transfers,
            emissions=tuple(self._news.values()),
            controls=done,
            control_failures=failed,
        )

    # ---- what an entry brings ----

    def _settle(self, result: TransferResult) -> None:
        """A copy has ended on all ranks. Whoever waited for it looks again at what is cached and goes on."""
        pages_loaded = self.hicache.settle(result)
        sequence = self.loading.pop(result.transfer_id, None)
        if sequence is None:
            return
        node, pages, size = sequence.node, sequence.pages, self.capacity.page_size
        assert node is not None, f"request {sequence.request.request_id} loads without a node"
        sequence.loading = 0
        self._attach(sequence, sequence.cache_pages_max(size))
        sequence.found(pages_loaded * size)
        self.cache.unlock(node)
        self.allocator.release(pages)

    def _retire(self, retired: RetiredStep) -> None:
        """A step has run: its tokens become ids, and what it alone named becomes free."""
        assert self.in_flight, f"step {retired.step} retired, but none is in flight"
        step, rows = self.in_flight.popleft()
        assert step == retired.step, f"step {retired.step} retired, but the oldest in flight is {step}"
        self.events.inputs.note(_RETIRED, step, len(retired.tokens), *retired.tokens)
        samples_count = sum(samples for _, samples in rows)
        assert len(retired.tokens) == samples_count, (
            f"step {step} brought {len(retired.tokens)} tokens, but {samples_count} of its spans sample"
        )
        tokens = iter(retired.tokens)
        for sequence, samples in rows:
            sequence.in_flight -= 1
            token = next(tokens) if samples else None
            if sequence.state is State.ENDED:
                if sequence.in_flight == 0:
                    del self.ended[sequence.request.request_id]
                    self._release(sequence)
            elif token is not None:
                self._take_token(sequence, token)
        self.allocator.retire(step)

    def _take_token(self, sequence: Sequence, token: int) -> None:
        sequence.append(token)
        self._tell(sequence, tokens=(token,))
        sampling = sequence.request.sampling
        if token in sampling.stop_token_ids:  # The sampler never chooses one before `min_new_tokens`.
            self._end(sequence, FinishReason(type="stop", matched=token))
        elif sequence.generated >= sampling.max_new_tokens:
            self._end(sequence, FinishReason(type="length"))

    def _finish(self, finish: Finish) -> None:
        """A stop string was found in the text: the tokens after `kept_tokens` never were."""
        self.events.inputs.note(_FINISH, finish.request_id, finish.kept_tokens)
        sequence = self.live.get(finish.request_id)
        if sequence is not None:
            self._end(sequence, FinishReason(type="stop", matched=finish.matched))

    def _arrive(self, request: Request) -> None:
        self.arrived += 1
        problem = policy.does_not_fit(request, self.capacity)
        assert not problem, f"request {request.request_id} passed the door, but {problem}"
        assert request.request_id not in self.live, f"request {request.request_id} arrived twice"
        sequence = Sequence(request, self.arrived)
        self.events.inputs.note(_ARRIVAL, *sequence.facts())
        self.live[request.request_id] = sequence
        if sequence.generated >= request.sampling.max_new_tokens:
            self._end(sequence, FinishReason(type="length"))
        else:
            self.waiting.append(sequence)

    def _abort(self, abort: Abort) -> None:
        self.events.inputs.note(_ABORT, abort.request_id, abort.status)
        sequence = self.live.get(abort.request_id)
        if sequence is not None:
            self._end(sequence, FinishReason(type="abort", message=abort.message, status=abort.status))

    def _control(
        self, controls: tuple[Control, ...]
    ) -> tuple[tuple[Control, ...], tuple[ControlResult, ...]]:
        done, failed = [], []
        for control in controls:
            self.events.inputs.note(_CONTROL, control.control_id, int(control.action == "flush"))
            if control.action == "flush":
                counts = len(self.live), len(self.in_flight), len(self.hicache.under_way)
                if any(counts):
                    text = "not flushed: {} requests, {} steps and {} copies are under way".format(*counts)
                    failed.append(ControlResult(control_id=control.control_id, ok=False, message=text))
                    continue
                self.cache.flush()
            done.append(control)
        return tuple(done), tuple(failed)

    # ---- ends ----

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request wherever it is. Pages that steps in flight name stay held until those retire."""
        self._tell(sequence, finish=reason)
        del self.live[sequence.request.request_id]
        if sequence.state is State.WAITING:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state = State.ENDED
        self.finished += 1
        if sequence.in_flight:
            self.ended[sequence.request.request_id] = sequence
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.loading.pop(sequence.loading, None)  # The copy goes on without it.
        sequence.loading = 0
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
            sequence.node = None
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.in_tree = sequence.computed = 0

    def _retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait: it becomes what it was, prompt plus delivered ids."""
        assert not sequence.in_flight, f"request {sequence.request.request_id} retracted with spans in flight"
        self._release(sequence)
        self.running.remove(sequence)
        sequence.state = State.WAITING
        sequence.retractions += 1
        self.retractions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.number)

    def _tell(
        self, sequence: Sequence, tokens: tuple[int, ...] = (), finish: FinishReason | None = None
    ) -> None:
        """Add to what this step tells the client of a request."""
        known = self._news.get(sequence.request.request_id)
        before = known.tokens if known else ()
        self._news[sequence.request.request_id] = Emission(
            request_id=sequence.request.request_id,
            first_position=known.first_position if known else sequence.generated - len(tokens),
            tokens=before + tokens,
            cached_tokens=max(sequence.cached_tokens, 0),
            cached_host_tokens=sequence.cached_host_tokens,
            retractions=sequence.retractions,
            finish=finish,
        )

    # ---- the plan ----

    def _plan(self) -> list[Span]:
        """Decode rows first, an even share of them; then prefill chunks of running sequences, then new ones."""
        if len(self.in_flight) >= self.capacity.depth:
            return []
        rows: list[tuple[Sequence, Span]] = []
        decoding = [s for s in self.running if s.remaining <= 1]
        share = -(-len(decoding) // self.capacity.depth)
        # By arrival; `depth` shares hold all of them, so nobody is passed over for more than `depth` plans.
        for sequence in decoding:
            if sequence.remaining == 1 and len(rows) < share:
                self._add(rows, sequence, 1)
        # However many decode, a prefill moves by a page at least: nobody waits for ever.
        room = max(self.capacity.chunk_tokens - len(rows), self.capacity.page_size)
        for sequence in [s for s in self.running if s.remaining > 1]:
            if room > 0:
                room -= self._add(rows, sequence, room)
        self._plan_admissions(rows, room)
        noted = self.events.rows.noted
        for sequence, span in rows:
            noted += sequence.number, sequence.computed, span.pages[-1]
        if rows:
            self.in_flight.append((self.step, [(s, span.sample is not None) for s, span in rows]))
        return [span for _, span in rows]

    def _plan_admissions(self, rows: list[tuple[Sequence, Span]], room: int) -> None:
        """Let waiting sequences run while there is room for their rows, their pages and themselves."""
        slots = self.capacity.max_running_requests - len(self.running)
        if room <= 0 or slots <= 0:
            return
        order = policy.waiting_order(self.waiting, self._policy, self.cache, self.capacity.page_size)
        for sequence in list(order):
            admitted = self._admit(sequence)
            if admitted is None:
                return
            if admitted:
                room -= self._add(rows, sequence, room)
                slots -= 1
                if room <= 0 or slots == 0:
                    return

    def _add(self, rows: list[tuple[Sequence, Span]], sequence: Sequence, count_max: int) -> int:
        """Plan up to `count_max` rows of a sequence, if there are pages for them. Returns how many."""
        count = min(sequence.remaining, count_max)
        if sequence.state is not State.RUNNING or sequence.loading or not self._make_room(sequence, count):
            return 0
        span = sequence.advance(count)
        if self._cache_prefixes:
            self._insert(sequence)
        rows.append((sequence, span))
        return count

    def _admit(self, sequence: Sequence) -> bool | None:
        """Let a waiting sequence run. False: it waits for pages on their way. None: no room, for others either."""
        size = self.capacity.page_size
        key, pages_max = bytes(sequence.key), sequence.cache_pages_max(size)
        found = self.cache.peek(sequence.salt, key, pages_max, self.step)
        if found.fresh_pages:
            # This very plan fills pages of its prefix; a step later they can be read. That is worth one wait, not
            # more: another's answer that happens to spell this prompt would hold it up token by token.
            if not sequence.deferred:
                sequence.deferred = True
                return False
            pages_max = found.pages - found.fresh_pages
            found = self.cache.peek(sequence.salt, key, pages_max, self.step)
        load_pages = policy.pages_to_load(found.host_pages, size)
        if load_pages and found.in_transfer:  # For another sequence; a copy takes a few steps.
            return False if sequence.overtaken < policy.OVERTAKEN_MAX else None
        need = policy.pages_for(len(sequence.ids), size) - found.pages
        room = self.allocator.available + self.cache.device.pages_unlocked - found.evictable_pages
        will_come = bool(self.running or self.ended or self.hicache.under_way)
        if need + policy.committed_pages(self.running, self.capacity) > room and will_come:
            return None
        node = self._attach(sequence, pages_max)
        if load_pages and not self._load(sequence, node, pages_max):
            self._release(sequence)
            return None
        if sequence.cached_tokens < 0:
            self.hicache.matched(node)
        if not sequence.loading:
            sequence.found(host_tokens=0)
        for other in self.waiting:
            if other.number >= sequence.number:
                break
            other.overtaken += 1
        self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.number)
        return True

    def _attach(self, sequence: Sequence, pages_max: int) -> Node:
        """Give a sequence what the device holds of its ids, at most `pages_max` pages. Returns where that ends."""
        node, pages = self.cache.match(sequence.salt, bytes(sequence.key), pages_max)
        self.cache.lock(node)
        self.allocator.hold(pages)
        sequence.node, sequence.pages, sequence.in_tree = node, pages, len(pages)
        sequence.computed = len(pages) * self.capacity.page_size
        return node

    def _load(self, sequence: Sequence, node: Node, pages_max: int) -> bool:
        """Have the host's pages behind `node` copied to the device for a sequence, which plans no row until then.

        False: there are no device pages for it yet.
        """
        rest, pages_max = bytes(sequence.key[sequence.computed * TOKEN_BYTES :]), pages_max - sequence.in_tree
        end, host_pages = self.cache.match_host(node, sequence.salt, rest, pages_max)
        self.cache.lock(end)  # What is to be loaded must not go while room is made for it.
        pages = self.hicache.take_device_pages(len(host_pages))
        if pages is not None:
            self.allocator.hold(pages)
            sequence.pages += pages
            sequence.loading = self.hicache.load(end, host_pages, pages)
            self.loading[sequence.loading] = sequence
        self.cache.unlock(end)
        return pages is not None

    def _make_room(self, sequence: Sequence, rows: int) -> bool:
        """Give a running sequence the pages for its next rows, evicting or retracting where it must.

        False: it does not run in this step, since pages will come free by themselves, or it was the one to give way.
        """
        need = policy.pages_for(sequence.computed + rows, self.capacity.page_size) - len(sequence.pages)
        while need > self.allocator.available + self.cache.device.pages_unlocked:
            if self.allocator.pending or self.ended or self._copies_free_pages():
                return False
            victim = policy.victim(self.running, sequence)
            if victim is None:
                return False
            self._retract(victim)
            if victim is sequence:
                return False
        pages = self.hicache.take_device_pages(need)
        sequence.pages += pages or ()
        return pages is not None

    def _copies_free_pages(self) -> bool:
        """Whether pages will come free when copies settle: those that nobody but a copy locks."""
        copies = self.hicache.under_way.items()
        return any(copy.node.locks == 1 and number not in self.loading for number, copy in copies)

    def _insert(self, sequence: Sequence) -> None:
        """Give the tree the pages that this step fills.

        Where another sequence filled the same page first, the page table is repointed to that one at once, and the
        own page is let go when this step, the last that names it, has retired.
        """
        size = self.capacity.page_size
        full = sequence.computed // size
        if full == sequence.in_tree:
            return
        assert sequence.node is not None, f"request {sequence.request.request_id} runs without a node"
        own = sequence.pages[sequence.in_tree : full]
        width = size * TOKEN_BYTES
        key = bytes(sequence.key[sequence.in_tree * width : full * width])
        sequence.node, held = self.cache.extend(sequence.node, sequence.salt, key, own, self.step)
        for index, (mine, kept) in enumerate(zip(own, held, strict=True), start=sequence.in_tree):
            if mine != kept:
                self.allocator.hold((kept,))
                sequence.pages[index] = kept
                self.allocator.release_after(self.step, mine)
        sequence.in_tree = full
        self.hicache.inserted(sequence.node)
