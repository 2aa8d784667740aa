"""Processes: started with the right environment, watched, and never left behind, whichever dies first."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.distributed import launch
from engine.distributed.launch import (
    Exit,
    ExitCode,
    Place,
    read_place,
    read_secret,
    start_front_end,
    start_ranks,
    threads_per_rank,
    usable_cores,
)

PATIENCE_S = 30.0

CHILD = """
import json, os, signal, socket, sys, time
from pathlib import Path
from engine.distributed.launch import front_socket, hold_lifeline, read_place
place = read_place(os.environ)
hold_lifeline(place)
{work}
"""

REPORTS = """
told = {"argv": sys.argv[1:], "environment": dict(os.environ), "group": os.getpgid(0), "pid": os.getpid(),
        "role": place.role, "rank": place.rank, "world_size": place.world_size, "torchrun": place.torchrun}
Path(place.run_folder or sys.argv[-1], f"{place.role} {place.rank}.json").write_text(json.dumps(told))
if place.front_fd is not None:
    front = front_socket(place)
    front.sendall(front.recv(100)[::-1])
"""

SLEEPS = "Path(place.run_folder, f'up {place.rank}').touch()\nsignal.pause()\n"


def program(work):
    return [sys.executable, "-c", CHILD.replace("{work}", work), "--flag", "value"]


def wait_until(done, what):
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def children():
    """Collects what a test starts, so that nothing outlives it."""
    started = []
    yield started
    for one in started:
        one.terminate(0)


def test_ranks_get_torchruns_variables_and_nothing_stale(tmp_path, children, monkeypatch):
    # sglang#34755: stale MASTER_PORT, RANK and WORLD_SIZE in the environment.
    stale = {"MASTER_PORT": "1", "MASTER_ADDR": "192.0.2.1", "RANK": "9", "WORLD_SIZE": "10"}
    stale |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCKSTEP_FRONT": "0"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    ranks = start_ranks(program(REPORTS), 3, tmp_path, threads=2)
    children.append(ranks)
    ranks.front.sendall(b"hello")
    assert ranks.front.recv(100) == b"olleh"
    assert [str(one) for one in ranks.wait(PATIENCE_S)] == [
        f"rank {rank} (pid {ranks.pids[f'rank {rank}']}) exited with code 0" for rank in range(3)
    ]
    for rank in range(3):
        told = json.loads((tmp_path / f"rank {rank}.json").read_text())
        assert (told["role"], told["rank"], told["world_size"], told["torchrun"]) == ("rank", rank, 3, False)
        assert told["argv"] == ["--flag", "value"]
        assert told["pid"] == ranks.pids[f"rank {rank}"]
        assert told["group"] == told["pid"], "Ctrl-C at the terminal must reach the front end alone"
        environment = told["environment"]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["OMP_NUM_THREADS"] == "2" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert not {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(environment)
        assert ("LOCKSTEP_FRONT" in environment) == (rank == 0)


def test_the_end_of_a_child_is_told_by_name(tmp_path, children):
    ranks = start_ranks(program("if place.rank: signal.pause()\nsys.exit(3)"), 2, tmp_path)
    children.append(ranks)
    wait_until(ranks.exits, "rank 0 exits")
    assert ranks.exits() == [Exit("rank 0", ranks.pids["rank 0"], 3, None)]
    ranks.signal("rank 1", signal.SIGKILL)
    ended = ranks.wait(PATIENCE_S)
    assert ended[1] == Exit("rank 1", ranks.pids["rank 1"], None, "SIGKILL")
    assert str(ended[1]) == f"rank 1 (pid {ended[1].pid}) was ended by SIGKILL"
    ranks.signal("rank 1", signal.SIGTERM)  # no error, though it is gone


def test_terminate_ends_those_that_go_and_those_that_do_not(tmp_path, children):
    work = """
if place.rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
elif place.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(place.run_folder, f"up {place.rank}").touch()
while True:
    time.sleep(60)
"""
    ranks = start_ranks(program(work), 3, tmp_path)
    children.append(ranks)
    wait_until(lambda: all((tmp_path / f"up {rank}").exists() for rank in range(3)), "all ranks are up")
    ranks.signal("rank 2", signal.SIGSTOP)
    ended = ranks.terminate(0.5)
    assert [one.name for one in ended] == ["rank 0", "rank 1", "rank 2"]
    assert ended[0].code == 0
    # The lifeline or the kill, whichever comes first.
    assert ended[1].code == ExitCode.RANK_LOST or ended[1].signal_name == "SIGKILL"
    assert ended[2].signal_name in ("SIGKILL", "SIGTERM")
    assert all(gone(pid) for pid in ranks.pids.values())
    assert ranks.terminate(0.5) == ended


STARTER = """
import sys, threading, time
from pathlib import Path
from engine.distributed.launch import start_ranks
def start():
    global ranks
    ranks = start_ranks([sys.executable, "-c", sys.argv[2]], 3, Path(sys.argv[1]))
