"""Processes: who this one is, how the others are started, watched and ended. No torch, so the front end may import it.

`python server.py` is the front end and starts the ranks; under torchrun every rank runs server.py and the leader
starts the front end. Either way the pair talks over an inherited socketpair, which needs no address and no secret
and ends when either end dies. Children hold a lifeline, the read end of a pipe whose write end only the starter
has: when the starter is gone, whichever way, the pipe ends and they exit. Nothing here knows what is served.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
KILL_WAIT_S = 5.0
SECRET_BYTES_MIN = 16
STALE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)
"""What an earlier launcher may have left in the environment; children of ours never see it."""


class ExitCode(enum.IntEnum):
    """How a service ends."""

    DRAINED = 0
    USAGE = 2
    REFUSED = 3
    DIVERGED = 70
    RANK_LOST = 71


Role = Literal["service", "rank", "front end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of a service this one is."""

    role: Role
    """`service`: started by hand; it becomes the front end and starts the ranks."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    torchrun: bool = False
    run_folder: Path | None = None
    """Of the service; None under torchrun, where the ranks settle on one (`rendezvous.share_folder`)."""
    lifeline_fd: int | None = None
    front_fd: int | None = None
    """The inherited socket between front end and leader, on the one of the two that was started by the other."""
    dies_with_parent: bool = False
    """The kernel may be asked to kill this process when its parent ends."""

    @property
    def one_machine(self) -> bool:
        """True when all ranks run on this machine."""
        return self.local_world_size == self.world_size


def read_place(environment: Mapping[str, str]) -> Place:
    """Who this process is, from its environment. Raises ValueError, one line naming the variable that is wrong.

    RANK, WORLD_SIZE and the like count only when this launcher or torchrun (TORCHELASTIC_RUN_ID) set them.
    """
    ours = environment.get("LOCKSTEP_ROLE")
    if ours is None and "TORCHELASTIC_RUN_ID" not in environment:
        return Place(role="service")
    if ours not in (None, "rank", "front end"):
        raise ValueError(
            f"LOCKSTEP_ROLE {ours}: allowed are rank and front end; it is set by server.py itself"
        )
    folder = environment.get("LOCKSTEP_RUN_FOLDER")
    is_rank = ours != "front end"
    sizes = {
        name: _number(environment, name) if is_rank else default
        for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    }
    if not 0 <= sizes["RANK"] < sizes["WORLD_SIZE"]:
        raise ValueError(f"RANK {sizes['RANK']}: allowed is 0 to {sizes['WORLD_SIZE'] - 1}, by WORLD_SIZE")
    return Place(
        role="rank" if is_rank else "front end",
        rank=sizes["RANK"],
        local_rank=sizes["LOCAL_RANK"],
        world_size=sizes["WORLD_SIZE"],
        local_world_size=sizes["LOCAL_WORLD_SIZE"],
        torchrun=ours is None,
        run_folder=Path(folder) if ours is not None and folder else None,
        lifeline_fd=_descriptor(environment, "LOCKSTEP_LIFELINE", stat.S_ISFIFO) if ours else None,
        front_fd=_descriptor(environment, "LOCKSTEP_FRONT", stat.S_ISSOCK) if ours else None,
        dies_with_parent=ours is None or environment.get("LOCKSTEP_DIES_WITH_PARENT") == "1",
    )


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The secret by which ranks on several machines know each other: LOCKSTEP_SECRET, or what the file that
    LOCKSTEP_SECRET_FILE names contains, less blanks around it. Raises ValueError, one line, never showing it."""
    text, path = environment.get("LOCKSTEP_SECRET", ""), environment.get("LOCKSTEP_SECRET_FILE")
    if path is not None:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"LOCKSTEP_SECRET_FILE {path}: cannot be read ({error})") from None
    secret = text.strip().encode()
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(
            f"LOCKSTEP_SECRET: has {len(secret)} bytes; ranks on several machines share one of "
            f"at least {SECRET_BYTES_MIN}"
        )
    return secret


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: by affinity, and by a container's quota where there is one; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))  # "max" is no number: no quota
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((cgroups / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            cores = min(cores, quota_us // int((cgroups / "cpu" / "cpu.cfs_period_us").read_text()))
    return max(cores, 1)


def threads_per_rank(asked: int | None, local_world_size: int) -> int:
    """CPU threads of one rank: what the operator asked for, else cores // ranks of this machine, at least 1."""
    return asked if asked is not None else max(usable_cores() // local_world_size, 1)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that give a process `threads` CPU threads which sleep, not spin, while they wait for work.

    OpenMP reads them when torch is imported; a rank under torchrun puts them into `os.environ` before that.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended."""

    name: str
    """`rank 1` or `front end`."""
    pid: int
    code: int | None
    """Exit code, or None when a signal ended it."""
    signal_name: str | None
    """`SIGKILL` and the like, or None."""

    def __str__(self) -> str:
        how = f"exited with code {self.code}" if self.code is not None else f"was ended by {self.signal_name}"
        return f"{self.name} (pid {self.pid}) {how}"


class Children:
    """Processes that this one started. They end when this process does, by `terminate` or by its death."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lifeline_out, self._lifeline_in = os.pipe()
        self._closed = False
        self.front: socket.socket | None = None
        """This process' end of the socket between front end and leader."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, ended children included."""
        return {name: process.pid for name, process in self._processes.items()}

    def exits(self) -> list[Exit]:
        """Those that have ended so far. Never waits."""
        ended = [(name, process, process.poll()) for name, process in self._processes.items()]
        return [_exit(name, process.pid, code) for name, process, code in ended if code is not None]

    def wait(self, timeout_s: float) -> list[Exit]:
        """Wait until all have ended, at most `timeout_s`; returns those that have."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        return self.exits()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one child; nothing happens if it has ended."""
        self._processes[name].send_signal(number)

    def terminate(self, grace_s: float) -> list[Exit]:
        """End all: SIGTERM, then after `grace_s` the lifeline and SIGKILL. Afterwards none is left."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        self.wait(grace_s)
        self._close()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        return self.wait(KILL_WAIT_S)

    def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], front: socket.socket | None
    ) -> None:
        """Start one child in its own process group, with our environment less what an earlier launcher left in it.

        `front` is the child's end of the socket between front end and leader. Call it from a thread that lives as
        long as the service: the kernel counts the end of the starting thread as the parent's death.
        """
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in STALE and not key.startswith(("TORCHELASTIC_", "LOCKSTEP_ROLE", "LOCKSTEP_FRONT"))
        }
        environment |= variables
        environment["LOCKSTEP_LIFELINE"] = str(self._lifeline_out)
        on_main = threading.current_thread() is threading.main_thread()
        environment["LOCKSTEP_DIES_WITH_PARENT"] = "1" if on_main else "0"
        inherited = [self._lifeline_out]
        if front is not None:
            environment["LOCKSTEP_FRONT"] = str(front.fileno())
            inherited.append(front.fileno())
        self._processes[name] = subprocess.Popen(
            list(command), env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL, process_group=0
        )

    def _close(self) -> None:
        """Let go of the lifeline and the socket."""
        if not self._closed:
            self._closed = True
            os.close(self._lifeline_in)
            os.close(self._lifeline_out)
            if self.front is not None:
                self.front.close()


def start_ranks(
    command: Sequence[str], world_size: int, run_folder: Path, *, threads: int | None = None
) -> Children:
    """Start `world_size` ranks of one service on this machine; `command` runs server.py, with its flags.

    Each gets torchrun's variables, its threads (`threads_per_rank`), the run folder and a lifeline; rank 0, the
    leader, also the other end of `Children.front`. If one cannot be started, none is left.
    """
    children = Children()
    children.front, leaders_end = _socketpair()
    shared = thread_environment(threads_per_rank(threads, world_size)) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCKSTEP_ROLE": "rank",
        "LOCKSTEP_RUN_FOLDER": str(run_folder),
    }
    try:
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.start(f"rank {rank}", command, shared | own, leaders_end if rank == 0 else None)
    except BaseException:
        children.terminate(0)
        raise
    finally:
        leaders_end.close()
    return children


def start_front_end(command: Sequence[str], run_folder: Path | None = None) -> Children:
    """Start the front end as a child of the leader, under torchrun; `Children.front` is the leader's end."""
    children = Children()
    children.front, fronts_end = _socketpair()
    variables = {"LOCKSTEP_ROLE": "front end"}
    if run_folder is not None:
        variables["LOCKSTEP_RUN_FOLDER"] = str(run_folder)
    try:
        children.start("front end", command, variables, fronts_end)
    except BaseException:
        children.terminate(0)
        raise
    finally:
        fronts_end.close()
    return children


def hold_lifeline(place: Place, *, grace_s: float = 0.0) -> None:
    """In a child, first of all: make sure that this process ends when its starter does.

    A thread blocks on the lifeline and, once it ends, leaves the process `grace_s` to say its last words. Should
    the process be too stuck even for that thread, the kernel kills it with its parent (Linux).
    """
    if place.dies_with_parent and sys.platform == "linux":
        _die_with_parent()
    if place.lifeline_fd is not None:
        guard = threading.Thread(
            target=_watch_lifeline, args=(place.lifeline_fd, grace_s), name="lifeline", daemon=True
        )
        guard.start()


def front_socket(place: Place) -> socket.socket:
    """The inherited socket between front end and leader, on the one that was started by the other."""
    assert place.front_fd is not None, f"{place.role} {place.rank} has no socket to the front end or leader"
    return socket.socket(fileno=place.front_fd)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that started us ends: prctl(PR_SET_PDEATHSIG, SIGKILL)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(ExitCode.RANK_LOST)


def _watch_lifeline(fd: int, grace_s: float) -> NoReturn:
    while os.read(fd, 1):
        pass  # nobody writes to it; should somebody do, that is no end
    time.sleep(grace_s)
    os._exit(ExitCode.RANK_LOST)


def _socketpair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


def _exit(name: str, pid: int, code: int) -> Exit:
    if code >= 0:
        return Exit(name, pid, code, None)
    try:
        return Exit(name, pid, None, signal.Signals(-code).name)
    except ValueError:
        return Exit(name, pid, None, f"signal {-code}")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"{name} {text or 'absent'}: allowed is a whole number; the launcher sets it")
    return int(text)


def _descriptor(environment: Mapping[str, str], name: str, fits: Callable[[int], bool]) -> int | None:
    """An inherited file descriptor, checked to be of the right kind, so that a stale number does no harm."""
    if name not in environment:
        return None
    fd = _number(environment, name)
    try:
        right = fits(os.fstat(fd).st_mode)
    except OSError:
        right = False
    if not right:
        raise ValueError(
            f"{name} {fd}: is no inherited descriptor of the right kind; server.py itself sets it"
        )
    return fd
