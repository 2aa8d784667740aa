"""`python -m tests.sim SEED` or `python -m tests.sim --seeds A..B`: run simulated clusters; a failing seed is named."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from rich.progress import track

from tests.sim.cluster import run_seed

FAILURES_MAX = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--seeds", help="a range A..B, B not included")
    parser.add_argument("--ticks", type=int, default=150, help="ticks with load before faults stop")
    arguments = parser.parse_args()
    first, last = arguments.seed, arguments.seed + 1
    if arguments.seeds:
        first, last = map(int, arguments.seeds.split(".."))
    began, ran, failed, steps, seen = time.monotonic(), 0, 0, 0, Counter[str]()
    for seed in track(range(first, last), description="seeds", disable=not sys.stderr.isatty()):
        ran += 1
        try:
            cluster = run_seed(seed, arguments.ticks)
            seen += cluster.seen
            steps += cluster.leader.step * len(cluster.ranks)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"seed {seed} fails: python -m tests.sim {seed} --ticks {arguments.ticks}", file=sys.stderr)
            if failed == FAILURES_MAX:
                break
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    print(f"{ran} seeds, {failed} failed, {steps} replica steps in {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
