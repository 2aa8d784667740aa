"""Groups, links and the start-up conversation on real processes, started by us and by torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

from engine.distributed import parallel_state
from engine.distributed.launch import ExitCode, Place
from engine.topology import Topology
from tests.ranks import PATIENCE_S, RANK, results, starting_ranks

GROUPS = """
parallel_state.initialize(topology, store)
world, tp, pp = parallel_state.get_world_group(), parallel_state.get_tp_group(), parallel_state.get_pp_group()
for name, group in (("world", world), ("tp", tp), ("pp", pp)):
    number = torch.tensor([100 - place.rank])
    if group.world_size > 1:
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group.cpu_group)
    result[name] = [group.rank_in_group, list(group.ranks), group.world_size, int(number)]
result["agreed"] = agreement.minimum("number", 100 - place.rank)
result["threads"] = torch.get_num_threads()
agreement.vote("all groups made", None)
connections = psutil.Process().net_connections("inet")
result["listening"] = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
result["addresses"] = sorted({c.laddr.ip for c in connections})
result["run_folder"] = str(folder.path)
agreement.vote("all looked", None)
"""


@pytest.fixture(autouse=True)
def an_interface_that_others_can_reach(monkeypatch):
    """Where there is one, the environment tells gloo to use it, so that binding to loopback must be our doing."""
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family == socket.AF_INET and not known.address.startswith("127."):
                monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)


@pytest.fixture
def run(tmp_path):
    """Starts pp x tp ranks that run `work`; gives them and the folder where each leaves what it found out."""
    with starting_ranks(tmp_path) as start:
        yield start


def test_groups_before_set_up_raise_an_assertion_error():
    # What a host pool that sizes itself asks; anything else than AssertionError would end it.
    for get in (
        parallel_state.get_world_group,
        parallel_state.get_tp_group,
        parallel_state.get_pp_group,
    ):
        with pytest.raises(AssertionError, match="not initialized"):
            get()


def test_a_world_of_one_initialises_nothing():
    topology = Topology.build(0, tp_size=1, pp_size=1, layer_count=4)
    assert parallel_state.open_store(Place(role="rank")) is None
    parallel_state.initialize(topology, None)
    try:
        for group in (
            parallel_state.get_world_group(),
            parallel_state.get_tp_group(),
            parallel_state.get_pp_group(),
        ):
            assert (group.rank_in_group, group.world_size, group.ranks, group.cpu_group) == (0, 1, (0,), None)
        assert not torch.distributed.is_initialized()
        with pytest.raises(AssertionError, match="exist already"):
            parallel_state.initialize(topology, None)
    finally:
        parallel_state.destroy()
    parallel_state.destroy()
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_pp_group()


def check_groups(found, pp_size, tp_size):
    """Ranks are laid out pp outer, tp inner, and a MIN stays inside its group."""
    size = pp_size * tp_size
    for rank, result in enumerate(found):
        stage, slice_ = divmod(rank, tp_size)
        tp = [stage * tp_size + other for other in range(tp_size)]
        pp = [other * tp_size + slice_ for other in range(pp_size)]
        assert result["world"] == [rank, list(range(size)), size, 100 - (size - 1)]
        assert result["tp"] == [slice_, tp, tp_size, 100 - tp[-1]]
        assert result["pp"] == [stage, pp, pp_size, 100 - pp[-1]]
        assert result["agreed"] == 100 - (size - 1)


@pytest.mark.parametrize(("pp_size", "tp_size"), [(2, 1), (2, 2)])
def test_groups_of_real_processes(run, pp_size, tp_size):
    children, folder = run(GROUPS, pp_size, tp_size)
    ended = children.wait(PATIENCE_S)
    assert [one.code for one in ended] == [0] * (pp_size * tp_size), ended
    found = results(folder, pp_size * tp_size)
    check_groups(found, pp_size, tp_size)
    assert {result["threads"] for result in found} == {1}
    # sglang#21435: nothing of a service on one machine listens on an address that others can reach.
    assert {address for result in found for address in result["listening"]} <= {"127.0.0.1"}
    assert {address for result in found for address in result["addresses"]} == {"127.0.0.1"}


def test_two_services_at_the_same_moment_do_not_mix(run):
    # sglang#34755: rendezvous ports picked, released, and taken by the other.
    names = "first", "second"
    both = [run(f"result['all'] = agreement.gather('name', '{name}')", 2, 1) for name in names]
    for name, (children, folder) in zip(names, both, strict=True):
        assert [one.code for one in children.wait(PATIENCE_S)] == [0, 0]
        assert results(folder, 2) == [{"all": [name, name]}] * 2


def test_a_killed_rank_is_named_by_all_others(run):
    work = """
if place.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
agreement.vote("weights", None)
"""
    children, folder = run(work, 3, 1)
    assert [one.signal_name for one in children.wait(PATIENCE_S)] == [None, None, "SIGKILL"]
    error = ["RankLost", "rank 2 is gone (end of file) during the start"]
    assert results(folder, 2) == [{"error": error}] * 2


def test_the_address_of_no_interface_is_refused(monkeypatch):
    topology = Topology.build(0, tp_size=1, pp_size=2, layer_count=2)
    with pytest.raises(
        ValueError, match=r"--link-address 192\.0\.2\.9: allowed is an address of this machine"
    ):
        parallel_state.initialize(topology, torch.distributed.HashStore(), address="192.0.2.9")
    with pytest.raises(AssertionError):
        parallel_state.get_pp_group()


# ---- torchrun -----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def torchrun(tmp_path, work, pp_size, **environment):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(pp_size)]
    # Only here a port is picked and released first: torchrun itself takes no other.
    command += [
        "--master-port",
        str(free_port()),
        str(tmp_path / "rank.py"),
        str(tmp_path),
        str(pp_size),
        "1",
    ]
    return subprocess.Popen(
        [*command, work],
        env=os.environ
        | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_torchruns_ranks_meet_over_its_store_and_loopback(tmp_path):
    with torchrun(tmp_path, GROUPS, 2) as agent:
        output, _ = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, output
    found = results(tmp_path, 2)
    check_groups(found, 2, 1)
    assert {address for result in found for address in result["listening"]} <= {"127.0.0.1"}
    assert found[0]["run_folder"] == found[1]["run_folder"]
    assert not os.path.exists(found[0]["run_folder"])


def test_when_torchrun_is_killed_no_rank_is_left(tmp_path):
    work = (
        "(out / f'{place.rank}.pid').write_text(str(os.getpid()))\nagreement.vote('up', None)\nsignal.pause()"
    )
    with torchrun(tmp_path, work, 2) as agent:
        deadline = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("*.pid"))) < 2 or not all(
            path.read_text() for path in tmp_path.glob("*.pid")
        ):
            assert time.monotonic() < deadline and agent.poll() is None, "torchrun's ranks did not start"
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
        agent.send_signal(signal.SIGKILL)
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            assert time.monotonic() < deadline, "a rank outlived torchrun"
            time.sleep(0.05)


def test_a_store_that_torchrun_does_not_share_is_refused(monkeypatch):
    # sglang#21435: the rank's own TCPStore would listen on every interface.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        parallel_state.open_store(Place(role="rank", torchrun=True, world_size=2, local_world_size=2))


def test_exit_codes_are_the_documented_ones():
    assert [code.value for code in ExitCode] == [0, 2, 3, 70, 71]
