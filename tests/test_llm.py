"""The offline door on real ranks: the same answers and words as HTTP, for one prompt and for many."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from engine.config import ConfigError
from engine.llm import LLM
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.process
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("llm"), seed=3, tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        str(folder), pp_size=2, dtype="float32", max_total_tokens=4096, max_queued_requests=64
    ) as running:
        yield running


def test_one_prompt_gives_one_answer_and_several_a_list_in_order(llm):
    alone = llm.generate([5, 6, 7], GREEDY)
    assert len(alone["output_ids"]) == 4 and alone["meta_info"]["prompt_tokens"] == 3
    both = llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert [answer["meta_info"]["prompt_tokens"] for answer in both] == [3, 2]
    assert both[0]["output_ids"] == alone["output_ids"]
    assert llm.generate([], GREEDY) == []


def test_parameters_may_differ_by_prompt_and_fields_hold_for_all(llm):
    params = [GREEDY | {"max_new_tokens": 1}, GREEDY | {"max_new_tokens": 3, "n": 2}]
    one, two = llm.generate([[5, 6], [5, 6]], params, return_logprob=True)
    assert len(one["meta_info"]["output_token_logprobs"]) == 1
    assert [len(choice["output_ids"]) for choice in two] == [3, 3]
    with pytest.raises(ValueError, match="3 for 2 prompts"):
        llm.generate([[5], [6]], [GREEDY] * 3)


def test_more_prompts_than_may_wait_are_all_answered(llm):
    # 72 sequences may run or wait and 512 texts may wait for the tokenizer; a list knows neither number.
    texts = llm.generate(["ab"] * 600, GREEDY | {"max_new_tokens": 1})
    assert len(texts) == 600 and len({answer["text"] for answer in texts}) == 1
    choices = llm.generate([[5, 6]] * 100, GREEDY | {"max_new_tokens": 1, "n": 4})
    assert [len(answer) for answer in choices] == [4] * 100


def test_what_http_refuses_is_a_value_error_with_its_words_and_harms_nobody(llm):
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate([[5, 6]], {"max_tokens": 3})
    with pytest.raises(ValueError, match="640"):
        llm.generate([[5], [640]], GREEDY)
    assert len(llm.generate([5, 6], GREEDY)["output_ids"]) == 4


def test_wrong_flags_are_named(folder):
    with pytest.raises(ConfigError, match="--pp-size 0"):
        LLM(str(folder), pp_size=0)
    with pytest.raises(ConfigError, match="hicache: no such flag"):
        LLM(str(folder), hicache=1)
    with pytest.raises(ValueError, match="--pp-size 9"):
        LLM(str(folder), pp_size=9)


def test_a_refused_start_tells_why_and_leaves_nothing(folder, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAULTS", '{"memory": {"rank": 1, "bytes": 100}}')
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match="hold no page"):
        LLM(str(folder), pp_size=2, dtype="float32")
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_killed_rank_ends_the_call_with_its_name(folder):
    with LLM(str(folder), pp_size=2, dtype="float32", max_total_tokens=4096) as llm:
        assert llm.generate([5, 6], GREEDY)
        last = max(psutil.Process().children(), key=lambda process: process.pid)
        os.kill(last.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            llm.generate([5, 6], GREEDY | {"max_new_tokens": 500})
        assert time.monotonic() - began < 10
