"""Faults planted one at a time, to prove the proof: `python -m tests.sim.mutants` says which check finds each.

Each mutant is a text of the pure half and what replaces it, applied to a copy of the project; the unit tests and the
simulator then run there. A mutant that both let pass is a hole in the tests (or changes nothing: then it has no
place in this list).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parent.parent.parent
UNIT_TESTS = ("radix_cache", "allocator", "policy", "sequencer", "digest", "scheduler", "admission")
SEEDS = 100
TIME_LIMIT_S = 120.0

ALLOCATOR, RADIX = "engine/mem_cache/allocator.py", "engine/mem_cache/radix_cache.py"
SCHEDULER, SEQUENCE = "engine/scheduler/scheduler.py", "engine/scheduler/sequence.py"
POLICY, SEQUENCER, DIGEST = (
    "engine/scheduler/policy.py",
    "engine/scheduler/sequencer.py",
    "engine/scheduler/digest.py",
)


@dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    path: str
    old: str
    new: str


MUTANTS = [
    Mutant(*fields)
    for fields in (
        # Pages: who holds them, when they come free.
        (ALLOCATOR, "self._free.popleft()", "self._free.pop()"),
        (ALLOCATOR, "self._pending[0][0] <= step", "self._pending[0][0] <= step + 1"),
        (
            ALLOCATOR,
            "if self.references[page] == 0:\n                self._free",
            "if True:\n                self._free",
        ),
        (ALLOCATOR, "self.references[page] += 1", "pass"),
        (ALLOCATOR, "self._events.note(_GIVEN, count, *pages)", "self._events.note(_GIVEN, count)"),
        (SCHEDULER, "self.allocator.release_after(self.step, mine)", "self.allocator.release((mine,))"),
        (SCHEDULER, "sequence.pages[index] = kept", "pass"),
        (SCHEDULER, "self.allocator.hold((kept,))", "pass"),
        (SCHEDULER, "self.allocator.hold(pages)", "pass"),
        (SCHEDULER, "self.allocator.retire(step)", "pass"),
        (
            SCHEDULER,
            "        if sequence.in_flight:\n            self.ended",
            "        if False:\n            self.ended",
        ),
        (SCHEDULER, "self.cache.evict(need - self.allocator.available)", "self.cache.evict(need)"),
        # The tree: locks, recency, splits, eviction.
        (RADIX, "upper.filled_step = node.locks, node.stamp,", "upper.filled_step = 0, node.stamp,"),
        (RADIX, "node.stamp, node.filled_step\n", "node.stamp, 0\n"),
        (RADIX, "min(node.fresh_from, pages)", "pages"),
        (RADIX, "max(node.fresh_from - pages, 0)", "0"),
        (RADIX, "node.fresh_from = len(node.pages)", "pass"),
        (RADIX, "if end is node and node.locks == 1", "if end is node"),
        (
            RADIX,
            "not node.children and node.parent is not None:\n                # Nobody",
            "node.parent:\n                # Nobody",
        ),
        (RADIX, "if node.stamp != stamp:", "if False:"),
        (RADIX, "self._queue(node.parent)\n        node.parent = None", "node.parent = None"),
        (RADIX, "dropped = node.pages[-count:]", "dropped = node.pages[:count]"),
        (RADIX, "dropped.reverse()", "pass"),
        (RADIX, "self.clock += 1", "pass"),
        (RADIX, "self._relock(node, end)", "pass"),
        (RADIX, "self._touch_path(end)\n        self._events", "self._events"),
        (RADIX, "self._touch_path(end)\n        return end, held", "return end, held"),
        (RADIX, "salt + first if node is self.root else first", "first"),
        (RADIX, "min(len(key) // self._page_bytes, pages_max)", "len(key) // self._page_bytes"),
        (RADIX, "taken if node.locks == 0 else 0", "taken"),
        (RADIX, "if node.locks or node.children:", "if node.children:"),
        (RADIX, "if before == 0:\n                self.pages", "if False:\n                self.pages"),
        (RADIX, "self._leaves = []\n        self.pages", "self.pages"),
        (RADIX, "low, high = 0, length - 1", "low, high = 0, length - 2"),
        # What a plan holds.
        (SCHEDULER, "if found.fresh_pages:", "if False:"),
        (SCHEDULER, "if not sequence.deferred:", "if True:"),
        (SCHEDULER, "pages_max = found.pages - found.fresh_pages", "pass"),
        (
            SCHEDULER,
            "share = -(-len(decoding) // self.capacity.depth)",
            "share = len(decoding) // self.capacity.depth",
        ),
        (SCHEDULER, "share = -(-len(decoding) // self.capacity.depth)", "share = len(decoding)"),
        (
            SCHEDULER,
            "max(self.capacity.chunk_tokens - len(rows), self.capacity.page_size)",
            "self.capacity.chunk_tokens - len(rows)",
        ),
        (
            SCHEDULER,
            "max(self.capacity.chunk_tokens - len(rows), self.capacity.page_size)",
            "self.capacity.chunk_tokens",
        ),
        (
            SCHEDULER,
            "if len(self.in_flight) >= self.capacity.depth:",
            "if len(self.in_flight) > self.capacity.depth:",
        ),
        (
            SCHEDULER,
            "slots = self.capacity.max_running_requests -",
            "slots = self.capacity.max_running_requests - 1 -",
        ),
        (
            SCHEDULER,
            "slots = self.capacity.max_running_requests -",
            "slots = self.capacity.max_running_requests + 1 -",
        ),
        (
            SCHEDULER,
            "sequence.computed = len(pages) * size",
            "sequence.computed = max(len(pages) * size - 1, 0)",
        ),
        (SCHEDULER, "if self._cache_prefixes:", "if True:"),
        # Admission and retraction.
        (SCHEDULER, "if need + policy.committed_pages(self.running, self.capacity) > room", "if need > room"),
        (
            SCHEDULER,
            "self.cache.device.pages_unlocked - found.evictable_pages",
            "self.cache.device.pages_unlocked",
        ),
        (SCHEDULER, "other.overtaken += 1", "pass"),
        (SCHEDULER, "if sequence.cached_tokens < 0:", "if True:"),
        (SCHEDULER, "min(sequence.computed, sequence.prompt_length)", "sequence.computed"),
        (
            SCHEDULER,
            "bisect.insort(self.waiting, sequence, key=lambda s: s.number)",
            "self.waiting.append(sequence)",
        ),
        (SCHEDULER, "for sequence in decoding:", "for sequence in reversed(decoding):"),
        (SCHEDULER, "if self.allocator.pending or self.ended:\n                return False", "pass"),
        (SCHEDULER, "if victim is sequence:\n                return False", "pass"),
        (POLICY, "idle = [s for s in running if not s.in_flight and", "idle = [s for s in running if"),
        (POLICY, "s.number != oldest and ", ""),
        (POLICY, " and s.number >= needy.number]", "]"),
        (POLICY, "return max(idle", "return min(idle"),
        (POLICY, "pages_for(prompt + new - 1,", "pages_for(prompt + new,"),
        (POLICY, "if prompt + new > capacity.context_length", "if prompt + new >= capacity.context_length"),
        (POLICY, "(s.overtaken < OVERTAKEN_MAX, -_cached", "(False, -_cached"),
        (POLICY, "len(sequence.ids) + capacity.growth_tokens", "len(sequence.ids)"),
        (SEQUENCE, "self.request.sampling.max_new_tokens - 1", "self.request.sampling.max_new_tokens"),
        # What spans say of a sequence.
        (SEQUENCE, "rows = len(self.ids) - 1", "rows = len(self.ids)"),
        (SEQUENCE, "min(rows, self.logprob_next - 1)", "min(rows, self.logprob_next)"),
        (SEQUENCE, "min(end + 1, self.prompt_length)", "min(end, self.prompt_length)"),
        (SEQUENCE, "max(sampling.logprob_start, 1)", "sampling.logprob_start"),
        (SEQUENCE, "self.logprob_next += len(targets)", "pass"),
        (SEQUENCE, "random_bits(params.seed, position)", "random_bits(params.seed, self.generated)"),
        (SEQUENCE, "self.generated < params.min_new_tokens", "self.generated <= params.min_new_tokens"),
        (SEQUENCE, "tuple(self.ids[self.prompt_length :])", "tuple(self.ids)"),
        (SEQUENCE, "request.cache_salt.encode()", 'b""'),
        # What clients are told.
        (SCHEDULER, "self._tell(sequence, tokens=(token,))", "pass"),
        (SCHEDULER, "if sequence.state is State.ENDED:", "if False:"),
        (
            SCHEDULER,
            "elif sequence.generated >= sampling.max_new_tokens:",
            "elif sequence.generated > sampling.max_new_tokens:",
        ),
        (SCHEDULER, "if token in sampling.stop_token_ids:", "if False:"),
        (SCHEDULER, "known.first_position if known else", ""),
        (SCHEDULER, "busy = len(self.live) + len(self.in_flight)", "busy = len(self.live)"),
        # The leader's inbox.
        (SEQUENCER, "if scheduler.step + 1 - min(self._watermarks) > LAG_STEPS_MAX:", "if False:"),
        (SEQUENCER, "more = not self._last_plan_empty and", "more = False and"),
        (SEQUENCER, "more = not self._last_plan_empty and", "more ="),
        (SEQUENCER, "max(self._watermarks[report.rank], report.watermark)", "report.watermark"),
        (SEQUENCER, "self._queued_max + free", "self._queued_max"),
        (
            SEQUENCER,
            "self._aborts.setdefault(abort.request_id, abort)",
            "self._aborts[abort.request_id] = abort",
        ),
        (SEQUENCER, "if not status and self._arrivals and ids_waiting", "if not status and ids_waiting"),
        (
            SEQUENCER,
            "self._drain_deadline is not None:\n            status, message",
            "False:\n            status, message",
        ),
        (SEQUENCER, "and not self._arrivals and not scheduler.in_flight", "and not self._arrivals"),
        (SEQUENCER, "if now >= deadline:", "if False:"),
        # The digest.
        (DIGEST, "(previous, *vector)", "vector"),
        (DIGEST, 'self.value.to_bytes(8, "little") + packed', "packed"),
        (DIGEST, 'array("Q", (seed & 0xFFFF_FFFF_FFFF_FFFF, position))', 'array("Q", (position,))'),
    )
]


def run(copy: Path, *arguments: str) -> str | None:
    """Run Python on the copy; None if all went well, else what it printed ("" when it never ended)."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=copy, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout + done.stderr if done.returncode else None


