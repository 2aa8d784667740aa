"""The OpenAI routes, used by the real openai client over a real socket. Tokens come from a script."""

import threading

import httpx
import openai
import pytest

from engine.config import EngineConfig
from engine.frontend.tokenizer import Tokenizer
from tests.stub_leader import BOS, EOS, StubLeader, front_end, stub_source, until

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def hello():
    with front_end(StubLeader("hello ")) as front:
        yield front


@pytest.fixture
def client(hello):
    with openai.OpenAI(base_url=f"{hello.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def test_the_served_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["stub"]
    assert client.models.retrieve("stub").id == "stub"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ---- chat ----


def test_a_chat_answers_with_usage(client):
    answer = client.chat.completions.create(model="stub", messages=HI, max_tokens=5)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "hello",
        "length",
    )
    prompt = len(b"\0user: Hi\n\0assistant: ")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 5)
    assert answer.usage.total_tokens == prompt + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_cached_tokens_by_tier_come_when_asked_for(client):
    """Two prompts of 70 and 10 tokens: the stub finds 64 and 0 of them, 16 on the host; choices count once."""
    ask = {"model": "stub", "prompt": ["x" * 70, "y" * 10], "n": 2, "max_tokens": 2}
    answer = client.completions.create(**ask, extra_body={"return_cached_tokens_details": True})
    assert answer.model_extra["sglext"] == {"cached_tokens_details": {"device": 48, "host": 16}}
    assert "sglext" not in (client.completions.create(**ask).model_extra or {})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(**ask, **options, extra_body={"return_cached_tokens_details": True})
    assert last.model_extra["sglext"] == {"cached_tokens_details": {"device": 48, "host": 16}}


