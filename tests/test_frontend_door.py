"""The door: what fits, what is filled in, what is refused and how it is said. No server, no model."""

import msgspec
import pytest

from engine.frontend import limits
from engine.frontend.admission import (
    ModelFacts,
    Names,
    SamplingFields,
    check_prompt,
    choice_seed,
    complete,
    derived_seed,
    stop_strings,
    usable,
)
from engine.frontend.bodies import parse_body
from engine.frontend.errors import ApiError
from engine.frontend.native import GenerateBody

NAMES = Names()


def facts(**changes):
    values = {
        "name": "m",
        "vocabulary_size": 640,
        "context_length": 64,
        "eos_ids": (257,),
        "random_seed": 1,
        "capacity_tokens": 4096,
        "page_size": 16,
        "sequences_max": 10,
    }
    return ModelFacts(**values | changes)


def filled(prompt_tokens=10, *, of=None, default=128, **fields):
    return complete(
        SamplingFields(**fields),
        prompt_tokens=prompt_tokens,
        facts=of or facts(),
        names=NAMES,
        default_new_tokens=default,
    )


def refusal(work, *arguments, **named):
    with pytest.raises(ApiError) as caught:
        work(*arguments, **named)
    assert "\n" not in caught.value.message
    return caught.value


# ---- context and capacity (sglang#2876, sglang#8096, vllm#33418) ----


@pytest.mark.parametrize("prompt", range(55, 67))
@pytest.mark.parametrize("asked", [1, 8, 64, None])
def test_prompt_and_answer_fit_the_context_exactly(prompt, asked):
    if prompt >= 64:
        error = refusal(check_prompt, range(prompt), facts(), NAMES)
        assert (error.status, error.param, error.code) == (400, "input_ids", "context_length_exceeded")
        assert f"{prompt} tokens" in error.message and "64 tokens" in error.message
    elif asked is None:
        assert filled(prompt).max_new_tokens == min(128, 64 - prompt)
        assert filled(prompt, default=None).max_new_tokens == 64 - prompt
    elif prompt + asked <= 64:
        assert filled(prompt, max_new_tokens=asked).max_new_tokens == asked
    else:
        error = refusal(filled, prompt, max_new_tokens=asked)
        assert (error.status, error.param) == (400, "sampling_params.max_new_tokens")
        assert f"{prompt + asked} together" in error.message and "length is 64" in error.message
        assert f"at most {64 - prompt}" in error.message


def test_the_last_token_of_an_answer_needs_no_page():
    # ceil((prompt + new - 1) / 16) * 16 <= 48: a prompt of 40 tokens may get 9 more, not 10.
    small = facts(context_length=2048, capacity_tokens=48)
    assert filled(40, of=small, max_new_tokens=9).max_new_tokens == 9
    error = refusal(filled, 40, of=small, max_new_tokens=10)
    assert "49 tokens of cache" in error.message and "48" in error.message and "at most 9" in error.message
    assert filled(40, of=small).max_new_tokens == 9
    assert check_prompt([1] * 48, small, NAMES) == (1,) * 48
    assert "capacity is 48" in refusal(check_prompt, [1] * 49, small, NAMES).message


@pytest.mark.parametrize("ids", [[640], [-1], [2**40], [5, 10**30], ["a"], [1, None], []])
def test_ids_outside_the_vocabulary_are_refused(ids):
    # vllm#7632, sglang#36856: an id that indexes past the embedding kills the worker.
    error = refusal(check_prompt, ids, facts(), NAMES)
    assert error.status == 400 and error.message.startswith("input_ids has")


# ---- sampling parameters ----


def test_defaults_are_complete():
    params = filled()
    assert params == msgspec.structs.replace(params, max_new_tokens=54, temperature=1.0, top_k=0, top_p=1.0)
    assert params.stop_token_ids == (257,)
    assert filled(ignore_eos=True, stop_token_ids=[5, 5]).stop_token_ids == (5,)


