"""Real services at their limits: of context, of sequences at once, of the queue, and of patience with a slow stage."""

import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.service import FP32, native_body, serve, until

pytestmark = pytest.mark.process


def layout(dense, pp_size, *flags):
    return ("--model-path", str(dense.folder), *FP32, "--pp-size", str(pp_size), *flags)


# ---- context ----


@pytest.fixture(scope="module")
def short(dense):
    """A context of 64 tokens over two stages, in pages of one."""
    flags = ("--context-length", "64", "--max-total-tokens", "4096", "--page-size", "1")
    with serve(*layout(dense, 2, *flags)) as service:
        yield service


@pytest.mark.parametrize("length", range(55, 67))
def test_context_is_counted_to_the_token_on_every_route(short, length):
    # sglang#2876, sglang#8096, vllm#33418, vllm#40689: limits off by one, numbers that do not add up, silent cuts.
    prompt = [5] * length
    for n in (1, 8, 64, None):
        limit = {} if n is None else {"max_new_tokens": n}
        native = short.post(
            "/generate", {"input_ids": prompt, "sampling_params": limit | {"ignore_eos": True}}
        )
        limit = {} if n is None else {"max_tokens": n}
        completion = short.post("/v1/completions", {"prompt": prompt, "ignore_eos": True} | limit)
        fits = length < 64 if n is None else length + n <= 64
        assert (native.status_code, completion.status_code) == ((200, 200) if fits else (400, 400))
        if fits:
            meta, usage = native.json()["meta_info"], completion.json()["usage"]
            assert meta["prompt_tokens"] == usage["prompt_tokens"] == length, "never a prompt that was cut"
            assert meta["completion_tokens"] == (64 - length if n is None else n)
            assert usage["completion_tokens"] == (min(64 - length, 16) if n is None else n)
        else:
            for refused in (native, completion):
                message = refused.json()["error"]["message"]
                assert str(length) in message and "64" in message
                assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_that_is_too_long_is_refused(short):
    messages = [{"role": "user", "content": "many words " * 30}]
    refused = short.post("/v1/chat/completions", {"messages": messages})
    assert refused.status_code == 400 and "64" in refused.json()["error"]["message"]
    short.check_alive()


# ---- sequences and queue ----


@pytest.fixture(scope="module", params=[1, 2], ids=["pp1", "pp2"])
def crowded(dense, request):
    """Four at once and three in the queue."""
    flags = ("--max-running-requests", "4", "--max-queued-requests", "3", "--chunked-prefill-size", "32")
    with serve(*layout(dense, request.param, *flags, "--max-total-tokens", "8192")) as service:
        yield service


def test_all_slots_are_filled_and_filled_again(crowded):
    # sglang#35537, sglang#30295, vllm#40004: --max-running-requests 4, and three run.
    streams = [crowded.stream([number] * 100, 1500) for number in range(4)]
    until(lambda: crowded.stats()["running"] == 4, "four run together", 10.0)
    fifth = crowded.stream([9] * 100, 5)
    until(lambda: crowded.stats()["waiting"] == 1, "the fifth waits")
    assert crowded.stats()["running"] == 4 and not fifth.events
    streams[2].close()
    assert len(fifth.wait_end(10.0).output_ids) == 5
    for stream in streams:
        stream.close()
    crowded.check_idle()


def test_everybody_gets_an_answer_when_the_queue_is_full(crowded):
    # sglang#33858, sglang#7565, sglang#17143: rejected requests hang for ever, health 200, queues empty.
    with ThreadPoolExecutor(50) as pool:
        asked = [
            pool.submit(crowded.post, "/generate", native_body([number, 1], 40, stream=bool(number % 2)))
            for number in range(50)
        ]
        answers = [one.result(30) for one in asked]
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses[200] >= 7 and statuses[200] + statuses[429] == 50
    for answer in answers:
        if answer.status_code == 429:
            assert "queue is full" in answer.json()["error"]["message"] and answer.headers["retry-after"]
    batch = crowded.post("/generate", {"input_ids": [[1]] * 10})
    assert batch.status_code == 400 and "10" in batch.json()["error"]["message"]
    together = crowded.post(
        "/generate", {"input_ids": [[1], [2], [3]], "sampling_params": {"max_new_tokens": 3}}
    )
    assert together.status_code == 200 and len(together.json()) == 3
    crowded.check_idle()
    crowded.check_alive()


# ---- patience ----


def test_busy_is_healthy(dense):
    # sglang#35884, sglang#22511: long prefills, so health says dead; probes that are requests pile up.
    prompts = dense.clear_prompts([200] * 3, 8, seed=20)
    faults = {"slow": {"rank": 1, "seconds": 0.02}}
    flags = ("--chunked-prefill-size", "16", "--max-total-tokens", "8192")
    with (
        serve(*layout(dense, 2, *flags), faults=faults, probe=False) as service,
        ThreadPoolExecutor(64) as pool,
    ):
        streams = [service.stream(prompt, 8) for prompt in prompts]
        until(lambda: service.stats()["running"] + service.stats()["waiting"] == 3, "three requests")
        assert set(pool.map(lambda _: service.health(), range(64))) == {200}
        while any(stream.is_alive() for stream in streams):
            assert service.health() == 200
            now = service.stats()
            assert now["running"] + now["waiting"] <= 3, "a probe is no request"
            time.sleep(0.05)
        assert [stream.output_ids for stream in streams] == dense.ids(prompts, 8)
        service.check_idle()


def test_stuck_is_not_healthy(dense):
    # mlx-lm#1834, sglang#34572: generation stands still and health stays green.
    faults = {"slow": {"rank": 1, "seconds": 600}}
    with serve(*layout(dense, 2, "--watchdog-timeout", "1"), faults=faults, probe=False) as service:
        time.sleep(1.5)
        assert service.health() == 200, "idle is healthy, however long"
        stream = service.stream([1, 2, 3], 8)
        until(lambda: service.health() == 503, "health says that it is stuck", 10.0)
        reason = httpx.get(f"{service.url}/health").json()["reason"]
        assert "no step has finished" in reason
        service.terminate()
        until(lambda: "draining" in service.stderr, "the service drains")
        service.terminate()
        assert service.wait_exit(20.0) == 128 + signal.SIGTERM
        assert stream.wait_end().failed