def test_a_streamed_chat_is_the_role_the_text_one_end_and_the_usage(client):
    stream = client.chat.completions.create(
        model="stub",
        messages=HI,
        max_completion_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *body, usage = chunks
    assert (body[0].choices[0].delta.role, body[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "hello h"
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == ["length"]
    assert body[-1].choices[0].finish_reason == "length" and all(chunk.usage is None for chunk in body)
    assert usage.choices == [] and usage.usage.completion_tokens == 7
    plain = list(client.chat.completions.create(model="stub", messages=HI, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_continuous_usage_counts_up(hello):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": options, "ignore_eos": True}
    text = httpx.post(f"{hello.url}/v1/chat/completions", json=body, timeout=20).text
    events = [line for line in text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and all('"completion_tokens":' in event for event in events[:-1])


def test_content_parts_are_joined_and_others_refused(hello, client):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    client.chat.completions.create(model="stub", messages=[{"role": "user", "content": parts}], max_tokens=1)
    joined = hello.leader.requests[-1].prompt_ids
    client.chat.completions.create(model="stub", messages=HI, max_tokens=1)
    assert hello.leader.requests[-1].prompt_ids == joined
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\]"):
        client.chat.completions.create(model="stub", messages=[{"role": "user", "content": image}])


def test_a_chat_without_a_limit_may_fill_its_context(hello, client):
    stream = client.chat.completions.create(model="stub", messages=HI, stream=True)
    next(iter(stream))
    request = hello.leader.requests[-1]
    assert request.sampling.max_new_tokens == 2048 - len(request.prompt_ids)
    stream.close()
    until(lambda: hello.leader.live == 0)


def test_choices_have_their_own_ends_and_one_prompt_count():
    # vllm#14326: n > 1. The script of each choice depends on its seed.
    with (
        front_end(StubLeader(lambda request: b"stop!" if request.sampling.seed == 3 else b"go on ")) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="stub", messages=HI, n=4, max_tokens=12, seed=3, stop=["op"], temperature=1
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "length", "length"]
        assert [choice.message.content for choice in answer.choices] == ["st", *["go on go on "] * 3]
        assert answer.usage.prompt_tokens == len(front.leader.requests[0].prompt_ids)
        assert answer.usage.completion_tokens == 4 + 36


def test_chat_log_probabilities(client):
    answer = client.chat.completions.create(
        model="stub", messages=HI, max_tokens=2, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [("h", [104]), ("e", [101])]
    prompt = answer.usage.prompt_tokens
    assert entries[0].logprob == pytest.approx(-prompt / 100)
    assert [top.token for top in entries[0].top_logprobs] == ["h", "i"]
    chunks = list(
        client.chat.completions.create(model="stub", messages=HI, max_tokens=2, logprobs=True, stream=True)
    )
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == ["h", "e"]


def test_a_chat_and_its_rendered_text_have_the_same_ids():
    # vllm#27486, vllm#55288: the template prints BOS and the tokenizer adds another; the routes' prefixes part.
    source = stub_source(add_bos=True)
    tokenizer = Tokenizer.of_source(source)
    rendered = tokenizer.template.render(HI)
    with front_end(StubLeader([104, EOS]), source=source) as front:
        url, params = front.url, {"max_new_tokens": 1}
        httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, "max_tokens": 1})
        httpx.post(f"{url}/generate", json={"text": rendered, "sampling_params": params})
        ids = list(tokenizer.encode(rendered, add_special_tokens=False))
        httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": params})
        httpx.post(f"{url}/v1/completions", json={"prompt": "raw", "max_tokens": 1})
        chat, text, given, raw = (list(request.prompt_ids) for request in front.leader.requests)
        assert chat == text == given == ids and chat[:2] == [BOS, ord("u")]
        assert raw == [BOS, *b"raw"]


def test_a_template_that_refuses_says_why():
    source = stub_source(template="{{ raise_exception('roles must alternate') }}")
    with front_end(StubLeader(), source=source) as front:
        response = httpx.post(f"{front.url}/v1/chat/completions", json={"messages": HI})
        assert response.status_code == 400 and "roles must alternate" in response.json()["error"]["message"]
    with front_end(StubLeader(), source=stub_source(template=None)) as front:
        response = httpx.post(f"{front.url}/v1/chat/completions", json={"messages": HI})
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]


# ---- completions ----


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [3]), (["ab", "c"], [2, 1]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])],
)
def test_prompts_of_every_form(hello, client, prompt, lengths):
    answer = client.completions.create(model="stub", prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["hell"] * len(lengths)
    assert answer.usage.prompt_tokens == sum(lengths)
    assert [len(request.prompt_ids) for request in hello.leader.submits[-1].requests] == lengths


def test_a_completion_without_a_limit_has_sixteen_tokens(client):
    assert client.completions.create(model="stub", prompt="a").usage.completion_tokens == 16


def test_an_echo_with_log_probabilities_covers_prompt_and_answer(client):
    # What lm-eval sends to score a continuation.
    answer = client.completions.create(
        model="stub", prompt=[[97, 98, 99]], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    choice = answer.choices[0]
    assert choice.text == "abch"
    assert choice.logprobs.tokens == ["a", "b", "c", "h"]
    assert choice.logprobs.token_logprobs == [None, -0.01, -0.02, -0.03]
    assert choice.logprobs.top_logprobs == [None, {"b": -0.01}, {"c": -0.02}, {"h": -0.03}]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    chunks = list(
        client.completions.create(
            model="stub", prompt="abc", echo=True, logprobs=0, max_tokens=2, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abche"
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == list("abche")


def test_a_streamed_completion_has_one_end(client):
    chunks = list(client.completions.create(model="stub", prompt="a", max_tokens=5, n=2, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "hello", 1: "hello"}
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 2


# ---- errors ----


def test_errors_have_the_class_that_clients_expect(hello, client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "x" * 3000}])
    assert long.value.code == "context_length_exceeded" and "2048" in str(long.value)
    with pytest.raises(openai.BadRequestError) as asked:
        client.completions.create(model="stub", prompt="abc", max_tokens=2046)
    assert "max_tokens is 2046" in str(asked.value) and "at most 2045" in str(asked.value)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="n is 0"):
            client.chat.completions.create(model="stub", messages=HI, n=0, stream=stream)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": "x"},
        {},
        {"messages": HI, "tools": [{"type": "function"}]},
        {"messages": HI, "response_format": {"type": "json_object"}},
        {"messages": HI, "top_logprobs": 2},
        {"messages": HI, "logprobs": True, "top_logprobs": 10**6},
        {"messages": HI, "temperature": -1},
        {"messages": HI, "max_tokens": 0},
        {"messages": HI, "logit_bias": {"9999": 1}},
    ],
)
def test_bad_chats_are_400(hello, body):
    response = httpx.post(f"{hello.url}/v1/chat/completions", json=body, timeout=20)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": None},
        {"prompt": ["a", 1]},
        {"prompt": [1, [2]]},
        {"prompt": [-1]},
        {"prompt": "a", "logprobs": 10**6},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "best_of": 3},
    ],
)
def test_bad_completions_are_400(hello, body):
    response = httpx.post(f"{hello.url}/v1/completions", json=body, timeout=20)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_what_clients_send_beside_the_point_is_accepted(hello):
    body = {
        "model": None,
        "messages": HI,
        "max_tokens": 2,
        "user": "u",
        "tools": [],
        "response_format": {"type": "text"},
        "stop": None,
        "separate_reasoning": True,
        "log_metrics": True,
        "top_logprobs": 0,
    }
    assert httpx.post(f"{hello.url}/v1/chat/completions", json=body, timeout=20).status_code == 200