def killers(mutant: Mutant, seeds: int) -> Iterator[str]:
    """What finds the mutant: at most one unit test and one seed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("engine", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
        path = copy / mutant.path
        source = path.read_text()
        assert source.count(mutant.old) == 1, (
            f"{mutant.path}: {source.count(mutant.old)} times {mutant.old!r}"
        )
        path.write_text(source.replace(mutant.old, mutant.new))
        tests = [f"tests/test_{name}.py" for name in UNIT_TESTS]
        printed = run(copy, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests)
        if printed is not None:
            failed = re.search(r"FAILED \S+::(\w+)", printed)
            yield failed[1] if failed else "unit tests do not end"
        printed = run(copy, "-m", "tests.sim", "--seeds", f"0..{seeds}")
        if printed is not None:
            failed = re.search(r"seed (\d+) fails", printed)
            yield f"seed {failed[1]}" if failed else "a seed does not end"


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutant for mutant in MUTANTS if wanted in f"{mutant.path} {mutant.old}"]
    survived, harmless = 0, Mutant(ALLOCATOR, "_free.popleft", "_free.popleft")
    assert not list(killers(harmless, SEEDS)), "the tests fail without any mutant"
    for mutant in track(chosen, description="mutants", disable=not sys.stderr.isatty()):
        found = list(killers(mutant, SEEDS))
        survived += not found
        change = f"{mutant.old!r} -> {mutant.new!r}"
        print(f"{'; '.join(found) or 'SURVIVED'} | {Path(mutant.path).name}: {change}", flush=True)
    print(f"{len(chosen)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
