"""The replicated state machine: `Scheduler.apply(entry) -> Plan`, the one door through which its state changes.

It is a pure function of the entries so far: no clock, no randomness, no order that a hash decides, integers only.
Every rank runs one; given the same entries all make the same plans, and each plan's digest proves it. The order
inside one step is that of the entry's fields, then admission, then the plan:

    settled transfers -> retired steps and their tokens -> finishes -> arrivals -> aborts -> controls -> plan

It owns the sequences and the books (allocator, radix cache). It never moves a byte: plans name pages, ranks copy.
"""

from __future__ import annotations

import bisect
from collections import deque

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.radix_cache import RadixCache
from engine.scheduler import policy
from engine.scheduler.digest import Accumulator, fold_digest
from engine.scheduler.sequence import Sequence, State
from engine.types import (
    Abort,
    Books,
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
)

STATE_FIELDS = (
    "step", "inputs", "arrived", "waiting", "running", "ended", "steps in flight",
    "pages available", "pages evictable", "pages protected", "pages pending", "tree clock", "next node",
    "retractions", "evictions", "finished", "allocator events", "tree events", "rows",
)  # fmt: skip
"""Names of the state vector's numbers, causes before effects: the first that differs is what parted first."""
_RETIRED, _FINISH, _ARRIVAL, _ABORT, _CONTROL = range(1, 6)


