"""What people see once the service is ready: a line per stage, and where to send requests."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from engine.mem_cache.sizing import NO_CONSTRAINT
from engine.types import Ready, StageSize


def show_ready(ready: Ready, url: str, console: Console | None = None) -> None:
    """Print the start-up table to standard error: what each rank holds, and what was agreed."""
    console = console or Console(stderr=True)
    several = len({size.host_name for size in ready.stages}) > 1
    title = f"{ready.dtype} on {ready.device}, pages of {ready.page_size} tokens"
    table = _table(title, ["rank", "layers", "B/token", "own tokens", "agreed", "weights", "cache"], several)
    for size in ready.stages:
        row = [
            _rank(size),
            f"{size.layers[0]}-{size.layers[1] - 1} ({size.layers[1] - size.layers[0]})",
            f"{size.bytes_per_token:,}",
            f"{size.local_tokens:,}",
            f"{size.agreed_tokens:,}",
            _gb(size.weight_bytes),
            _gb(size.pool_bytes),
        ]
        table.add_row(*row, *[size.host_name] * several)
    console.print(table)
    host_tier = any(size.host_tokens for size in ready.stages)
    if host_tier:
        table = _table("host tier", ["rank", "own tokens", "agreed", "memory"], several)
        for size in ready.stages:
            own = "any" if size.host_local_tokens == NO_CONSTRAINT else f"{size.host_local_tokens:,}"
            row = [_rank(size), own, f"{size.host_tokens:,}", _gb(size.host_pool_bytes)]
            table.add_row(*row, *[size.host_name] * several)
        console.print(table)
    on_cpu = ready.device == "cpu"
    if on_cpu or host_tier:
        for host_name in dict.fromkeys(size.host_name for size in ready.stages):
            here = [size for size in ready.stages if size.host_name == host_name]
            taken = sum(size.weight_bytes + size.pool_bytes for size in here) if on_cpu else 0
            taken += sum(size.host_pool_bytes for size in here)
            available = min(size.machine_available_bytes for size in here)
            console.print(
                f"memory of {host_name}: {_gb(taken)} taken, of {_gb(available)} that were available",
                highlight=False,
            )
    console.print(
        f"up to {ready.max_running_requests} requests at once; ready on {url}",
        soft_wrap=True,
        highlight=False,
    )


def _table(title: str, headings: list[str], several_machines: bool) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in headings + ["machine"] * several_machines:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _rank(size: StageSize) -> str:
    return f"PP{size.pp_rank} TP{size.tp_rank}"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 10**9:.2f} GB"