def test_a_stream_that_fails_raises_in_the_client():
    # vllm#57082: an engine-side abort must not look like a normal end.
    leader = StubLeader("hello ")
    leader.step_seconds = 0.02
    with front_end(leader) as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="any") as client:
        stream = client.chat.completions.create(model="stub", messages=HI, stream=True)
        parts = iter(stream)
        next(parts)
        leader.fatal(70, "DIVERGED step=9")
        with pytest.raises(openai.APIError, match="DIVERGED"):
            list(parts)
        assert front.join() == 70


def test_a_key_guards_all_but_health():
    with front_end(StubLeader(), config=EngineConfig(api_key="secret")) as front:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = httpx.get(f"{front.url}/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
            assert httpx.post(f"{front.url}/flush_cache", headers=headers).status_code == 401
        assert httpx.get(f"{front.url}/health").status_code == 200
        assert httpx.get(f"{front.url}/ready").status_code == 200
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="secret") as client:
            assert client.completions.create(model="stub", prompt="a", max_tokens=1).choices[0].text == "h"
        info = httpx.get(f"{front.url}/server_info", headers={"authorization": "Bearer secret"})
        assert "secret" not in info.text


def test_too_many_sequences_are_refused_before_a_prompt_is_encoded(hello, monkeypatch):
    encoded = []
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: encoded.append(1) or (1,))
    body = {"prompt": ["a"] * 600, "n": 2, "max_tokens": 1}
    refused = httpx.post(f"{hello.url}/v1/completions", json=body, timeout=20)
    assert refused.status_code == 400 and "asks for 1200 sequences" in refused.json()["error"]["message"]
    assert encoded == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_leaves_while_its_prompt_is_encoded_makes_no_request(path, monkeypatch):
    leader, may_end, begun = StubLeader("hello "), threading.Event(), threading.Event()

    def encode(*_, **__):
        begun.set()
        assert may_end.wait(20)
        return (1,)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with front_end(leader) as front, httpx.Client(base_url=front.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json={"prompt": "a", "text": "a", "messages": HI}, timeout=0.3)
        assert begun.is_set()
        for _ in range(5):  # by then the server has seen the client go
            assert client.get("/health").status_code == 200
        may_end.set()
        stays = {"input_ids": [7], "sampling_params": {"max_new_tokens": 3}}
        assert client.post("/generate", json=stays).status_code == 200
        assert [request.prompt_ids for request in leader.requests] == [(7,)]
