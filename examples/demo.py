"""What a fixed host-cache size does to pipeline stages that do not agree on it, and what agreement does. `make demo`.

1. Two real stages with unequal layers and a small `--hicache-size`, agreement switched off: their host capacities
   differ from step 0 on, and some requests later they decide differently for the first time, which ends the service.
2. The same flags and requests with agreement on.
3. A public trace through two stages with the capacities of the known fault (GLM-5.2 FP8, 78 layers over 4 stages,
   100 GB), drawn to `docs/parting.png`: when would they have parted, had nobody compared?
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from engine.capacity_plan import PlannerFlags, plan_capacity
from engine.config import EngineConfig, as_flags
from engine.llm import LLM
from engine.types import Ready
from examples import trace

FLAGS: dict[str, Any] = {
    "pp_size": 2,
    "pp_layer_partition": (17, 13),
    "dtype": "float32",
    "max_total_tokens": 512,
    "enable_hierarchical_cache": True,
    "hicache_size": 0.026,
    "log_level": "warning",
}
CITIES = ("Lisbon", "Kyoto", "Nairobi", "Quito", "Oslo", "Perth", "Turin", "Hanoi", "Accra", "Lima")
ANSWER = {"max_new_tokens": 8, "temperature": 0}
TRACE_DEVICE_TOKENS = 2**20
PICTURE = ROOT / "docs" / "parting.png"

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Run the three parts."""
    console.rule("1. a fixed size in GB, every stage by itself")
    run(debug_unagreed_hicache=True)
    console.rule("2. the same, agreed")
    run()
    console.rule("3. a public trace at full size")
    draw(*replayed())


def run(**flags: Any) -> None:
    """Start two stages, show what their host tiers hold, and ask until all is answered or they part."""
    console.print(" ".join(as_flags(EngineConfig(**FLAGS, **flags))))
    with LLM(**FLAGS, **flags) as llm:
        show_capacities(llm.ready)
        hits = 0
        for number, prompt in enumerate(prompts()):
            try:
                meta = llm.generate(prompt, ANSWER, progress=False)["meta_info"]
            except RuntimeError as error:
                console.print(f"request {number:2}  [bold]{error}[/bold]")
                console.print(
                    "            All stages stopped there: no token of that step or later has been sent.\n"
                )
                return
            hits += (meta["cached_tokens_details"] or {}).get("host", 0)
        console.print(f"{number + 1} requests answered, {hits} prompt tokens came back from the host tier\n")


def show_capacities(ready: Ready) -> None:
    """One line a stage: layers, price and host tokens."""
    for stage in ready.stages:
        console.print(
            f"step 0      stage {stage.pp_rank}: layers {stage.layers[0]} to {stage.layers[1] - 1}, "
            f"{stage.bytes_per_token:,} bytes a token, host tier of {stage.host_tokens:,} tokens"
            + (
                f" (alone {stage.host_local_tokens:,})"
                if stage.host_tokens != stage.host_local_tokens
                else ""
            )
        )


def prompts() -> list[str]:
    """Five long prompts twice, then five others: more than the device holds, and in the end than the host does."""
    texts = [
        f"A traveller's notes on {city}, part one. " + f"What I saw in {city} on that day was this. " * 14
        for city in CITIES
    ]
    return texts[:5] * 2 + texts[5:] * 2


def replayed() -> tuple[list[trace.Seen], list[trace.Seen]]:
    """The trace through the stages of the known fault: one with 19 layers and one with 20, by the planner's numbers."""
    flags = PlannerFlags(
        pp_size=4, tp_size=4, hicache_size=100, page_size=64, kv_cache_dtype="fp8", dtype="bfloat16"
    )
    config = json.loads((ROOT / "examples" / "glm-5.2-fp8.json").read_text())
    counts = sorted({stage.pools[0].count_before or 0 for stage in plan_capacity(config, flags).stages})
    console.print(
        f"host tiers of {counts[0]:,} and {counts[-1]:,} tokens behind {TRACE_DEVICE_TOKENS:,} on the device, "
        f"pages of {trace.PAGE_TOKENS}"
    )
    total = sum(1 for _ in trace.requests())
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("requests", total=2 * total)
        lesser, greater = (
            trace.replay(TRACE_DEVICE_TOKENS, tokens, progress=lambda: bar.advance(task))
            for tokens in (counts[0], counts[-1])
        )
    return lesser, greater


def draw(lesser: list[trace.Seen], greater: list[trace.Seen]) -> None:
    """Say where the two stages part, and draw how full their host tiers are over the time of the trace."""
    from matplotlib import pyplot

    parting = trace.first_difference(lesser, greater)
    assert parting is not None, "the stages never part"
    found = [stage[parting].device_tokens + stage[parting].host_tokens for stage in (greater, lesser)]
    differ = sum(
        (a.device_tokens + a.host_tokens) != (b.device_tokens + b.host_tokens)
        for a, b in zip(lesser, greater, strict=True)
    )
    line = (
        f"request {parting} ({lesser[parting].seconds:.0f} s) finds {found[0]:,} tokens on stages 0 and 1, "
        f"{found[1]:,} on stages 2 and 3"
    )
    console.print(f"{line}; {differ} of {len(lesser):,} requests differ in all")

    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120)
    until = 2 * parting
    for stage, name, colour in (
        (greater, "stages 0 and 1: 19 layers", "#1f77b4"),
        (lesser, "stages 2 and 3: 20 layers", "#d62728"),
    ):
        seconds = [one.seconds for one in stage[:until]]
        axes.step(
            seconds, [one.host_used / 1e6 for one in stage[:until]], where="post", label=name, color=colour
        )
    axes.axvline(lesser[parting].seconds, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"request {parting}: {found[0]:,} tokens found,\nand {found[1]:,} by the other stages",
        (lesser[parting].seconds, 3.0),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
    )
    full = next(a.seconds for a, b in zip(lesser, greater, strict=True) if a.host_used != b.host_used)
    axes.annotate(
        f"at {full:.0f} s stages 2 and 3\nevict, the others not yet",
        (full, lesser[until].host_used / 1e6),
        xytext=(-12, -46),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "linewidth": 0.8},
    )
    axes.set_xlabel("time in the conversation trace, s")
    axes.set_ylabel("host tier in use, million tokens")
    axes.set_title(
        "One size in GB, two capacities: GLM-5.2 FP8, 78 layers over 4 stages, 100 GB a rank", fontsize=10
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)
    console.print(f"drawn to {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
