"""`POST /generate` over a real socket: shapes, streams, stops, refusals, aborts. Tokens come from a script."""

import concurrent.futures
import itertools
import json
import socket

import httpx
import pytest

from engine.config import EngineConfig
from engine.frontend import limits
from engine.frontend.detokenizer import StopStrings
from tests.stub_leader import BOS, EOS, StubLeader, front_end, stub_source, until

GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def hello():
    with front_end(StubLeader("hello ")) as front:
        yield front


@pytest.fixture
def client(hello):
    with httpx.Client(base_url=hello.url, timeout=20) as client:
        yield client


def post(front, body, **named):
    return httpx.post(f"{front.url}/generate", json=body, timeout=20, **named)


def events(response):
    """The JSON events of a stream, which must end with exactly one [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and "[DONE]" not in lines[:-1]
    return [json.loads(line) for line in lines[:-1]]


# ---- shapes ----


def test_one_text_gets_one_object(client):
    answer = client.post("/generate", json={"text": "hi", "sampling_params": GREEDY, "rid": "mine"}).json()
    assert (answer["text"], bytes(answer["output_ids"])) == ("hello he", b"hello he")
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 8},
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "num_retractions": 0,
        "weight_version": "default",
    }


def test_cached_tokens_are_told_by_tier(client):
    """Of 70 tokens the stub finds 64 in the cache, 16 of them on the host."""
    answer = client.post("/generate", json={"text": "x" * 70, "sampling_params": GREEDY}).json()
    assert answer["meta_info"]["cached_tokens"] == 64
    assert answer["meta_info"]["cached_tokens_details"] == {"device": 48, "host": 16}


def test_a_batch_or_n_gets_a_list(client):
    ids = client.post(
        "/generate", json={"input_ids": [[1, 2], [3]], "rid": "b", "sampling_params": GREEDY}
    ).json()
    assert [answer["meta_info"]["id"] for answer in ids] == ["b_0", "b_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in ids] == [2, 1]
    assert len(client.post("/generate", json={"input_ids": [[1]], "sampling_params": GREEDY}).json()) == 1
    choices = client.post("/generate", json={"text": "a", "sampling_params": GREEDY | {"n": 3}}).json()
    assert [choice["text"] for choice in choices] == ["hello he"] * 3
    each = [GREEDY, {"max_new_tokens": 2}]
    texts = client.post(
        "/generate", json={"text": ["a", "b"], "sampling_params": each, "rid": ["x", "y"]}
    ).json()
    assert [(t["text"], t["meta_info"]["id"]) for t in texts] == [("hello he", "x"), ("he", "y")]


def test_a_stream_is_cumulative_and_equals_the_whole_answer(client):
    body = {"text": "hi", "sampling_params": GREEDY}
    streamed = client.post("/generate", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    parts = events(streamed)
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert after["meta_info"]["completion_tokens"] == len(after["output_ids"]) > len(before["output_ids"])
        assert before["meta_info"]["finish_reason"] is None
    whole = client.post("/generate", json=body).json()
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_a_streamed_batch_has_indices(client):
    parts = events(
        client.post(
            "/generate", json={"text": ["a", "b"], "stream": True, "sampling_params": GREEDY | {"n": 2}}
        )
    )
    ends = [part["index"] for part in parts if part["meta_info"]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_log_probabilities_cover_each_position_once(client):
    # TRT-LLM#12623: twice as many as tokens. The stub's value is minus position / 100.
    body = {
        "input_ids": [10, 11, 12],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 3, "temperature": 0},
    }
    meta = client.post("/generate", json=body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 10, "\n"], [-0.01, 11, "\x0b"], [-0.02, 12, "\x0c"]]
    assert meta["output_token_logprobs"] == [[-0.03, 104, "h"], [-0.04, 101, "e"], [-0.05, 108, "l"]]
    assert meta["output_top_logprobs"][0] == [[-0.03, 104, "h"], [-1.03, 105, "i"]]
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == 3
    streamed = events(client.post("/generate", json=body | {"stream": True}))[-1]["meta_info"]
    assert streamed["output_token_logprobs"] == meta["output_token_logprobs"]
    only_output = client.post("/generate", json=body | {"logprob_start_len": -1}).json()["meta_info"]
    assert "input_token_logprobs" not in only_output and only_output["output_token_logprobs_length"] == 3


def test_a_stream_shows_log_probabilities_of_the_prompt_when_complete_and_at_the_end(client):
    body = {
        "input_ids": [[10, 11, 12]] * 2,
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0},
    }
    for index in range(2):
        metas = [
            event["meta_info"]
            for event in events(client.post("/generate", json=body))
            if event["index"] == index
        ]
        assert len(metas) > 2
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert [name in meta for meta in metas] == [True, *[False] * (len(metas) - 2), True]
            assert metas[0][name] == metas[-1][name] and len(metas[0][name]) == 3


def test_log_probabilities_of_prompts_are_bounded_over_the_call(client, monkeypatch):
    # Two prompts of three tokens, the first of which has none, each with 1 + 2 values: 12.
    body = {
        "input_ids": [[10, 11, 12]] * 2,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    monkeypatch.setattr(limits, "CALL_PROMPT_LOGPROBS_MAX", 12)
    assert client.post("/generate", json=body).status_code == 200
    monkeypatch.setattr(limits, "CALL_PROMPT_LOGPROBS_MAX", 11)
    refused = client.post("/generate", json=body)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "asks for 12" in message and "allowed are 11" in message
    assert "logprob_start_len" in message and "top_logprobs_num" in message


# ---- stops and special tokens ----


def test_equal_stop_strings_of_a_call_have_one_matcher_and_different_ones_a_bound(client, monkeypatch):
    built = []
    monkeypatch.setattr(
        "engine.frontend.native.StopStrings", lambda strings: built.append(1) or StopStrings(strings)
    )
    body = {"text": ["a"] * 8, "sampling_params": GREEDY | {"stop": "zzzz"}}
    assert client.post("/generate", json=body).status_code == 200 and built == [1]
    monkeypatch.setattr(limits, "CALL_STOP_CHARACTERS_MAX", 7)
    assert client.post("/generate", json=body).status_code == 200
    different = [GREEDY | {"stop": stop} for stop in ("zzzz", "yyyy")]
    refused = client.post("/generate", json={"text": ["a", "b"], "sampling_params": different})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "sampling_params.stop"


def test_a_stop_string_ends_the_request_at_the_leader_too(hello, client):
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 500, "stop": ["lo h", "zz"]}}
    for stream in (False, True):
        response = client.post("/generate", json=body | {"stream": stream})
        answer = events(response)[-1] if stream else response.json()
        assert (answer["text"], bytes(answer["output_ids"])) == ("hel", b"hello h")
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lo h"}
        until(lambda: hello.leader.live == 0)
        finish = hello.leader.finishes[-1]
        assert (finish.kept_tokens, finish.matched) == (7, "lo h")
    kept = client.post(
        "/generate", json={"text": "a", "sampling_params": {"stop": "lo", "no_stop_trim": True}}
    ).json()
    assert kept["text"] == "hello"


def test_no_delta_shows_what_is_later_cut(client):
    body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 20, "stop": "o hx"}}
    texts = [part["text"] for part in events(client.post("/generate", json=body))]
    assert "hello " not in texts and "hello" not in texts and texts[-1] == "hello hello hello he"


def test_stop_ids_and_end_of_sequence():
    with front_end(StubLeader([104, 105, EOS, 106, BOS])) as front:
        answer = post(front, {"text": "a"}).json()
        assert (answer["text"], answer["output_ids"]) == ("hi", [104, 105, EOS])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        params = {"ignore_eos": True, "stop_token_ids": [106], "skip_special_tokens": False}
        answer = post(front, {"text": "a", "sampling_params": params}).json()
        assert (answer["text"], answer["meta_info"]["completion_tokens"]) == ("hi<|eos|>", 4)
        answer = post(front, {"text": "a", "sampling_params": params | {"no_stop_trim": True}}).json()
        assert answer["text"] == "hi<|eos|>j"
        answer = post(
            front, {"text": "a", "sampling_params": {"ignore_eos": True, "max_new_tokens": 5}}
        ).json()
        assert (answer["text"], answer["meta_info"]["finish_reason"]["type"]) == ("hij", "length")


@pytest.mark.parametrize("script", ["A 世a界b", "é🌶️👨‍👩‍👧ที่", "\ufffdx", b"\x80ok\xf0\x9f"])
def test_streamed_text_equals_unstreamed_text_for_any_script(script):
    data = script if isinstance(script, bytes) else script.encode()
    with front_end(StubLeader(list(data))) as front, httpx.Client(base_url=front.url, timeout=20) as client:
        for length in range(1, len(data) + 1):
            body = {"text": "a", "sampling_params": {"max_new_tokens": length}, "return_logprob": True}
            whole = client.post("/generate", json=body).json()
            streamed = events(client.post("/generate", json=body | {"stream": True}))
            assert whole["text"] == streamed[-1]["text"] == data[:length].decode("utf-8", "replace")
            for before, after in itertools.pairwise(streamed):
                assert after["text"].startswith(before["text"])


# ---- seeds and parameters on their way to the leader ----


def test_choices_of_one_call_go_in_one_message_with_different_seeds(hello, client):
    body = {"text": "hi", "extra_key": "tenant", "sampling_params": GREEDY | {"n": 3, "sampling_seed": 5}}
    client.post("/generate", json=body)
    submit = hello.leader.submits[-1]
    assert len(submit.requests) == 3
    assert [request.prompt_ids for request in submit.requests] == [tuple(b"hi")] * 3
    seeds = [request.sampling.seed for request in submit.requests]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert {request.cache_salt for request in submit.requests} == {"tenant"}
    client.post("/generate", json=body)
    assert [request.sampling.seed for request in hello.leader.submits[-1].requests] == seeds
    client.post("/generate", json={"text": "hi", "sampling_params": GREEDY})
    unseeded = hello.leader.submits[-1].requests[0]
    client.post("/generate", json={"text": "hi", "sampling_params": GREEDY})
    assert hello.leader.submits[-1].requests[0].sampling.seed != unseeded.sampling.seed


# ---- what is refused (sglang#36856, vllm#7746, vllm#1130, sglang#4481, llama.cpp#6396) ----

BAD = [
    {"text": ""},
    {"text": 5},
    {"text": None},
    {"text": {"a": 1}},
    {"text": []},
    {"text": [""]},
    {"text": ["good", ""]},
    {},
    {"text": "a", "input_ids": [1]},
    {"input_ids": [640]},
    {"input_ids": [-1]},
    {"input_ids": [2**40]},
    {"input_ids": ["a"]},
    {"input_ids": [1.5]},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [[1], 2]},
    {"input_ids": [[1], [["a"]]]},
    {"input_ids": [[1], [640]]},
    {"text": "a", "top_logprobs_num": 10**9},
    {"text": "a", "top_logprobs_num": -1},
    {"text": "a", "return_logprob": True, "logprob_start_len": 1},
    {"text": "a", "return_logprob": [True, True]},
    {"text": "a", "rid": ["x", "y"]},
    {"text": ["a", "b"], "rid": ["x", "x"]},
    {"text": "a", "rid": ""},
    {"text": "a", "lora_path": "x"},
    {"text": "a", "image_data": "x"},
    {"text": "a", "return_hidden_states": True},
    {"text": ["a"] * 2000},
    {"text": ["a", "b"], "sampling_params": [{}]},
    *(
        {"text": "a", "sampling_params": params}
        for params in (
            {"n": 0},
            {"n": -1},
            {"n": 5000000},
            {"max_new_tokens": -1},
            {"max_new_tokens": 0},
            {"max_new_tokens": "ten"},
            {"max_new_tokens": 10**9},
            {"temperature": -1},
            {"top_p": 0},
            {"top_p": 2},
            {"top_k": 0},
            {"top_k": -5},
            {"stop": [""]},
            {"stop": ["x"] * 10000},
            {"stop_token_ids": [9999999], "min_new_tokens": 5},
            {"max_tokens": 5},
            {"regex": "a"},
            "x",
        )
    ),
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: json.dumps(body)[:60])
def test_a_bad_request_is_a_400_and_harms_nobody(hello, client, body):
    before = len(hello.leader.submits)
    for stream in (False, True):
        response = client.post("/generate", json=body | {"stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == 400 or error["code"] == "context_length_exceeded"
        assert error["message"] and "Traceback" not in response.text and len(error["message"]) < 700
    assert len(hello.leader.submits) == before
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[" * 100000, 400),
        ("{'text': '你好'}".encode("gbk"), 400),
        (b'{"text": "\\ud800"}', 400),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400),
        (b" " * 50_000_000, 413),
        (b'"' + b"a" * limits.BODY_BYTES_MAX + b'"', 413),
    ],
)
def test_a_bad_body_is_refused_by_its_form_or_size(client, content, status):
    response = client.post("/generate", content=content)
    assert response.status_code == status and response.json()["error"]["message"]
    if status == 413:

        def chunks():
            for start in range(0, len(content), 1 << 20):
                yield content[start : start + (1 << 20)]

        assert client.post("/generate", content=chunks()).status_code == 413


def test_endless_headers_are_cut_off(hello):
    with socket.create_connection(("127.0.0.1", hello.port), timeout=20) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        answer = b""
        try:
            for _ in range(64):
                raw.sendall(b"a" * 65536)
            answer = raw.recv(100)
        except OSError:
            pass  # closed while we wrote
    assert b" 400 " in answer or answer == b""


def test_a_name_that_is_in_use_is_refused():
    leader = StubLeader("hello ")
    leader.running_max = 0
    with front_end(leader) as front, concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(post, front, {"text": "a", "rid": "one"})
        until(lambda: leader.live == 1)
        refused = post(front, {"text": "a", "rid": "one"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "rid"
        leader.running_max = 8
        assert first.result().status_code == 200
        assert post(front, {"text": "a", "rid": "one"}).status_code == 200


def test_a_model_without_a_tokenizer_takes_ids():
    source = stub_source()
    bare = type(source)(
        **{name: getattr(source, name) for name in source.__slots__}
        | {"gguf_metadata": None, "chat_template": None}
    )
    with front_end(StubLeader("hi"), source=bare) as front:
        answer = post(front, {"input_ids": [1, 2], "sampling_params": GREEDY}).json()
        assert (answer["text"], len(answer["output_ids"])) == ("", 8)
        assert "given as ids" in post(front, {"text": "a"}).json()["error"]["message"]


# ---- load ----


def test_the_leaders_refusal_is_a_status_and_not_an_event():
    # sglang#33858: over the queue limit, some requests never got an answer.
    leader = StubLeader("hello ")
    leader.refuse = (429, "the queue is full")
    with front_end(leader) as front:
        for stream in (False, True):
            response = post(front, {"text": ["a"] * 10, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert response.json()["error"] | {} == {
                "message": "the queue is full",
                "type": "rate_limit_error",
                "param": None,
                "code": 429,
                "retryable": True,
            }


def test_over_the_limits_every_request_is_answered():
    leader = StubLeader("hello ")
    leader.ready = type(leader.ready)(
        capacity_tokens=4096,
        max_running_requests=2,
        page_size=16,
        context_length=2048,
        dtype="float32",
        device="cpu",
        stages=(),
    )
    leader.running_max, leader.step_seconds = 2, 0.01
    config = EngineConfig(max_queued_requests=3)
    with front_end(leader, config=config) as front, concurrent.futures.ThreadPoolExecutor(50) as pool:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 20}}
        jobs = [pool.submit(post, front, body | {"stream": i % 2 == 0}) for i in range(50)]
        statuses = [job.result().status_code for job in jobs]
        assert statuses.count(200) >= 5 and statuses.count(200) + statuses.count(429) == 50
        too_many = post(front, {"text": ["a"] * 6})
        assert too_many.status_code == 400 and "only 5 may run or wait" in too_many.json()["error"]["message"]
        assert post(front, body).status_code == 200


def test_many_clients_mix_text_chat_and_stops(hello):
    # vllm#40949: 3988 of 4000 calls failed when threads shared a tokenizer.
    limits_ = httpx.Limits(max_connections=16)
    with httpx.Client(base_url=hello.url, timeout=60, limits=limits_) as client:
        big = "word " * 400

        def call(i):
            params = {"max_new_tokens": 3, "stop": "zz"}
            if i % 3 == 0:
                response = client.post(
                    "/generate", json={"text": big[: i * 5 + 5], "sampling_params": params}
                )
                assert response.json()["meta_info"]["prompt_tokens"] == i * 5 + 5
            elif i % 3 == 1:
                chat = {"messages": [{"role": "user", "content": "x" * i}], "max_tokens": 3}
                response = client.post("/v1/chat/completions", json=chat)
                assert response.json()["usage"]["prompt_tokens"] == i + 20
            else:
                response = client.post(
                    "/generate", json={"text": "q", "stream": True, "sampling_params": params}
                )
                assert events(response)[-1]["text"] == "hel"
            return response.status_code

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            # The queue holds more than 16, so nobody is refused.
            assert set(pool.map(call, range(240))) == {200}
