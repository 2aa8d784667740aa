"""The front end as a process: health, clients that leave, aborts, drain, a leader that dies. Over real sockets."""

import asyncio
import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.config import ConfigError, EngineConfig
from engine.distributed.frames import Kind, encode
from engine.frontend.link import EngineLink
from engine.frontend.serve import open_listener, run
from engine.frontend.tokenizer import Tokenizer
from engine.types import Fatal, Request, SamplingParams
from tests.stub_leader import PATIENCE, StubLeader, front_end, stub_source, until

LONG = {"text": "hi", "sampling_params": {"max_new_tokens": 2000}}


def slow_leader(seconds=0.01):
    leader = StubLeader("hello ")
    leader.step_seconds = seconds
    return leader


def raw_request(front, body):
    """Send a request over a bare socket and leave the connection open."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE)
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


# ---- health (sglang#35884, sglang#22511) ----


def test_health_makes_no_request_and_answers_under_load():
    leader = slow_leader(0.05)
    leader.running_max = 1
    with front_end(leader) as front, httpx.Client(base_url=front.url, timeout=20) as client:
        jobs = [raw_request(front, LONG) for _ in range(3)]
        until(lambda: leader.live == 3)
        for _ in range(50):
            assert client.get("/health").status_code == 200
        assert len(leader.requests) == 3
        for job in jobs:
            job.close()


def test_health_tells_why_it_is_bad(monkeypatch):
    leader = StubLeader()
    with front_end(leader) as front:
        leader.stuck = True
        until(lambda: httpx.get(f"{front.url}/health").status_code == 503)
        assert "no step has finished" in httpx.get(f"{front.url}/health").json()["reason"]
        leader.stuck = False
        until(lambda: httpx.get(f"{front.url}/health").status_code == 200)
        leader.pulsing = False
        monkeypatch.setattr("engine.frontend.limits.PULSE_SECONDS_MAX", 0.2)
        until(lambda: httpx.get(f"{front.url}/health").status_code == 503)
        assert "silent" in httpx.get(f"{front.url}/health").json()["reason"]


def test_no_request_is_taken_for_a_leader_that_is_silent_or_does_not_read(monkeypatch):
    leader = StubLeader()
    with front_end(leader) as front:
        monkeypatch.setattr("engine.frontend.limits.UNSENT_BYTES_MAX", -1)
        refused = httpx.post(f"{front.url}/generate", json=LONG)
        assert refused.status_code == 503 and "has yet to read 0 bytes" in refused.text
        monkeypatch.undo()
        leader.pulsing = False
        monkeypatch.setattr("engine.frontend.limits.PULSE_SECONDS_MAX", 0.2)
        until(lambda: httpx.get(f"{front.url}/health").status_code == 503)
        refused = httpx.post(f"{front.url}/generate", json=LONG)
        assert refused.status_code == 503 and "silent" in refused.text and leader.requests == []


@pytest.mark.parametrize(
    ("limit", "status"), [("BODY_SECONDS_MAX", 408), ("BODIES_BYTES_MAX", 503), ("BODY_BYTES_MAX", 413)]
)
def test_bodies_are_bounded_in_time_and_over_all_calls(monkeypatch, limit, status):
    with front_end(StubLeader()) as front:
        with monkeypatch.context() as patch:
            patch.setattr(f"engine.frontend.limits.{limit}", 0.2 if status == 408 else 5)
            with socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE) as raw:
                head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                raw.sendall(head + b"a\r\n0123456789\r\n")
                assert raw.recv(100).startswith(b"HTTP/1.1 %d " % status)
        # What a refused body held is free again.
        body = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
        assert httpx.post(f"{front.url}/generate", json=body).status_code == 200


def test_while_the_model_loads_requests_are_503():
    leader = StubLeader()
    leader.say_ready = False
    with front_end(leader) as front:
        until(lambda: _answers(front))
        for path in ("/health", "/ready", "/server_info", "/v1/models"):
            response = httpx.get(f"{front.url}{path}")
            assert response.status_code == 503 and "loading" in response.text
        assert httpx.post(f"{front.url}/generate", json=LONG).status_code == 503
        leader.say_ready = True
        until(lambda: httpx.get(f"{front.url}/ready").status_code == 200)


def _answers(front):
    try:
        return httpx.get(f"{front.url}/health")
    except httpx.TransportError:
        return False


# ---- information and controls ----


def test_server_info_shows_every_stage_and_the_resolved_flags():
    with front_end(StubLeader()) as front:
        info = httpx.get(f"{front.url}/server_info").json()
        assert [stage["layers"] for stage in info["stages"]] == [[0, 2], [2, 4]]
        stage = info["stages"][1]
        assert (stage["pp_rank"], stage["tp_rank"], stage["pid"]) == (1, 0, 101)
        assert stage["host"] is stage["state"] is None
        assert stage["device"] == {"capacity": 4096, "available": 4000, "evictable": 96, "protected": 0}
        assert len(stage["digest"]) == 16 and stage["step"] == info["stages"][0]["step"]
        assert (info["max_total_tokens"], info["context_length"], info["random_seed"]) == (4096, 2048, 7)
        assert info["served_model_name"] == "stub" and info["version"] and "api_key" not in info


def test_a_leader_that_answers_no_control_is_a_503(monkeypatch):
    monkeypatch.setattr("engine.frontend.limits.CONTROL_SECONDS_MAX", 0.1)
    leader = StubLeader()
    leader.answer_controls = False
    with front_end(leader) as front:
        response = httpx.get(f"{front.url}/server_info")
        assert response.status_code == 503 and "did not answer" in response.text


def test_flush_is_refused_while_busy_and_can_wait():
    leader = slow_leader()
    leader.busy_flush = True
    with front_end(leader) as front, concurrent.futures.ThreadPoolExecutor() as pool:
        running = raw_request(front, LONG)
        until(lambda: leader.live == 1)
        refused = httpx.post(f"{front.url}/flush_cache")
        assert refused.status_code == 400 and "running" in refused.json()["error"]["message"]
        assert leader.controls == []  # each would be an entry of the log
        running.close()
        until(lambda: leader.live == 0)
        waiting = pool.submit(httpx.post, f"{front.url}/flush_cache?timeout=20", timeout=30)
        until(lambda: len(leader.controls) > 3)
        leader.busy_flush = False
        assert waiting.result().status_code == 200
        assert httpx.post(f"{front.url}/flush_cache?timeout=x").status_code == 400


def test_a_flush_waits_for_running_requests_without_a_word_to_the_leader():
    leader = slow_leader()
    with front_end(leader) as front:
        running = raw_request(front, LONG)
        until(lambda: leader.live == 1)
        assert httpx.post(f"{front.url}/flush_cache?timeout=0.6", timeout=20).status_code == 400
        assert leader.controls == []
        running.close()
        until(lambda: leader.live == 0)
        assert httpx.post(f"{front.url}/flush_cache").status_code == 200


@pytest.mark.parametrize("action", ["status", "flush"])
def test_controls_of_one_kind_share_the_one_under_way(action):
    async def scenario():
        leader = StubLeader().start()
        link = await EngineLink.open(leader.front)
        await link.ready
        results = await asyncio.gather(*(link.control(action, PATIENCE) for _ in range(20)))
        assert all(result.ok for result in results) and len(leader.controls) == 1
        await link.control(action, PATIENCE)
        assert len(leader.controls) == 2
        await link.close()
        leader.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_unknown_paths_and_methods_are_json():
    with front_end(StubLeader()) as front:
        missing = httpx.get(f"{front.url}/nothing")
        assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
        wrong = httpx.get(f"{front.url}/generate")
        assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and wrong.json()["error"]
        with socket.create_connection(("127.0.0.1", front.port)) as probe:
            probe.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert probe.recv(100).startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{front.url}/health").status_code == 200


# ---- clients that leave (mini-sglang#15, sglang#36333, sglang#36876, vllm#14326) ----


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_a_closed_connection_aborts_its_request(stream, n):
    leader = slow_leader()
    with front_end(leader) as front:
        body = LONG | {"stream": stream, "sampling_params": {"max_new_tokens": 2000, "n": n}}
        connection = raw_request(front, body)
        until(lambda: sum(leader.emitted.values()) >= 5 * n)
        if stream:
            assert connection.recv(100)
        connection.close()
        until(lambda: leader.live == 0)
        assert {abort.status for abort in leader.aborts} == {499} and len(leader.aborts) == n
        assert httpx.post(f"{front.url}/abort_request", json={"rid": "gone"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_closed_in_the_queue_aborts_too(stream):
    leader = slow_leader()
    leader.running_max = 0
    with front_end(leader) as front:
        connection = raw_request(front, LONG | {"stream": stream})
        until(lambda: leader.live == 1)
        connection.close()
        until(lambda: leader.live == 0)


def test_a_slow_client_holds_nobody_up():
    leader = slow_leader(0.001)
    with front_end(leader) as front:
        body = LONG | {
            "stream": True,
            "rid": "slow",
            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
        }
        lazy = raw_request(front, body)
        until(lambda: leader.emitted)
        for _ in range(5):
            answer = httpx.post(
                f"{front.url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 3}}
            )
            assert answer.json()["text"] == "hel"
        until(lambda: leader.live == 0)
        received = b""
        while b"[DONE]" not in received[-200:]:
            part = lazy.recv(1 << 16)
            assert part, "the stream ended without [DONE]"
            received += part
        lazy.close()
        last = json.loads(received.split(b"data: ")[-2].split(b"\n\n")[0])
        assert last["meta_info"]["completion_tokens"] == 2000


# ---- aborts by name ----


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["mine", "mine_1", None])
def test_an_abort_ends_the_call_with_an_error(stream, name):
    leader = slow_leader()
    with front_end(leader) as front, concurrent.futures.ThreadPoolExecutor() as pool:
        body = LONG | {"text": ["a", "b"], "rid": "mine", "stream": stream}
        call = pool.submit(httpx.post, f"{front.url}/generate", json=body, timeout=20)
        until(lambda: len(leader.emitted) == 2)
        abort = {"abort_all": True} if name is None else {"rid": name}
        assert httpx.post(f"{front.url}/abort_request", json=abort).status_code == 200
        response = call.result()
        assert response.status_code == (200 if stream else 499)
        assert '"request_aborted"' in response.text
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
            assert response.text.count("request_aborted") == response.text.count("[DONE]") == 1
        until(lambda: leader.live == 0)


def test_an_abort_of_all_aborts_each_sequence_once():
    leader = slow_leader()
    leader.running_max = 0
    with front_end(leader) as front:
        jobs = [raw_request(front, LONG | {"text": ["a"] * 4}) for _ in range(2)]
        until(lambda: leader.live == 8)
        assert httpx.post(f"{front.url}/abort_request", json={"abort_all": True}).status_code == 200
        until(lambda: leader.live == 0)
        # A call that fails may also abort those of its sequences that it still waits for.
        assert [abort.message for abort in leader.aborts].count("the request was aborted") == 8
        for job in jobs:
            job.close()


def test_an_abort_without_a_name_is_refused():
    with front_end(StubLeader()) as front:
        assert httpx.post(f"{front.url}/abort_request", json={}).status_code == 400


# ---- the end of the service ----


def test_when_the_leader_dies_every_client_gets_an_error_and_the_code_is_71():
    leader = slow_leader()
    leader.running_max = 4
    with front_end(leader) as front, concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [
            pool.submit(httpx.post, f"{front.url}/generate", json=LONG | {"stream": i % 2 == 0}, timeout=20)
            for i in range(8)
        ]
        until(lambda: leader.live == 8 and len(leader.emitted) == 4)
        leader.die()
        for call in calls:
            response = call.result()
            # A stream that had begun gets an event, all others a status.
            assert "lost rank 0" in response.text
            assert response.status_code == 503 or response.text.endswith("[DONE]\n\n")
        assert front.join() == 71


def test_the_leaders_last_word_gives_the_exit_code():
    leader = slow_leader()
    with front_end(leader) as front:
        leader.fatal(70, "DIVERGED step=5")
        assert front.join() == 70


def test_bytes_that_are_no_frames_end_the_link():
    leader = StubLeader()
    with front_end(leader) as front:
        leader._loop.call_soon_threadsafe(leader._writer.write, b"x" * 100)
        assert front.join() == 71
    leader = StubLeader()
    with front_end(leader) as front:
        leader._loop.call_soon_threadsafe(
            leader._writer.write, encode(Kind.MESSAGE, b"\x80\x04\x95not msgpack")
        )
        assert front.join() == 71


SERVER = """
import socket, sys
from engine.config import EngineConfig
from engine.frontend.serve import run
from engine.frontend.tokenizer import Tokenizer
from tests.stub_leader import stub_source
source = stub_source()
fatal = run(EngineConfig(drain_timeout=5.0), source, Tokenizer.of_source(source),
            socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
print(fatal.message, file=sys.stderr)
sys.exit(fatal.exit_code)
"""


class Process:
    """The front end as a process of its own, for signals."""

    def __init__(self, leader):
        leader.start()
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        fds = (leader.front.fileno(), listener.fileno())
        root = Path(__file__).parent.parent
        command = [sys.executable, "-c", SERVER, *map(str, fds)]
        self.process = subprocess.Popen(command, pass_fds=fds, cwd=root, stderr=subprocess.PIPE)
        leader.front.close()
        listener.close()
        until(lambda: _answers(self), "the server's port")

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors.decode()


def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    leader = slow_leader()
    front = Process(leader)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        body = LONG | {"stream": True, "sampling_params": {"max_new_tokens": 100}}
        until(lambda: httpx.get(f"{front.url}/ready").status_code == 200)
        call = pool.submit(httpx.post, f"{front.url}/generate", json=body, timeout=20)
        until(lambda: leader.emitted)
        front.signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{front.url}/ready").status_code == 503)
        assert httpx.get(f"{front.url}/health").status_code == 200
        refused = httpx.post(f"{front.url}/generate", json=LONG)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        response = call.result()
        assert '"completion_tokens":100' in response.text and response.text.endswith("[DONE]\n\n")
    assert front.end() == (0, "drained\n")
    assert [control.action for control in leader.controls] == ["drain"]
    leader.stop()


def test_the_second_signal_ends_at_once_with_an_error_event():
    leader = slow_leader()
    front = Process(leader)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        until(lambda: httpx.get(f"{front.url}/ready").status_code == 200)
        call = pool.submit(httpx.post, f"{front.url}/generate", json=LONG | {"stream": True}, timeout=20)
        until(lambda: leader.emitted)
        front.signal(signal.SIGTERM)
        until(lambda: leader.controls)
        front.signal(signal.SIGTERM)
        code, errors = front.end()
        assert (code, errors) == (143, "ended by a second signal\n")
        assert "second signal" in call.result().text
    leader.stop()


def test_a_signal_while_loading_ends_with_0():
    leader = StubLeader()
    leader.say_ready = False
    front = Process(leader)
    front.signal(signal.SIGINT)
    assert front.end() == (0, "stopped during the start\n")
    leader.stop()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there"):
            open_listener("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        open_listener("no.such.host.invalid", 1)


# ---- the link alone ----


def test_news_of_requests_that_have_ended_is_dropped_and_ids_are_never_reused():
    async def scenario():
        leader = StubLeader(b"abc").start()
        link = await EngineLink.open(leader.front)
        await link.ready
        first, second = (
            Request(
                request_id=link.take_id(), rid="r", prompt_ids=(1,), sampling=SamplingParams(max_new_tokens=n)
            )
            for n in (2000, 3)
        )
        inbox = link.submit((first, second))
        await inbox.take()
        link.finish(first.request_id, 1, "a")
        seen = []
        while link.live_count:
            seen += await inbox.take()
        assert seen[-1].request_id == second.request_id and seen[-1].finish.type == "length"
        assert link.take_id() > second.request_id > first.request_id
        await link.close()
        # After the end a submission fails at once.
        late = link.submit((first,))
        assert (await late.take())[0].finish.status == 503
        leader.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_path_is_an_address_too(tmp_path):
    async def scenario():
        accepted = asyncio.Event()
        server = await asyncio.start_unix_server(lambda reader, writer: accepted.set(), tmp_path / "leader")
        link = await EngineLink.open(str(tmp_path / "leader"))
        await accepted.wait()
        await link.close()
        server.close()
        with pytest.raises(OSError):
            await EngineLink.open(str(tmp_path / "nobody"))

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_watch_ends_the_service_with_its_reason():
    async def watch():
        await asyncio.sleep(0.05)
        return Fatal(exit_code=3, message="rank 1 was killed")

    leader = StubLeader().start()
    source = stub_source()
    fatal = run(
        EngineConfig(),
        source,
        Tokenizer.of_source(source),
        leader.front,
        open_listener("127.0.0.1", 0),
        watch=watch,
    )
    assert fatal == Fatal(exit_code=3, message="rank 1 was killed")
    leader.stop()