def test_the_models_suggestions_are_defaults_and_no_more():
    model = facts(suggestions={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert (filled(of=model).temperature, filled(of=model).top_k, filled(of=model).top_p) == (0.6, 20, 0.95)
    assert (filled(of=model, temperature=0).temperature, filled(of=model, top_k=-1).top_k) == (0.0, 0)


def test_suggestions_out_of_range_are_dropped():
    assert usable({"temperature": 0.6, "top_p": 0, "top_k": 0, "min_p": -1, "top_q": 1}) == {
        "temperature": 0.6,
        "top_k": 0,
    }


def test_edges_that_have_one_documented_meaning():
    assert filled(temperature=1e-30).temperature == 0.0
    assert filled(top_k=10**12).top_k == 0
    assert filled(top_k=640).top_k == 0
    assert filled(top_k=639).top_k == 639
    assert refusal(filled, top_k=0).param == "sampling_params.top_k"
    assert "at most max_new_tokens" in refusal(filled, min_new_tokens=9, max_new_tokens=8).message
    assert "logit_bias" in refusal(filled, logit_bias={640: 1.0}).message
    assert "stop_token_ids" in refusal(filled, stop_token_ids=[9999999], min_new_tokens=5).message
    assert "json_schema" in refusal(filled, json_schema="{}").message
    assert filled(json_schema="", regex=None).max_new_tokens == 54


def test_stop_strings_have_bounds():
    assert stop_strings(SamplingFields(stop="a"), NAMES) == ("a",)
    for stop in ("", [""], ["a"] * 33, ["a" * (limits.STOP_CHARACTERS_MAX + 1)]):
        assert refusal(stop_strings, SamplingFields(stop=stop), NAMES).param == "sampling_params.stop"


def test_seeds_differ_between_choices_and_repeat():
    assert [choice_seed(SamplingFields(seed=7), i) for i in range(3)] == [
        7,
        derived_seed(7, 1),
        derived_seed(7, 2),
    ]
    assert choice_seed(SamplingFields(sampling_seed=-1), 0) == 2**64 - 1
    assert choice_seed(SamplingFields(), 0) is None
    assert len({derived_seed(seed, number) for seed in range(20) for number in range(20)}) == 400
    # SplitMix64's published first outputs for seed 1234567.
    assert [derived_seed(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


# ---- bodies ----


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[" * 100000, "nested too deeply"),
        ("{'text': 'é'}".encode("gbk"), "not valid JSON"),
        (b'{"text":"\\ud800"}', "not valid JSON"),
        (b'{"sampling_params":{"temperature":NaN}}', "not valid JSON"),
        (b'{"sampling_params":{"temperature":1e999}}', "not valid JSON"),
        (b"5", "the body is 5: expected `object`"),
        (b'{"text":5}', "text is 5"),
        (b'{"input_ids":[1.5]}', "input_ids[0] is 1.5"),
        (b'{"sampling_params":{"n":0}}', "sampling_params.n is 0: expected `int` >= 1"),
        (b'{"sampling_params":{"n":5000000}}', "sampling_params.n is 5000000: expected `int` <= 128"),
        (b'{"sampling_params":{"n":true}}', "sampling_params.n is true"),
        (b'{"sampling_params":[{},{"top_p":2}]}', "sampling_params[1].top_p is 2"),
        (b'{"sampling_params":{"stop":["a",1]}}', "sampling_params.stop[1] is 1"),
        (b'{"sampling_params":{"logit_bias":{"a":1}}}', "a key of sampling_params.logit_bias"),
        (
            b'{"sampling_params":{"max_tokens":5}}',
            "sampling_params: unknown field `max_tokens`, expected one of max_new",
        ),
        (b'{"rid":"' + b"x" * 300 + b'"}', "rid is "),
    ],
)
def test_a_bad_body_is_one_line_that_names_the_field(body, named):
    error = refusal(parse_body, body, GenerateBody, strict=SamplingFields)
    assert error.status == 400 and named in error.message and len(error.message) < 700


def test_nulls_are_defaults_and_unknown_top_level_keys_are_ignored():
    body = parse_body(
        b'{"text":"a","rid":null,"lora_path":null,"bootstrap_host":1,"sampling_params":{"n":null,"stop":null}}',
        GenerateBody,
        strict=SamplingFields,
    )
    assert (body.text, body.sampling_params) == ("a", SamplingFields())
