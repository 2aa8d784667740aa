"""Real processes that die, stop, part or are told to end: every client hears of it, and nothing is left behind."""

import json
import os
import re
import shutil
import signal
import time

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.reference import Reference
from tests.service import FP32, free_port, run_to_end, serve, until
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.process

CLIENT_S = 10.0
"""How soon every client must know that the service is gone."""
GONE_S = 20.0


def layout(dense, *flags, pp_size):
    return (
        "--model-path",
        str(dense.folder),
        *FP32,
        "--pp-size",
        str(pp_size),
        "--max-total-tokens",
        "16384",
        *flags,
    )


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
        told = re.search(
            r"DIVERGED step=(\d+) rank=1 \[PP1 TP0\] vs rank=0 \[PP0 TP0\] field='(\w+)' (\d) != (\d)",
            service.last_line,
        )
        assert told.groups() == (str(step), "retractions", str(rank), str(1 - rank))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_computing_fails_is_named(dense, rank):
    # nano-vllm#274, sglang#35270: an exception in a scheduler or a model, and everybody waits for ever.
    crash = {"crash": {"rank": rank, "step": 40}}
    with serve(*layout(dense, pp_size=2), faults=crash, probe=False) as service:
        stream = service.stream([5, 6, 7], 200).wait_end()
        assert stream.error["code"] == 503 and stream.terminators == 1
        assert service.wait_exit(GONE_S) == 71
        assert f"rank {rank} failed: RuntimeError: a fault on purpose" in service.last_line


def test_a_short_pause_of_a_rank_harms_nobody(dense):
    prompts = dense.clear_prompts([20] * 4, 100, seed=50)
    with serve(*layout(dense, pp_size=2)) as service:
        streams = [service.stream(prompt, 100) for prompt in prompts]
        for stream in streams:
            stream.wait_tokens(3)
        for role in ("rank 1", "rank 0", "front end"):
            service.signal(role, signal.SIGSTOP)
            time.sleep(0.5)
            service.signal(role, signal.SIGCONT)
        assert [stream.wait_end().output_ids for stream in streams] == dense.ids(prompts, 100)
        service.check_idle()


SLOW_START = {"load": {"rank": 1, "seconds": 600}}


def wait_for_weights(service):
    """The ranks have met and one of them loads for ever."""
    until(lambda: "a fault on purpose" in service.stderr, "a rank loads its weights")


@pytest.mark.parametrize("role", ["front end", "rank 0", "rank 1"])
def test_a_kill_while_weights_load(dense, role):
    url = f"http://127.0.0.1:{(port := free_port())}"
    with serve(*layout(dense, "--port", str(port), pp_size=3), faults=SLOW_START, wait=False) as service:
        wait_for_weights(service)
        for answer in (httpx.get(f"{url}/health"), httpx.post(f"{url}/generate", json={"input_ids": [1]})):
            assert answer.status_code == 503 and "loading" in answer.text
        service.signal(role, signal.SIGKILL)
        assert service.wait_exit(GONE_S) == (-signal.SIGKILL if role == "front end" else 71)
        assert role == "front end" or role in service.last_line


@pytest.mark.parametrize("role", ["rank 0", "rank 1"])
def test_a_kill_before_the_ranks_have_met(dense, role):
    with serve(*layout(dense, pp_size=2), wait=False) as service:
        until(lambda: role in service.living(), f"{role} has been started")
        service.signal(role, signal.SIGKILL)
        assert service.wait_exit(GONE_S) == 71
        assert role in service.last_line


@pytest.mark.parametrize(("pp_size", "role"), [(1, "rank 0"), (2, "rank 1")])
def test_a_kill_while_idle(dense, pp_size, role):
    with serve(*layout(dense, pp_size=pp_size)) as service:
        service.check_idle()
        service.signal(role, signal.SIGKILL)
        assert service.wait_exit(GONE_S) == 71
        assert role in service.last_line


def test_sigterm_lets_streams_finish_and_the_port_is_free_again(dense):
    # sglang#23627, vllm#32965: workers are killed before they can clean up; a restart finds the port taken.
    port = str(free_port())
    flags = layout(dense, "--port", port, pp_size=3)
    with serve(*flags) as service:
        streams = [service.stream([number, 2, 3], 600) for number in range(4)]
        for stream in streams:
            stream.wait_tokens(3)
        for pid in service.living().values():
            os.kill(pid, signal.SIGTERM)  # as systemd does: to all of a service at once
        until(lambda: "draining" in service.stderr, "the service drains")
        refused = service.post("/generate", {"input_ids": [1]})
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        for stream in streams:
            stream.wait_end()
            assert (stream.finish, stream.terminators, len(stream.output_ids)) == ("length", 1, 600)
        assert service.wait_exit() == 0
        assert not service.run_folders()
    with serve(*flags) as service:
        assert service.url.endswith(port)
        service.check_idle()


