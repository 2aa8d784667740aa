"""`python -m tests.sim SEED` or `python -m tests.sim --seeds A..B`: run simulated clusters; a failing seed is named."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from rich.progress import track

from tests.sim.cluster import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", help="a range A..B, B not included")
    parser.add_argument("--ticks", type=int, default=150, help="ticks with load before faults stop")
    arguments = parser.parse_args()
    if arguments.seeds:
        first, last = map(int, arguments.seeds.split(".."))
        seeds = range(first, last)
    else:
        seeds = range(arguments.seed or 0, (arguments.seed or 0) + 1)
    began, failed, steps = time.monotonic(), 0, 0
    for seed in track(seeds, description="seeds", disable=not sys.stderr.isatty()):
        try:
            cluster = run_seed(seed, arguments.ticks)
            steps += cluster.leader.step * len(cluster.ranks)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"seed {seed} fails: python -m tests.sim {seed} --ticks {arguments.ticks}", file=sys.stderr)
            if failed == 3:
                break
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds, {failed} failed, {steps} replica steps in {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
