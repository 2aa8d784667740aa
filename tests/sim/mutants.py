"""Faults planted one at a time, to prove the proof: `python -m tests.sim.mutants` says which check finds each.

Each mutant is a text of the pure half and what replaces it, applied to a copy of the project; the unit tests and the
simulator then run there. A mutant that both let pass is a hole in the tests (or changes nothing: then it has no
place in this list).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).parent.parent.parent
UNIT_TESTS = (
    "hicache",
    "sequencer",
    "policy",
    "scheduler",
    "admission",
    "allocator",
    "digest",
    "radix_cache",
)
SEEDS = 100
TIME_LIMIT_S = 120.0

ALLOCATOR, RADIX = "engine/mem_cache/allocator.py", "engine/mem_cache/radix_cache.py"
TIER, HICACHE = "engine/mem_cache/tier.py", "engine/mem_cache/hicache.py"
VECTOR = "engine/scheduler/state_vector.py"
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
        (SCHEDULER, "self.allocator.hold(pages)\n        sequence.node", "sequence.node"),
        (SCHEDULER, "self.allocator.hold(pages)\n            sequence", "sequence"),
        (SCHEDULER, "self.allocator.retire(step)", "pass"),
        (
            SCHEDULER,
            "        if sequence.in_flight:\n            self.ended",
            "        if False:\n            self.ended",
        ),
        (HICACHE, "short = count - cache.device.allocator.available", "short = count"),
        # The tree: locks, recency, splits, eviction.
        (RADIX, "upper.filled_step = node.locks, node.stamp,", "upper.filled_step = 0, node.stamp,"),
        (RADIX, "node.stamp, node.filled_step\n", "node.stamp, 0\n"),
        (RADIX, "min(node.fresh_from, pages)", "pages"),
        (RADIX, "max(node.fresh_from - pages, 0)", "0"),
        (
            RADIX,
            "node.fresh_from, node.filled_step = len(node.held[DEVICE]), step",
            "node.filled_step = step",
        ),
        (RADIX, "if end is node and node.locks - node.pins == 1 and", "if end is node and"),
        (RADIX, "and not node.children and node.parent is not None:", "and node.parent is not None:"),
        (TIER, "(self._rank(node), node.stamp) == (rank, stamp)", "self._rank(node) == rank"),
        (TIER, "self.queue(node.parent)", "pass"),
        (TIER, "dropped = held[-count:]", "dropped = held[:count]"),
        (TIER, "dropped.reverse()", "pass"),
        (RADIX, "self.clock += 1", "pass"),
        (RADIX, "self._change_locks(end, node, +1)", "pass"),
        (RADIX, "self._touch_path(end)\n        self._events", "self._events"),
        (RADIX, "self._touch_path(end)\n        return end, held", "return end, held"),
        (RADIX, "salt + first if node is self.root else first", "first"),
        (RADIX, "min(len(key) // self._page_bytes, pages_max)", "len(key) // self._page_bytes"),
        (RADIX, "here if node.locks == 0 else 0", "here"),
        (TIER, "not node.locks and not node.branches[index]", "not node.branches[index]"),
        (RADIX, "self.device.pages_unlocked -= len(node.held[DEVICE])", "pass"),
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
            "sequence.computed = len(pages) * self.capacity.page_size",
            "sequence.computed = max(len(pages) * self.capacity.page_size - 1, 0)",
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
        (SEQUENCE, "if self.cached_tokens < 0:", "if True:"),
        (SEQUENCE, "min(self.computed, self.prompt_length)", "self.computed"),
        (
            SCHEDULER,
            "bisect.insort(self.waiting, sequence, key=lambda s: s.number)",
            "self.waiting.append(sequence)",
        ),
        (SCHEDULER, "for sequence in decoding:", "for sequence in reversed(decoding):"),
        (
            SCHEDULER,
            "if self.allocator.pending or self.ended or self._copies_free_pages():\n                return False",
            "pass",
        ),
        (SCHEDULER, "if victim is sequence:\n                return False", "pass"),
        (POLICY, "if not (s.in_flight or s.loading)]", "if not s.loading]"),
        (POLICY, "if not (s.in_flight or s.loading)]", "if not s.in_flight]"),
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
        (SCHEDULER, "if any(counts):", "if counts[0]:"),
        (SCHEDULER, "if any(counts):", "if counts[0] + counts[1]:"),
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
        (SEQUENCER, "or self._arrivals or scheduler.in_flight", "or self._arrivals"),
        (SEQUENCER, "if now >= deadline:", "if False:"),
        # Two tiers: what each holds, and in which order it gives that back.
        (
            TIER,
            "if node.locks == 0:\n            self.pages_unlocked",
            "if True:\n            self.pages_unlocked",
        ),
        (TIER, "node.parent.branches[self.index] += 1", "pass"),
        (TIER, "node.parent.branches[self.index] -= 1", "pass"),
        (TIER, "beyond if self.index == HOST and beyond > 0 else len(held)", "len(held)"),
        (TIER, "min(max(beyond, 0), count)", "0"),
        (
            TIER,
            "len(node.held[HOST]) <= len(node.held[DEVICE])",
            "len(node.held[HOST]) < len(node.held[DEVICE])",
        ),
        (TIER, "return int(self.index == HOST and", "return int(False and"),
        (TIER, ") < node.queued[self.index]", ") is not None and node.queued[self.index] == _NOT_QUEUED"),
        (TIER, "node.queued[self.index] = _NOT_QUEUED", "pass"),
        (TIER, "self.queue(node)\n        return None", "return None"),
        (TIER, "not node.branches[index] and", "not node.children and"),
        (RADIX, "if have < taken:", "if False:"),
        (RADIX, "pages[len(held) + have : len(held) + taken]", "pages[len(held) : len(held) + taken - have]"),
        (RADIX, "node.locks - node.pins == 1", "node.locks == 1"),
        (RADIX, "new_from = min(have, end)", "new_from = first"),
        (RADIX, "first = max(depth, start)", "first = start"),
        (RADIX, "upper.transfer_id = node.transfer_id", "pass"),
        (RADIX, "upper.branches[tier.index] = int(bool(held))", "upper.branches[tier.index] = 1"),
        (RADIX, "for tier in self.tiers:\n            tier.queue(upper)", "pass"),
        (RADIX, "for each in self.tiers:\n            each.queue(node)", "tier.queue(node)"),
        (RADIX, "taken > here and node.transfer_id != 0", "node.transfer_id != 0"),
        (RADIX, "host += taken - here", "host += taken"),
        (RADIX, "for each in reversed(below):", "for each in below:"),
        (RADIX, "while tier.is_leaf(each):", "if tier.is_leaf(each):"),
        (
            RADIX,
            "end = self._split_after(child, taken)\n            pages += end.held[HOST]",
            "end = child\n            pages += end.held[HOST][:taken]",
        ),
        (
            RADIX,
            "for tier in self.tiers:\n                tier.allocator.release(node",
            "for tier in self.tiers[:1]:\n                tier.allocator.release(node",
        ),
        # Copies: when they begin, what they cover, when they count.
        (HICACHE, 'self._policy == "write_through":', 'self._policy != "write_back":'),
        (HICACHE, 'self._policy == "write_through":', "True:"),
        (HICACHE, 'self._policy != "write_back" and', ""),
        (HICACHE, "if copy.node.locks == 1)", ")"),
        (HICACHE, "coming += len(node.held[DEVICE])", "pass"),
        (HICACHE, "while short > coming and", "while short > 0 and"),
        (HICACHE, "if unsaved > 0 and writes_back:", "if False:"),
        (HICACHE, "cache.device.queue(node)", "pass"),
        (
            HICACHE,
            "if self._is_busy(node):\n                    aside",
            "if False:\n                    aside",
        ),
        (HICACHE, "if self._back_up(node, whole=True):", "if self._back_up(node, whole=False):"),
        (
            HICACHE,
            "self._cache.path(node)) - len(host_pages)",
            "self._cache.path(node)) - len(host_pages) + 1",
        ),
        (HICACHE, "if node.parent is None or not self._is_busy(node):", "if True:"),
        (HICACHE, "each.transfer_id = 0", "pass"),
        (
            HICACHE,
            "if result.ok:\n            self.pages_backed_up",
            "if True:\n            self.pages_backed_up",
        ),
        (HICACHE, "tier.allocator.release(pages)", "pass"),
        (HICACHE, "node.pins -= 1", "pass"),
        (HICACHE, "cache.unlock(node)\n        if not result.ok", "if not result.ok"),
        (HICACHE, "cache.forget(marked[0], cache.host)", "pass"),
        (HICACHE, "cache.forget(marked[0], cache.host)", "cache.forget(node, cache.host)"),
        (HICACHE, "pages_loaded = len(pages) if loads and result.ok else 0", "pages_loaded = 0"),
        (
            HICACHE,
            "cache.lock(node)  # Before room is made: its own ancestors must not be what goes.\n"
            "        host = cache.host\n"
            "        if not whole or len(pages) <= host.allocator.available + host.pages_unlocked:\n"
            "            cache.evict(host, len(pages) - host.allocator.available)\n",
            "host = cache.host\n"
            "        if not whole or len(pages) <= host.allocator.available + host.pages_unlocked:\n"
            "            cache.evict(host, len(pages) - host.allocator.available)\n"
            "        cache.lock(node)\n"
            "        if True:\n",
        ),
        (HICACHE, "if not whole or len(pages) <= host", "if True or len(pages) <= host"),
        (
            HICACHE,
            "count = min(len(pages), host.allocator.available)",
            "count = len(pages) if len(pages) <= host.allocator.available else 0",
        ),
        (
            HICACHE,
            "cache.evict(host, len(pages) - host.allocator.available)",
            "cache.evict(host, len(pages))",
        ),
        (HICACHE, "cache.lock(node)\n        node.pins += 1", "node.pins += 1"),
        (HICACHE, "cache.lock(node)\n        node.pins += 1", "cache.lock(node)"),
        (HICACHE, "if depth + each.page_count > start:", "if depth > start:"),
        (HICACHE, "pages += each.held[DEVICE][len(each.held[HOST]) :]", "pages += each.held[DEVICE]"),
        # Requests and copies.
        (SCHEDULER, "sequence.found(pages_loaded * size)", "sequence.found(0)"),
        (SEQUENCE, "max(self.cached_tokens - (self.computed - host_tokens), 0)", "host_tokens"),
        (SCHEDULER, "self.cache.unlock(node)\n        self.allocator", "self.allocator"),
        (SCHEDULER, "self.allocator.release(pages)\n", "pass\n"),
        (SCHEDULER, "self.loading.pop(sequence.loading, None)", "pass"),
        (SCHEDULER, "or sequence.loading or", "or"),
        (SCHEDULER, "if load_pages and found.in_transfer:", "if False:"),
        (SCHEDULER, "return False if sequence.overtaken < policy.OVERTAKEN_MAX else None", "return False"),
        (
            SCHEDULER,
            "bool(self.running or self.ended or self.hicache.under_way)",
            "bool(self.running or self.ended)",
        ),
        (SCHEDULER, "self.hicache.matched(node)", "pass"),
        (SCHEDULER, "self.hicache.inserted(sequence.node)", "pass"),
        (
            SCHEDULER,
            "self.cache.lock(end)  # What is to be loaded must not go while room is made for it.\n"
            "        pages = self.hicache.take_device_pages(len(host_pages))",
            "pages = self.hicache.take_device_pages(len(host_pages))\n        self.cache.lock(end)",
        ),
        (SCHEDULER, "self._release(sequence)\n            return None", "return None"),
        (SCHEDULER, "if load_pages and not self._load", "if not self._load"),
        (SCHEDULER, "return pages is not None\n\n    def _copies", "return True\n\n    def _copies"),
        (SCHEDULER, "or self.ended or self._copies_free_pages():", "or self.ended:"),
        (SCHEDULER, "copy.node.locks == 1 and number not in self.loading", "True"),
        (SCHEDULER, "copy.node.locks == 1 and number not in self.loading", "copy.node.locks == 1"),
        (
            SCHEDULER,
            "if sequence.cached_tokens < 0:\n            self.hicache",
            "if True:\n            self.hicache",
        ),
        (HICACHE, 'elif self._policy == "write_back" and', "elif False and"),
        (POLICY, "host_pages * page_size >= LOAD_TOKENS_MIN", "host_pages * page_size > LOAD_TOKENS_MIN"),
        (POLICY, "host_pages * page_size >= LOAD_TOKENS_MIN", "host_pages >= LOAD_TOKENS_MIN"),
        (POLICY, "return found.pages + found.host_pages", "return found.pages"),
        (SEQUENCER, "if len(ranks) == len(self._watermarks):", "if len(ranks) == 1:"),
        (SEQUENCER, "ok=all(ranks.values())", "ok=any(ranks.values())"),
        (SEQUENCER, "            self._settled\n            or self._retired", "            self._retired"),
        (SEQUENCER, "not scheduler.hicache.under_way or now >= deadline", "True"),
        (SEQUENCER, "not scheduler.hicache.under_way or now >= deadline", "not scheduler.hicache.under_way"),
        (VECTOR, "if host_counts else (0, 0, 0)", "if True else (0, 0, 0)"),
        # The digest.
        (DIGEST, "(layout, previous, *counters", "(layout, 0, *counters"),
        (DIGEST, "noted = [len(part) for part in events]", "noted = list[int]()"),
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
    """What finds the mutant: at most one unit test and one seed, looked for as they are asked for."""
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
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("wanted", nargs="?", default="", help="only mutants whose path or text holds this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="simulated clusters for each mutant")
    parser.add_argument(
        "--once", action="store_true", help="one killer is enough: no seeds if a unit test is one"
    )
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.wanted in f"{mutant.path} {mutant.old}"]
    survived, harmless = 0, Mutant(ALLOCATOR, "_free.popleft", "_free.popleft")
    assert not list(killers(harmless, arguments.seeds)), "the tests fail without any mutant"
    for mutant in track(chosen, description="mutants", disable=not sys.stderr.isatty()):
        found = list(islice(killers(mutant, arguments.seeds), 1 if arguments.once else None))
        survived += not found
        change = f"{mutant.old!r} -> {mutant.new!r}"
        print(f"{'; '.join(found) or 'SURVIVED'} | {Path(mutant.path).name}: {change}", flush=True)
    print(f"{len(chosen)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
