"""Capacity planner: `config.json` and flags -> the host tokens of each stage, before and after agreement.

    python -m engine.planner --config config.json --pp-size 4 --tp-size 4 --hicache-size 100 --page-size 64

Owns the command, its table and its JSON; the numbers are made in `capacity_plan`. It needs no weights and no GPU, and
never loads torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from engine.capacity_plan import SIDECARS, CapacityPlan, PlannerFlags, plan_capacity
from engine.config import ConfigError, read_flags

_CONFIG_BYTES_MAX = 1 << 24


def main(arguments: list[str]) -> int:
    """Read flags, print the plan. Returns the exit code: 0, or 2 after one line that says what is not allowed."""
    try:
        flags = read_flags(
            PlannerFlags,
            arguments,
            program="python -m engine.planner",
            purpose="Say how many tokens each stage's host pools hold, before and after agreement.",
        )
        plan = plan_capacity(_read_config(flags.config), flags)
    except ValueError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(json.dumps(dataclasses.asdict(plan)))
    else:
        print_plan(plan, flags, sys.stdout)
    return 0


def _read_config(path: str | None) -> Mapping[str, Any]:
    allowed = "allowed is the path of a config.json, or of the folder that holds it"
    if path is None:
        raise ConfigError(f"--config is missing: {allowed}")
    file = Path(path)
    try:
        file = file / "config.json" if file.is_dir() else file
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ConfigError(
                f"--config {path}: {file.stat().st_size} bytes; allowed are at most {_CONFIG_BYTES_MAX}"
            )
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; {allowed}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"--config {path}: is not JSON; {allowed}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path}: holds no JSON object; {allowed}")
    return config


# ---- the table -------------------------------------------------------------------------------------


def print_plan(plan: CapacityPlan, flags: PlannerFlags, file: IO[str]) -> None:
    """Print the plan: one row a stage, then what the stages would do without agreement, and the best split."""
    console = Console(file=file, highlight=False)
    sized = (
        f"{flags.hicache_size:g} GB"
        if plan.budget_bytes
        else f"{flags.hicache_ratio:g} x the device's tokens"
    )
    layers = sum(plan.split.partition)
    console.print(
        f"{plan.model_type}, {layers} layers, pp {flags.pp_size}, tp {flags.tp_size}: host tier of {sized} a rank, "
        f"pages of {flags.page_size} tokens",
        soft_wrap=True,
    )
    table = _table(plan)
    # Numbers are never cut: a terminal that is too narrow wraps whole lines.
    width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, width)
    console.print(table)
    for line in _remarks(plan, flags):
        console.print(line, soft_wrap=True)


def _table(plan: CapacityPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = [pool.name for pool in plan.pools]
    main = [name for name in names if name not in SIDECARS]
    headings = ["stage", "layers", "count", *(f"{name}\nB/{_unit(name)[:-1]}" for name in names)]
    for name in main:
        headings += [f"{_unit(name)}\nbefore", f"{_unit(name)}\nafter"]
    headings += ["GB\npinned", *(["GB\nsidecar"] if len(main) < len(names) else []), "GB\nunused"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.stages:
        start, end = row.layers
        cells = [str(row.stage), f"{start}-{end - 1}", str(end - start)]
        cells += [f"{pool.bytes_each:,}" for pool in row.pools]
        for pool in row.pools:
            if pool.name in main:
                before = "no limit" if pool.count_before is None else f"{pool.count_before:,}"
                cells += [before, f"{pool.count_after:,}"]
        sidecar = [_gb(row.bytes_sidecar)] if len(main) < len(names) else []
        table.add_row(*cells, _gb(row.bytes_pinned), *sidecar, _gb(row.bytes_unused))
    return table


def _remarks(plan: CapacityPlan, flags: PlannerFlags) -> Iterator[str]:
    for spread in plan.unagreed:
        unit, apart = _unit(spread.name), spread.most - spread.least
        if apart:
            percent = f"{100 * apart / spread.least:.2f} %"
            yield f"Without agreement: {spread.least:,} to {spread.most:,} {unit}, {apart:,} apart ({percent})."
        else:
            yield f"Without agreement: {spread.least:,} {unit} on each stage that has such layers."
    best = plan.best_split
    counts = zip(best.counts, plan.unagreed, strict=True)
    held = " and ".join(f"{count:,} {_unit(spread.name)}" for count, spread in counts)
    same = best == plan.split
    yield (
        f"Least waste: --pp-layer-partition {','.join(map(str, best.partition))}{' (this one)' if same else ''} "
        f"holds {held} and leaves {_gb(best.bytes_unused)} GB unused over one rank of each stage"
        + ("." if same else f", instead of {_gb(plan.split.bytes_unused)}.")
    )
    if plan.budget_bytes == 0:
        yield "Sized by ratio there is no budget: unused is what the heaviest stage pins more."
    pinned, sidecar = (
        flags.tp_size * sum(getattr(row, name) for row in plan.stages)
        for name in ("bytes_pinned", "bytes_sidecar")
    )
    beside = f", and {_gb(sidecar)} GB of sidecars" if sidecar else ""
    yield f"All {flags.pp_size * flags.tp_size} ranks together pin {_gb(pinned)} GB{beside}."


def _unit(name: str) -> str:
    return "slots" if name == "state" else "tokens"


def _gb(size: int) -> str:
    """Decimal GB to the megabyte; what rounds to nothing has no sign."""
    return f"{round(size / 1e9, 3) + 0.0:,.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