class Scheduler:
    """One replica. Built from agreed counts, never from bytes."""

    def __init__(
        self, capacity: Capacity, *, schedule_policy: str = "fcfs", cache_prefixes: bool = True
    ) -> None:
        self.capacity = capacity
        self.step = 0
        self.digest = 0
        self.vector: tuple[int, ...] = (0,) * len(STATE_FIELDS)
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended: dict[int, Sequence] = {}
        self.in_flight: deque[tuple[int, list[tuple[Sequence, bool]]]] = deque()
        self.arrived = self.finished = self.retractions = 0
        self._inputs, self._rows = Accumulator(), Accumulator()
        self._allocator_events, self._tree_events = Accumulator(), Accumulator()
        self.allocator = PageAllocator(capacity.device_pages, self._allocator_events)
        self.cache = RadixCache(capacity.page_size, self.allocator, self._tree_events)
        self._policy = schedule_policy
        self._cache_prefixes = cache_prefixes
        self._news: dict[int, Emission] = {}

    # ---- the one door ----

    def apply(self, entry: Entry) -> Plan:
        """Take the next entry and say what its step does."""
        assert entry.step == self.step + 1, f"entry {entry.step} applied after step {self.step}"
        assert not entry.settled, f"transfers {entry.settled} settled, but none was planned"
        self.step = entry.step
        self._news = {}
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
        self._fold()
        return Plan(
            step=self.step,
            digest=self.digest,
            spans=tuple(spans),
            emissions=tuple(self._news.values()),
            controls=done,
            control_failures=failed,
        )

    def books(self) -> Books:
        """Where the device tier's tokens are."""
        size, evictable = self.capacity.page_size, self.cache.pages_unlocked
        total, available = self.capacity.device_pages, self.allocator.available
        protected = total - available - evictable
        return Books(
            capacity=total * size,
            available=available * size,
            evictable=evictable * size,
            protected=protected * size,
        )

    def counters(self) -> dict[str, int]:
        """Totals since the start, for people."""
        return {
            "arrived": self.arrived,
            "finished": self.finished,
            "retractions": self.retractions,
            "evicted_pages": self.cache.pages_evicted,
        }

    # ---- what an entry brings ----

    def _retire(self, retired: RetiredStep) -> None:
        """A step has run: its tokens become ids, and what it alone named becomes free."""
        assert self.in_flight, f"step {retired.step} retired, but none is in flight"
        step, rows = self.in_flight.popleft()
        assert step == retired.step, f"step {retired.step} retired, but the oldest in flight is {step}"
        self._inputs.note(_RETIRED, step, len(retired.tokens), *retired.tokens)
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
        self._inputs.note(_FINISH, finish.request_id, finish.kept_tokens)
        sequence = self.live.get(finish.request_id)
        if sequence is not None:
            self._end(sequence, FinishReason(type="stop", matched=finish.matched))

    def _arrive(self, request: Request) -> None:
        self.arrived += 1
        problem = policy.does_not_fit(request, self.capacity)
        assert not problem, f"request {request.request_id} passed the door, but {problem}"
        assert request.request_id not in self.live, f"request {request.request_id} arrived twice"
        sequence = Sequence(request, self.arrived)
        self._inputs.note(_ARRIVAL, *sequence.facts())
        self.live[request.request_id] = sequence
        if sequence.generated >= request.sampling.max_new_tokens:
            self._end(sequence, FinishReason(type="length"))
        else:
            self.waiting.append(sequence)

    def _abort(self, abort: Abort) -> None:
        self._inputs.note(_ABORT, abort.request_id, abort.status)
        sequence = self.live.get(abort.request_id)
        if sequence is not None:
            self._end(sequence, FinishReason(type="abort", message=abort.message, status=abort.status))

    def _control(
        self, controls: tuple[Control, ...]
    ) -> tuple[tuple[Control, ...], tuple[ControlResult, ...]]:
        done, failed = [], []
        for control in controls:
            self._inputs.note(_CONTROL, control.control_id, int(control.action == "flush"))
            if control.action == "flush":
                busy = len(self.live) + len(self.in_flight)
                if busy:
                    text = f"not flushed: {len(self.live)} requests and {len(self.in_flight)} steps are under way"
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
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
            sequence.node = None
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.in_tree = sequence.computed = 0

    def _retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait: it becomes what it was, prompt plus delivered ids."""
        assert sequence.in_flight == 0, (
            f"request {sequence.request.request_id} retracted with spans in flight"
        )
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
        if rows:
            self.in_flight.append((self.step, [(s, span.sample is not None) for s, span in rows]))
        return [span for _, span in rows]

    def _plan_admissions(self, rows: list[tuple[Sequence, Span]], room: int) -> None:
        """Let waiting sequences run while there is room for their rows, their pages and themselves."""
        slots = self.capacity.max_running_requests - len(self.running)
        if room <= 0 or slots <= 0:
            return
        size = self.capacity.page_size
        for sequence in list(policy.waiting_order(self.waiting, self._policy, self.cache, size)):
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
        if sequence.state is not State.RUNNING or not self._make_room(sequence, count):
            return 0
        span = sequence.advance(count)
        self._rows.note(sequence.number, span.start, count, span.pages[-1], int(span.sample is not None))
        if self._cache_prefixes:
            self._insert(sequence)
        rows.append((sequence, span))
        return count

    def _admit(self, sequence: Sequence) -> bool | None:
        """Let a waiting sequence run. False: worth a step's wait. None: no room, so nobody behind it either."""
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
        need = policy.pages_for(len(sequence.ids), size) - found.pages
        room = self.allocator.available + self.cache.pages_unlocked - found.evictable_pages
        if need + policy.committed_pages(self.running, self.capacity) > room and (self.running or self.ended):
            return None
        for other in self.waiting:
            if other.number >= sequence.number:
                break
            other.overtaken += 1
        node, pages = self.cache.match(sequence.salt, key, pages_max)
        self.cache.lock(node)
        self.allocator.hold(pages)
        sequence.node, sequence.pages, sequence.in_tree = node, pages, len(pages)
        sequence.computed = len(pages) * size
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)
        self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.number)
        return True

    def _make_room(self, sequence: Sequence, rows: int) -> bool:
        """Give a running sequence the pages for its next rows, evicting or retracting where it must.

        False: it does not run in this step, since pages will come free by themselves, or it was the one to give way.
        """
        need = policy.pages_for(sequence.computed + rows, self.capacity.page_size) - len(sequence.pages)
        while need > self.allocator.available + self.cache.pages_unlocked:
            if self.allocator.pending or self.ended:
                return False
            victim = policy.victim(self.running, sequence)
            if victim is None:
                return False
            self._retract(victim)
            if victim is sequence:
                return False
        self.cache.evict(need - self.allocator.available)
        sequence.pages += self.allocator.allocate(need)
        return True

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
        width = size * 4
        key = bytes(sequence.key[sequence.in_tree * width : full * width])
        sequence.node, held = self.cache.extend(sequence.node, sequence.salt, key, own, self.step)
        for index, (mine, kept) in enumerate(zip(own, held, strict=True), start=sequence.in_tree):
            if mine != kept:
                self.allocator.hold((kept,))
                sequence.pages[index] = kept
                self.allocator.release_after(self.step, mine)
        sequence.in_tree = full

    # ---- the proof ----

    def _fold(self) -> None:
        """Fold this step into the digest and the state vector."""
        available, unlocked = self.allocator.available, self.cache.pages_unlocked
        self.vector = (
            self.step,
            self._inputs.fold(),
            self.arrived,
            len(self.waiting),
            len(self.running),
            len(self.ended),
            len(self.in_flight),
            available,
            unlocked,
            self.capacity.device_pages - available - unlocked,
            self.allocator.pending,
            self.cache.clock,
            self.cache.next_node_id,
            self.retractions,
            self.cache.pages_evicted,
            self.finished,
            self._allocator_events.fold(),
            self._tree_events.fold(),
            self._rows.fold(),
        )
        self.digest = fold_digest(self.digest, self.vector)