if sys.argv[3] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
print(*ranks.pids.values(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_starter_dies_no_rank_is_left(tmp_path, where, how):
    # vllm#55510, vllm#55846, sglang#23627: after SIGKILL of the front process the ranks run for ever.
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), program(SLEEPS)[2], where], stdout=subprocess.PIPE
    )
    pids = [int(word) for word in starter.stdout.readline().split()]
    try:
        assert len(pids) == 3
        wait_until(lambda: len(list(tmp_path.glob("up *"))) == 3, "all ranks are up")
        if where == "main":
            os.kill(pids[2], signal.SIGSTOP)  # only the kernel can end this one
        starter.send_signal(how)
        wait_until(lambda: all(map(gone, pids)), "all ranks are gone")
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_child_may_say_its_last_words(tmp_path, children):
    work = """
import threading
from engine.distributed import launch
read, write = os.pipe()
launch.hold_lifeline(launch.Place(role="rank", lifeline_fd=read), grace_s=0.5)
os.close(write)
time.sleep(0.1)
Path(place.run_folder, "last words").touch()
signal.pause()
"""
    ranks = start_ranks(program(work), 1, tmp_path)
    children.append(ranks)
    (ended,) = ranks.wait(PATIENCE_S)
    assert ended.code == ExitCode.RANK_LOST
    assert (tmp_path / "last words").exists()


def test_a_front_end_of_torchruns_leader(tmp_path, children, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    front_end = start_front_end([*program(REPORTS), str(tmp_path)])
    children.append(front_end)
    front_end.front.sendall(b"hello")
    assert front_end.front.recv(100) == b"olleh"
    assert [one.code for one in front_end.wait(PATIENCE_S)] == [0]
    told = json.loads((tmp_path / "front end 0.json").read_text())
    assert told["role"] == "front end" and "RANK" not in told["environment"]
    assert front_end.front.recv(1) == b"", "the end of the front end is the end of the socket"


def test_what_cannot_be_started_leaves_nothing(tmp_path):
    before = len(psutil.Process().open_files()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        start_ranks([str(tmp_path / "no such program")], 2, tmp_path)
    assert (len(psutil.Process().open_files()), len(os.listdir("/proc/self/fd"))) == before
    assert psutil.Process().children() == []


# ---- who am I -----------------------------------------------------------------------------------

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def test_a_plain_start_ignores_what_an_earlier_launcher_left():
    stale = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "y", "LOCKSTEP_LIFELINE": "7"}
    assert read_place(stale) == Place(role="service")


def test_torchruns_ranks_know_their_place():
    place = read_place(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})
    assert place == Place(
        role="rank",
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        torchrun=True,
        dies_with_parent=True,
    )
    assert not place.one_machine
    assert read_place(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).one_machine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "x"}, "RANK x: allowed is a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE absent: allowed is a whole number"),
        ({"RANK": "4"}, "RANK 4: allowed is 0 to 3"),
        ({"LOCKSTEP_ROLE": "king"}, "LOCKSTEP_ROLE king: allowed are rank and front end"),
        (
            {"LOCKSTEP_ROLE": "rank", "LOCKSTEP_LIFELINE": "1000000"},
            "LOCKSTEP_LIFELINE 1000000: is no inherited",
        ),
        ({"LOCKSTEP_ROLE": "rank", "LOCKSTEP_FRONT": "-1"}, "LOCKSTEP_FRONT -1: allowed is a whole number"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        read_place(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"} | change)


def test_a_socket_is_no_lifeline():
    ours, theirs = socket.socketpair()
    environment = TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCKSTEP_ROLE": "rank"}
    with pytest.raises(ValueError, match="LOCKSTEP_LIFELINE"):
        read_place(environment | {"LOCKSTEP_LIFELINE": str(ours.fileno())})
    assert read_place(environment | {"LOCKSTEP_FRONT": str(ours.fileno())}).front_fd == ours.fileno()
    ours.close()
    theirs.close()


def test_the_shared_secret_comes_from_the_environment_or_a_file(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    assert read_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "secret")}) == b"0123456789abcdef"
    assert read_secret({"LOCKSTEP_SECRET": "0123456789abcdefg"}) == b"0123456789abcdefg"
    with pytest.raises(ValueError, match=r"LOCKSTEP_SECRET: has 0 bytes; .* at least 16"):
        read_secret({})
    with pytest.raises(ValueError) as raised:
        read_secret({"LOCKSTEP_SECRET": "hunter2"})
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ValueError, match=r"LOCKSTEP_SECRET_FILE .*none: cannot be read"):
        read_secret({"LOCKSTEP_SECRET_FILE": str(tmp_path / "none")})


# ---- threads ------------------------------------------------------------------------------------


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(launch, "usable_cores", lambda: 7)
    assert [threads_per_rank(None, ranks) for ranks in (1, 2, 3, 7, 8, 100)] == [7, 3, 2, 1, 1, 1]
    assert threads_per_rank(5, 100) == 5


def test_a_containers_quota_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(tmp_path) == 16
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 16
    (tmp_path / "cpu.max").write_text("450000 100000\n")
    assert usable_cores(tmp_path) == 4
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    Path(tmp_path, "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == 16
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert usable_cores(tmp_path) == 3
