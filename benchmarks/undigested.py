"""The engine without digests, to measure what they cost; run as a program it is such a server.py.

Replicas then note, fold and hash nothing. Every digest is 0, so ranks still compare, and always find themselves in
agreement. The engine has no such switch, on purpose: functions of the pure half are replaced from here, in this process
alone. Never serve with it.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SELF = Path(__file__).resolve()


@contextlib.contextmanager
def undigested() -> Iterator[None]:
    """Schedulers of this process keep no digest meanwhile. The calls that would note an event stay, and do nothing."""
    from engine.scheduler import scheduler
    from engine.scheduler.digest import Accumulator
    from engine.scheduler.state_vector import State

    class Nowhere:
        def __iadd__(self, numbers: tuple[int, ...]) -> Nowhere:
            return self

    def take_nothing(replica: scheduler.Scheduler, *, host_counts: bool) -> State:
        replica.events.rows.noted = Nowhere()
        return State((), ())

    with (
        mock.patch.object(Accumulator, "note", lambda self, *numbers: None),
        mock.patch.object(scheduler, "take_state", take_nothing),
        mock.patch.object(scheduler, "fold_digest", lambda previous, counters, events: 0),
    ):
        yield


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    with undigested():
        runpy.run_path(str(ROOT / "server.py"), run_name="__main__")
