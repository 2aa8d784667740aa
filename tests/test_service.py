"""One service over two stages, asked everything: calls, nonsense, strangers on its sockets, clients that leave."""

import json
import pickle
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.service import FP32, PATIENCE_S, Stream, native_body, serve, until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def service(dense):
    """Two stages, small chunks, eight at once."""
    flags = ("--pp-size", "2", "--chunked-prefill-size", "64", "--max-running-requests", "8")
    with serve("--model-path", str(dense.folder), *FP32, *flags, "--max-total-tokens", "16384") as service:
        yield service


def memory(service):
    return sum(psutil.Process(pid).memory_info().rss for pid in service.living().values())


# ---- the stages agree ----


def test_server_info_shows_stages_that_agree(service):
    service.check_idle()
    info = service.info()
    assert info["pp_size"] == 2 and info["page_size"] == 16 and info["dtype"] == "float32"
    assert [stage["layers"] for stage in info["stages"]] == [[0, 2], [2, 5]]
    assert [stage["bytes_per_token"] for stage in info["stages"]] == [512, 768]
    living = service.living()
    assert [stage["pid"] for stage in info["stages"]] == [living["rank 0"], living["rank 1"]]
    assert re.fullmatch("[0-9a-f]{16}", info["stages"][0]["digest"])


def test_an_idle_service_makes_no_steps(service):
    service.check_idle()
    before = service.stats()["step"]
    time.sleep(1.0)
    assert service.stats()["step"] == before + 1, "the status control itself, and nothing else"


def test_sampling_with_a_seed_repeats_whatever_runs_beside_it(service):
    # The random number of a token depends on seed and position alone.
    sampling = {"temperature": 1.0, "top_k": 50, "seed": 11}
    alone = service.generate([9, 8, 7], 40, sampling_params=sampling)["output_ids"]
    others = [service.stream([number], 200, sampling_params={"temperature": 1.0}) for number in range(5)]
    assert service.generate([9, 8, 7], 40, sampling_params=sampling)["output_ids"] == alone
    assert service.generate([9, 8, 7], 40, sampling_params=sampling | {"seed": 12})["output_ids"] != alone
    for other in others:
        assert len(other.wait_end().output_ids) == 200


# ---- strangers ----