def test_sigterm_ends_what_does_not_finish_in_time(dense):
    with serve(*layout(dense, "--drain-timeout", "1", pp_size=2)) as service:
        streams = long_streams(service, 4)
        service.terminate()
        for stream in streams:
            stream.wait_end(GONE_S)
            assert stream.error["code"] == 503 and stream.terminators == 1
        assert service.wait_exit() == 0
        assert not service.run_folders()


def test_a_second_signal_ends_at_once(dense):
    with serve(*layout(dense, pp_size=2), probe=False) as service:
        streams = long_streams(service, 4)
        service.process.send_signal(signal.SIGINT)
        until(lambda: "draining" in service.stderr, "the service drains")
        service.process.send_signal(signal.SIGINT)
        assert service.wait_exit(GONE_S) == 128 + signal.SIGTERM
        assert all(stream.wait_end().failed for stream in streams)
        assert not service.run_folders()


@pytest.mark.parametrize("met", [False, True])
def test_sigterm_during_the_start(dense, met):
    with serve(*layout(dense, pp_size=2), faults=SLOW_START, wait=False) as service:
        if met:
            wait_for_weights(service)
        else:
            until(lambda: len(service.living()) == 3, "all processes have been started")
        service.terminate()
        assert service.wait_exit(GONE_S) in (0, -signal.SIGTERM)
        assert not service.run_folders()


def test_a_killed_front_end_leaves_port_and_folder_to_the_next_service(dense):
    # sglang#34755, vllm#55510: a restart fails for what the dead service left, or joins it.
    port = str(free_port())
    with serve(*layout(dense, "--port", port, pp_size=2)) as service:
        streams = long_streams(service, 2)
        service.process.kill()
        assert all(stream.wait_end(GONE_S).failed for stream in streams)
        assert service.wait_exit(GONE_S) == -signal.SIGKILL
        (dead,) = service.run_folders()
        with serve(*layout(dense, "--port", port, pp_size=2), TMPDIR=str(service.folder)) as second:
            assert not dead.exists() and len(service.run_folders()) == 1
            assert second.url == service.url


def test_two_services_at_the_same_moment_with_a_stale_environment(dense, tmp_path):
    # sglang#34755, sglang#37215, vllm#15987: rendezvous ports that somebody else takes; variables of a past launcher.
    other = Reference(make_tiny(tmp_path / "other", seed=1))
    prompt = dense.clear_prompts([20], 8, seed=1)[0]
    stale = {"RANK": "1", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "7"}
    stale |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "GROUP_RANK": "3"}
    with (
        serve(*layout(dense, pp_size=3), wait=False, **stale) as first,
        serve(*layout(other, pp_size=3), wait=False, **stale) as second,
    ):
        for service, reference in ((first, dense), (second, other)):
            service.wait_ready()
            assert service.gen(prompt, 8) == reference.answers([prompt], 8)[0].ids
        second.signal("rank 1", signal.SIGKILL)
        assert second.wait_exit(GONE_S) == 71
        first.check_idle()
        assert first.gen(prompt, 8) == dense.ids([prompt], 8)[0]


def test_a_rank_with_too_little_memory_is_named(dense):
    faults = {"memory": {"rank": 1, "bytes": 1000}}
    code, lines = run_to_end(*layout(dense, pp_size=2), LOCKSTEP_FAULTS=json.dumps(faults))
    assert code == 3
    # 3 layers of 256 bytes a token, 16 tokens a page.
    assert "rank 1" in lines[-1] and "1000 bytes" in lines[-1] and "768 bytes" in lines[-1]


def test_the_poorest_rank_decides_for_all(dense):
    # sglang#29258: each stage turned bytes into its own number of tokens. 768 bytes a token: 2,000 tokens, 125 pages.
    faults = {"memory": {"rank": 1, "bytes": 2000 * 768 + 767}}
    with serve(*layout(dense, pp_size=2), faults=faults) as service:
        assert [stage["device"]["capacity"] for stage in service.info()["stages"]] == [2000, 2000]


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(dense, tmp_path, pp_size):
    # sglang#21070, PiPPy#723: weights that a stage does not find, or that are left as they were allocated.
    name = "model.layers.3.mlp.down_proj.weight"
    folder = shutil.copytree(dense.folder, tmp_path / "lacking")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    code, lines = run_to_end("--model-path", str(folder), *FP32, "--pp-size", str(pp_size))
    assert code == 3
    assert name in lines[-1] and f"[PP{pp_size - 1} TP0]" in lines[-1]
