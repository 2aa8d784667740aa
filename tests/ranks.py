"""Real processes that start as ranks do, as far as groups, links and the conversation go, and then run a given text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.distributed.launch import Children, start_ranks

PATIENCE_S = 90.0

# What every rank of these tests runs: the start of a rank, as far as this package goes, then WORK.
RANK = """
import json, os, signal, sys, threading, time
from pathlib import Path
from engine.distributed.launch import hold_lifeline, read_place
place = read_place(os.environ)
hold_lifeline(place)
out, pp_size, tp_size, work = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

import psutil, torch
import torch.distributed as dist
from engine.distributed import parallel_state
from engine.distributed.agreement import Agreement, RankLost, Refused
from engine.distributed.links import Lost, Poller, Received
from engine.distributed.rendezvous import establish, share_folder
from engine.distributed.run_folder import RunFolder
from engine.topology import Topology

topology = Topology.build(place.rank, tp_size=tp_size, pp_size=pp_size, layer_count=pp_size)
store = parallel_state.open_store(place)
if place.run_folder is not None:
    folder = RunFolder.open(place.run_folder)
else:
    folder = share_folder(store, is_leader=topology.is_leader)
links = establish(topology, folder.path, store, folder.secret)
agreement = Agreement(topology.rank, topology.world_size, links.log)
poller = Poller(silence_s=30)
for link in links.all:
    poller.add(link)

def control():
    while True:
        for event in poller.poll():
            if isinstance(event, Received):
                agreement.put(event.link, event.frame)
            elif isinstance(event, Lost) and event.link in links.log.values():
                agreement.lost(event.link, event.reason)

threading.Thread(target=control, daemon=True).start()
result = {}
try:
    exec(work)
except (Refused, RankLost) as error:
    result["error"] = [type(error).__name__, str(error)]
(out / f"{place.rank}.json.new").write_text(json.dumps(result))
os.rename(out / f"{place.rank}.json.new", out / f"{place.rank}.json")
if place.torchrun:
    agreement.gather("end", None)
poller.flush(5)
if place.torchrun:
    folder.remove()
parallel_state.destroy()
os._exit(0)
"""


def results(folder: Path, count: int) -> list[Any]:
    """What each of the first `count` ranks found out."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@contextmanager
def starting_ranks(tmp_path: Path) -> Iterator[Callable[[str, int, int], tuple[Children, Path]]]:
    """A function that starts pp x tp ranks which run `work`; it gives them and their folder. All are ended at last."""
    started: list[Children] = []

    def start(work: str, pp_size: int, tp_size: int) -> tuple[Children, Path]:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir(mode=0o700)
        (folder / "secret").write_bytes(b"s" * 32)
        command = [sys.executable, "-c", RANK, str(folder), str(pp_size), str(tp_size), work]
        started.append(start_ranks(command, pp_size * tp_size, folder, threads=1))
        return started[-1], folder

    yield start
    for children in started:
        children.terminate(0)
