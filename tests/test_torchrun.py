"""Under torchrun each process is a rank and the leader starts the front end: it serves, ends and refuses alike."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from tests.service import FP32, ROOT, serve
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.process

GONE_S = 20.0
TCP = ("--link-address", "127.0.0.1")
SECRET = {"LOCKSTEP_SECRET": "a secret of many bytes"}


def layout(dense, *flags):
    return ("--model-path", str(dense.folder), *FP32, "--pp-size", "2", "--max-total-tokens", "8192", *flags)


def test_serves_and_drains(dense):
    prompts = dense.clear_prompts([30] * 8, 24, seed=40)
    with serve(*layout(dense), torchrun=2) as service:
        assert set(service.living()) == {"torchrun", "rank 0", "rank 1", "front end"}
        assert [stage["layers"] for stage in service.info()["stages"]] == [[0, 2], [2, 5]]
        for _ in range(2):
            assert service.gen_all(prompts, 24) == dense.ids(prompts, 24)
        service.check_idle()
        assert len(service.run_folders()) == 1
        streams = [service.stream(prompt, 300) for prompt in prompts]
        for stream in streams:
            stream.wait_tokens(3)
        service.terminate()
        for stream in streams:
            stream.wait_end()
            assert (stream.finish, stream.terminators, len(stream.output_ids)) == ("length", 1, 300)
        service.wait_exit()
        assert not service.run_folders()


@pytest.mark.parametrize("role", ["rank 0", "rank 1", "front end"])
def test_a_killed_process_ends_all(dense, role):
    with serve(*layout(dense), torchrun=2, probe=False) as service:
        streams = [service.stream([number, 2, 3], 1500) for number in range(8)]
        for stream in streams:
            stream.wait_tokens(3)
        service.signal(role, signal.SIGKILL)
        assert all(stream.wait_end(GONE_S).failed for stream in streams)
        assert service.health() != 200
        assert service.wait_exit(GONE_S) != 0
        assert f"{role}" in service.stderr


def test_a_killed_torchrun_ends_all(dense):
    with serve(*layout(dense), torchrun=2, probe=False) as service:
        service.signal("torchrun", signal.SIGKILL)
        service.wait_exit(GONE_S)


def test_over_tcp_with_a_secret(dense):
    prompts = dense.clear_prompts([30] * 8, 24, seed=40)
    with serve(*layout(dense, *TCP), torchrun=2, **SECRET) as service:
        assert service.gen_all(prompts, 24) == dense.ids(prompts, 24)
        service.check_idle()


def run_ranks(*flags_of_each):
    """Start ranks by hand, as two torchrun agents with other flags would; returns exit codes and lines of stderr."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    size = str(len(flags_of_each))
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "none"}
    shared |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "server.py"), "--port", "0", *flags],
            env=os.environ | SECRET | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, flags in enumerate(flags_of_each)
    ]
    try:
        said = [rank.communicate(timeout=60)[1].splitlines() for rank in ranks]
        return [rank.returncode for rank in ranks], said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (("--page-size", "16"), ("--page-size", "32"), "--page-size differs: 16 on rank 0, 32 on rank 1"),
        (TCP, (*TCP, "--dtype", "bfloat16"), "--dtype differs: float32 on rank 0, bfloat16 on rank 1"),
    ],
    ids=["one machine", "tcp"],
)
def test_a_flag_that_differs_between_ranks_is_refused_by_name(dense, first, second, named):
    codes, said = run_ranks(layout(dense, *first), layout(dense, *second))
    assert 0 not in codes
    assert named in said[0][-1]
    if first == TCP:
        assert named in said[1][-1], "the operator of another machine sees it as well"


def test_another_model_on_one_rank_is_refused(dense, tmp_path):
    other = make_tiny(tmp_path, num_hidden_layers=6)
    flags = ("--max-total-tokens", "8192", "--pp-size", "2", *FP32)
    codes, said = run_ranks(("--model-path", str(dense.folder), *flags), ("--model-path", str(other), *flags))
    assert 0 not in codes and "model (configuration and tensor headers) differs" in said[0][-1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_wrong_number_of_ranks_is_a_usage_error(dense, ranks):
    # sglang#34755: one rank missing, and the others wait; each says so at once by itself, before it meets the others.
    codes, said = run_ranks(*[layout(dense)] * ranks)
    assert codes == [2] * ranks
    for lines in said:
        assert lines == [f"server.py: --pp-size 2, --tp-size 1: need 2 ranks, but {ranks} were started"]
