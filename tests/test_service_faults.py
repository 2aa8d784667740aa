"""Real processes that die, stop, part or are told to end: every client hears of it, and nothing is left behind."""

import re
import signal
import time

import pytest

from tests.service import FP32, run_to_end, serve, until

pytestmark = pytest.mark.process

CLIENT_S = 10.0
"""How soon every client must know that the service is gone."""
GONE_S = 20.0


def layout(dense, *flags, pp_size):
    return ("--model-path", str(dense.folder), *FP32, "--pp-size", str(pp_size), "--max-total-tokens", "16384", *flags)


def long_streams(service, count=8):
    """Clients whose answers last as long as any test."""
    streams = [service.stream([number, 2, 3], 1500) for number in range(count)]
    for stream in streams:
        stream.wait_tokens(3)
    return streams


@pytest.mark.parametrize("role", ["front end", "rank 0", "rank 1", "rank 2"])
def test_a_killed_process_ends_all_and_every_client_knows(dense, role):
    # vllm#55510, sglang#23627: the front end dies and ranks live on; mlx-lm#1834: health stays green.
    with serve(*layout(dense, pp_size=3), probe=False) as service:
        streams = long_streams(service)
        killed_at = time.monotonic()
        service.signal(role, signal.SIGKILL)
        for stream in streams:
            assert stream.wait_end(GONE_S).failed
            assert stream.ended_at - killed_at < CLIENT_S
        assert service.health() != 200
        code = service.wait_exit(GONE_S)
        assert code == (-signal.SIGKILL if role == "front end" else 71)
        if role != "front end":
            assert role in service.last_line
            assert not service.run_folders()


@pytest.mark.parametrize("role", ["rank 0", "rank 1"])
def test_a_stopped_process_is_noticed(dense, role):
    with serve(*layout(dense, pp_size=3), probe=False) as service:
        streams = long_streams(service)
        stopped_at = time.monotonic()
        service.signal(role, signal.SIGSTOP)
        for stream in streams:
            assert stream.wait_end(GONE_S).failed
            assert stream.ended_at - stopped_at < CLIENT_S
        assert service.wait_exit(GONE_S) == 71
        assert role in service.last_line


@pytest.mark.parametrize("rank", [0, 1])
def test_parted_replicas_stop_before_a_token_of_that_step_leaves(dense, rank):
    # sglang#29054, sglang#30760: nobody could name the first divergence.
    step = 40
    flip = {"flip": {"rank": rank, "step": step, "field": "retractions"}}
    with serve(*layout(dense, pp_size=2), faults=flip, probe=False) as service:
        stream = service.stream([5, 6, 7], 200).wait_end()
        assert stream.error["code"] == 503 and "DIVERGED" in stream.error["message"]
        assert 5 < len(stream.output_ids) < step  # one request gains at most a token a step
        assert stream.output_ids == dense.answers([[5, 6, 7]], 200)[0].ids[: len(stream.output_ids)]
        assert service.wait_exit() == 70
        told = re.search(r"DIVERGED step=(\d+) rank=1 vs rank=0 field='(\w+)' (\d) != (\d)", service.last_line)
        assert told.groups() == (str(step), "retractions", str(rank), str(1 - rank))