class Marker:
    """Its pickle makes a file when somebody reads it."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def test_no_socket_is_open_to_other_machines_and_none_reads_a_pickle(service, tmp_path):
    # sglang#21435, sglang#20904, sglang#24618; vllm CVE-2025-32444: pickle read from an unauthenticated socket.
    port = int(service.url.rpartition(":")[2])
    listening = []
    for pid in service.living().values():
        for connection in psutil.Process(pid).net_connections("all"):
            if connection.status == psutil.CONN_LISTEN:
                listening.append(connection.laddr)
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    assert port in [address.port for address in listening]
    marker = tmp_path / "executed"
    noise = random.Random(1).randbytes(64 * 1024)
    for address in listening:
        for data in (pickle.dumps(Marker(marker)), noise):
            with socket.create_connection(address[:2], timeout=5) as stranger:
                stranger.settimeout(5)
                with_answer = address.port == port
                try:
                    stranger.sendall(data)
                    if with_answer:
                        stranger.recv(1024)
                except OSError:
                    pass  # turned away
    service.check_alive()
    service.check_idle()
    assert not marker.exists()


def test_the_source_never_unpickles():
    # sglang#21435
    words = re.compile(
        r"pickle\.load|recv_pyobj|torch\.load\((?!.*weights_only=True)|\beval\(\w|allow_pickle=True"
    )
    for file in [*Path("engine").rglob("*.py"), Path("server.py")]:
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            found = words.search(line)
            assert not found, f"{file}:{number}: {line}"


# ---- nonsense ----

IDS = {"input_ids": [1, 2, 3]}
HI = [{"role": "user", "content": "hi"}]


def sampled(**fields):
    return IDS | {"sampling_params": fields}


REFUSED = [
    ("/generate", IDS | {"return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
    ("/generate", IDS | {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ("/v1/completions", {"prompt": "a", "logprobs": 10**6}, "logprobs"),
    *[("/generate", sampled(n=n), "n") for n in (0, -1, 5_000_000)],
    *[
        ("/generate", {"input_ids": i}, "input_ids")
        for i in ([640], [-1], [2**40], ["a"], [1.5], [], [[]], [[1], 2])
    ],
    *[("/generate", {"text": text}, "text") for text in ("", 5, None, {"a": 1}, [], [""])],
    *[("/v1/completions", {"prompt": prompt}, "prompt") for prompt in ("", [""], [], [[]], [[640]], None)],
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": HI, "n": 0}, "n"),
    ("/generate", IDS | {"text": "a"}, "text"),
    ("/generate", {}, "text"),
    ("/generate", sampled(stop_token_ids=[9999999], min_new_tokens=5), "stop_token_ids"),
    *[("/generate", sampled(max_new_tokens=n), "max_new_tokens") for n in (-1, 0, "ten", 10**9, 2**70)],
    *[("/generate", sampled(temperature=t), "temperature") for t in (-1, "hot", 1e308)],
    *[("/generate", sampled(top_p=p), "top_p") for p in (0, 2)],
    *[("/generate", sampled(top_k=k), "top_k") for k in (0, -5)],
    *[("/generate", sampled(stop=stop), "stop") for stop in ([""], ["x"] * 10000, [5])],
    ("/generate", sampled(max_tokens=5), "max_tokens"),
    ("/generate", sampled(logit_bias={"640": 1.0}), "logit_bias"),
    ("/generate", sampled(min_new_tokens=9, max_new_tokens=8), "min_new_tokens"),
    ("/generate", IDS | {"rid": ""}, "rid"),
    ("/generate", IDS | {"logprob_start_len": 3, "return_logprob": True}, "logprob_start_len"),
    ("/generate", {"input_ids": [[1, 2], [640]]}, "input_ids"),
    ("/generate", {"input_ids": [[1, 2], []]}, "input_ids"),
    ("/generate", {"input_ids": [1] * 4097}, "4097"),
    ("/abort_request", {}, "rid"),
]


@pytest.mark.parametrize(
    ("path", "body", "named"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_one_bad_request_is_refused_and_harms_nobody(service, path, body, named):
    # sglang#36856, sglang#40076, sglang#31597, vllm#7746, llama.cpp#6396: one call ends the scheduler.
    response = service.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] in (400, "context_length_exceeded")
    assert named in error["message"] and "Traceback" not in response.text
    service.check_alive()


RAW = [
    ("/generate", b"hello", 400),
    ("/generate", b'{"input_ids": [1, 2', 400),
    ("/generate", b"[" * 100_000, 400),
    ("/generate", b'{"input_ids":' + b"[" * 100_000 + b"}", 400),
    ("/generate", b" " * 50_000_000, 413),
    ("/generate", '{"text": "你好"}'.encode("gbk"), 400),
    ("/generate", rb'{"text": "\ud800"}', 400),
    ("/v1/completions", rb'{"prompt": "\ud800"}', 400),
    ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}', 400),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', 400),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "gpt-99"}', 404),
    ("/nowhere", b"{}", 404),
    ("/generate", b"", 400),
    ("/generate", b"null", 400),
]


@pytest.mark.parametrize(("path", "data", "status"), RAW, ids=[f"{r[0]}-{i}" for i, r in enumerate(RAW)])
def test_bytes_that_are_no_request_are_refused_and_harm_nobody(service, path, data, status):
    # vllm#7632, llama.cpp#6396, sglang#4481: bodies that are not JSON, not UTF-8, too deep, too long.
    response = service.client.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"] and "Traceback" not in response.text
    service.check_alive()


def test_what_looks_odd_but_is_allowed(service):
    assert service.client.get("/generate").status_code == 405
    greedy = service.gen([1, 2, 3], 4)
    for fields in ({"temperature": 1e-30}, {"top_k": 10**12}, {"top_k": -1}, {"stop": None}):
        assert service.generate([1, 2, 3], 4, sampling_params=fields)["output_ids"] == greedy
    assert service.generate([1, 2, 3], 4, no_such_key={"a": 1})["output_ids"] == greedy


def test_nonsense_leaves_no_memory_behind(service):
    before = memory(service)
    for _ in range(10):
        service.client.post("/generate", content=b" " * 15_000_000)
        service.client.post("/generate", content=b"[" * 10_000_000)
        service.post("/generate", {"input_ids": [1] * 1_000_000})
        service.post("/generate", sampled(n=5_000_000))
    assert memory(service) - before < 100e6


# ---- clients that leave ----


def test_a_client_that_leaves_ends_its_request(service):
    # mini-sglang#15, sglang#36333, sglang#36876: Ctrl-C on curl, and the generation goes on to its limit.
    said = len(service.stderr)
    for _ in range(3):
        streaming = [service.stream([number, 1], 3000, rid=f"s{number}") for number in range(4)]
        whole = [Stream(service.url, native_body([number, 2], 3000, rid=f"w{number}")) for number in range(4)]
        until(lambda: service.stats()["running"] == 8, "eight run")
        queued = [service.stream([number, 3], 3000, rid=f"q{number}") for number in range(4)]
        until(lambda: service.stats()["waiting"] == 4, "four wait")
        for stream in streaming:
            stream.wait_tokens(10)
        for client in (*streaming, *whole, *queued):
            client.close()
        service.check_idle()
        for rid in ("s0", "w1", "q2", "never"):
            assert service.post("/abort_request", {"rid": rid}).status_code == 200
    step = service.stats()["step"]
    time.sleep(0.5)
    assert service.stats()["step"] == step + 1
    assert len(service.stderr) - said < 1000, "no flood of lines about requests that are gone"


def test_n_sequences_of_one_prompt_are_one_call(service, dense):
    # vllm#14326: with n > 1 the abort of the call reached none of its sequences.
    body = {"prompt": [7] * 40, "n": 4, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    stream = Stream(service.url, body, "/v1/completions")
    until(lambda: len(stream.events) > 3, "three events")
    stream.close()
    service.check_idle()

    prompt = dense.clear_prompts([40], 16, seed=2)[0]
    body = {"prompt": prompt, "n": 4, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    answer = service.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert answer["usage"]["prompt_tokens"] == 40 and answer["usage"]["completion_tokens"] == 64

    sampling = {"n": 4, "temperature": 1, "seed": 7}
    first, second = (service.generate_n(prompt, 16, sampling_params=sampling) for _ in range(2))
    assert [one["output_ids"] for one in first] == [one["output_ids"] for one in second]
    assert len({tuple(one["output_ids"]) for one in first}) > 1
    fresh = service.generate_n([3] * 41, 16, sampling_params={"n": 4})
    assert sorted(one["meta_info"]["cached_tokens"] for one in fresh)[1:] == [32, 32, 32]
    stops = service.generate_n(prompt, 64, sampling_params=sampling | {"stop": ["a", "b", "c"]})
    assert all(one["meta_info"]["finish_reason"]["type"] in ("stop", "length") for one in stops)
    service.check_idle()


def test_a_client_that_does_not_read_harms_nobody(service):
    address = service.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(native_body([1, 2], 1500, stream=True)).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        lazy.sendall(head.encode() + body)
        until(lambda: service.stats()["running"] == 1, "the lazy client's request runs")
        before = memory(service)
        assert [len(service.gen([number, 5], 50)) for number in range(8)] == [50] * 8
        service.check_idle(PATIENCE_S)
        assert memory(service) - before < 100e6
    service.check_alive()


def test_all_calls_can_be_aborted_at_once(service):
    streams = [service.stream([number, 4], 3000) for number in range(6)]
    for stream in streams:
        stream.wait_tokens(1)
    assert service.post("/abort_request", {"abort_all": True}).status_code == 200
    assert all(stream.wait_end().error["code"] == 499 for stream in streams)
    service.check_idle()


# ---- how streams end ----


def test_how_streams_end(service, dense):
    # vllm#57082, sglang#19357, mistral.rs#1874: a stream that failed looks finished, or never ends.
    prompt = dense.clear_prompts([24], 16, seed=3)[0]
    ids = dense.ids([prompt], 16)[0]
    cut = ids.index(ids[8]) + 1
    by_length = service.stream(prompt, 16).wait_end()
    by_stop = service.stream(prompt, 16, sampling_params={"stop_token_ids": [ids[8]]}).wait_end()
    assert (by_length.finish, by_length.terminators, by_length.output_ids) == ("length", 1, ids)
    assert (by_stop.finish, by_stop.terminators, by_stop.output_ids) == ("stop", 1, ids[:cut])
    aborted = service.stream(prompt, 3000, rid="mine").wait_tokens(3)
    assert service.post("/generate", native_body([1], 1, rid="mine")).status_code == 400, "a live rid"
    service.post("/abort_request", {"rid": "mine"})
    asked_at = time.monotonic()
    aborted.wait_end()
    assert aborted.ended_at - asked_at < 5.0
    assert aborted.error["code"] == 499 and aborted.finish is None and aborted.terminators == 1
    refused = service.stream(prompt, 16, sampling_params={"n": 0}).wait_end()
    assert refused.status == 400 and not refused.events
    service.check_idle()


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64])
def test_each_position_comes_once(service, dense, n):
    # TRT-LLM#12623, sglang#18159: log probabilities twice, limits that are passed.
    prompts = dense.clear_prompts([17] * 4, 64, seed=4)
    wanted = [dense.answers([prompt], 64)[0] for prompt in prompts]
    body = {"return_logprob": True, "top_logprobs_num": 2}
    streams = [service.stream(prompt, n, **body) for prompt in prompts * 2]
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(lambda prompt: service.generate(prompt, n, **body), prompts * 2))
    for answer, expected in zip(
        [*whole, *(s.wait_end().events[-1] for s in streams)], wanted * 4, strict=True
    ):
        meta = answer["meta_info"]
        assert answer["output_ids"] == expected.ids[:n]
        assert meta["completion_tokens"] == n and meta["finish_reason"]["type"] == "length"
        assert [entry[1] for entry in meta["output_token_logprobs"]] == expected.ids[:n]
        assert [[top[1] for top in tops] for tops in meta["output_top_logprobs"]] == expected.tops[:n]
        for entry, logprob in zip(meta["output_token_logprobs"], expected.logprobs, strict=False):
            assert entry[0] == pytest.approx(logprob, abs=4e-3)


@pytest.mark.parametrize("start", [0, 1, 70, 199])
def test_log_probabilities_of_a_prompt_are_right_cached_or_not(service, dense, start):
    # The cache is read only up to the first position that is asked for; chunks of 64 each bring their share once.
    prompt = dense.clear_prompts([200], 4, seed=start)[0]
    expected = dense.prompt_logprobs(prompt)
    service.gen(prompt[: 160 if start == 70 else 200], 4)
    stream = service.stream(prompt, 4, return_logprob=True, logprob_start_len=start).wait_end()
    meta = stream.events[-1]["meta_info"]
    entries = meta["input_token_logprobs"]
    if start == 0:
        assert entries[0][0] is None
    assert [entry[1] for entry in entries] == prompt[start:]
    for entry, logprob in zip(entries[start == 0 :], expected[max(start, 1) - 1 :], strict=True):
        assert entry[0] == pytest.approx(logprob, abs=4e-3)
    assert meta["cached_tokens"] == max(start - 1, 0) // 16 * 16
    assert stream.output_ids == dense.ids([prompt], 4)[0]


def test_many_threads_share_one_tokenizer(service):
    # vllm#40949, transformers#47085, tokenizers#537: "Already borrowed".
    texts = [f"The {number}th question, with some words to read. " * (1 + number % 7) for number in range(20)]
    texts.append("word " * 400)
    sampling = {"max_new_tokens": 2, "temperature": 0, "stop": ["zq"]}

    def ask(number):
        text = texts[number % len(texts)]
        if number % 3:
            response = service.post("/generate", {"text": text, "sampling_params": sampling})
            return number, response.status_code, response.json().get("meta_info", {}).get("prompt_tokens")
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        response = service.post("/v1/chat/completions", body)
        return number, response.status_code, response.json().get("usage", {}).get("prompt_tokens")

    alone = [ask(number) for number in range(3 * len(texts))]
    assert {status for _, status, _ in alone} == {200}
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, list(range(3 * len(texts))) * 4))
    assert together == alone * 4
    service.check_idle()
