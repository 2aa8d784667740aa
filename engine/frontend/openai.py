"""`/v1/models`, `/v1/completions` and `/v1/chat/completions`: bodies of OpenAI's shape into asks.

Unknown fields are ignored, as clients send many; fields that would change the answer and are not served are refused
by name. The answers are written by `openai_shapes.py`.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from engine.frontend import answers, limits
from engine.frontend.admission import (
    Bias,
    Choices,
    Label,
    MinP,
    MinTokens,
    Names,
    NewTokens,
    Penalty,
    Repetition,
    SamplingFields,
    Seed,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    check_prompt,
    complete,
    stop_strings,
)
from engine.frontend.bodies import shown
from engine.frontend.detokenizer import StopStrings
from engine.frontend.errors import ApiError, invalid
from engine.frontend.generation import Ask, Generation, Service, asks_of
from engine.frontend.openai_shapes import ChatShape, CompletionShape, Envelope

COMPLETION_NEW_TOKENS = 16
"""`max_tokens` of /v1/completions when absent, as OpenAI has it; a chat may fill its context."""


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """`stream_options`: where the usage is shown in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(msgspec.Struct, kw_only=True, frozen=True):
    """What both routes share: OpenAI's sampling fields, then the common ones beyond it."""

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = None
    response_format: Any = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    cache_salt: Label | None = None
    return_cached_tokens_details: bool | None = None


class CompletionBody(_Body, kw_only=True, frozen=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: str | None = None


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=limits.RID_CHARACTERS_MAX)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Any = None


class ChatBody(_Body, kw_only=True, frozen=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES_MAX)]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Any = None
    functions: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None


def model(service: Service, started: int) -> dict[str, Any]:
    """The model as `/v1/models` shows it."""
    return {
        "id": service.facts.name,
        "object": "model",
        "created": started,
        "owned_by": "lockstep",
        "max_model_len": service.facts.context_length,
    }


def check_model(service: Service, name: str) -> None:
    """Raises ApiError 404 for another model's name."""
    if name != service.facts.name:
        raise ApiError(
            404,
            f"model is {shown(name)}: allowed is {service.facts.name!r}",
            param="model",
            code="model_not_found",
        )


async def completions(service: Service, request: Request) -> Response:
    """Answer one call of `/v1/completions`. Raises ApiError."""
    service.check_open()
    body = await answers.received(request, service.text_threads, CompletionBody)
    _check_common(service, body)
    for name in ("suffix", "best_of"):
        if getattr(body, name) not in (None, "", 1):
            raise invalid(name, "is not supported; allowed is null")
    names = Names(sampling="", prompt="prompt", max_new_tokens="max_tokens")
    fields = _fields(body, body.max_tokens)
    given = _prompts(body.prompt)
    _check_count(len(given), fields, names)
    prompts = await answers.while_connected(request, _encoded(service, given, names))
    call_id = f"cmpl-{uuid.uuid4().hex}"
    asks = _asks(service, body, fields, prompts, names, call_id, COMPLETION_NEW_TOKENS)
    if body.logprobs is not None:
        start = 0 if body.echo else -1
        asks = [_with_logprobs(ask, start=start, top=body.logprobs) for ask in asks]
    echoes: list[str] = []
    if body.echo:
        tell = service.tokenizer.text
        echoes = [await service.text_threads.run(tell, ids, skip_special_tokens=True) for ids in prompts]
    generation = service.start(asks, call_id)
    envelope = _envelope(body, call_id, generation, "text_completion", "text_completion")
    shape = CompletionShape(envelope, service.tokenizer, echoes)
    return await _answer(request, body, generation, shape)


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one call of `/v1/chat/completions`. Raises ApiError."""
    service.check_open()
    body = await answers.received(request, service.text_threads, ChatBody)
    _check_common(service, body)
    for name in ("tools", "functions", "chat_template", "chat_template_kwargs", "continue_final_message"):
        if getattr(body, name):
            raise invalid(name, "is not supported; allowed is null")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", f"is {body.top_logprobs}: allowed only with logprobs")
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = Names(sampling="", prompt="messages", max_new_tokens=limit_name)
    fields = _fields(body, body.max_completion_tokens or body.max_tokens)
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    ids = await answers.while_connected(request, service.encode_chat(messages))
    prompts = [check_prompt(ids, service.facts, names)]
    call_id = f"chatcmpl-{uuid.uuid4().hex}"
    asks = _asks(service, body, fields, prompts, names, call_id, None)
    if body.logprobs:
        asks = [_with_logprobs(ask, start=-1, top=body.top_logprobs or 0) for ask in asks]
    generation = service.start(asks, call_id)
    envelope = _envelope(body, call_id, generation, "chat.completion", "chat.completion.chunk")
    return await _answer(request, body, generation, ChatShape(envelope, service.tokenizer))


async def _answer(
    request: Request, body: _Body, generation: Generation, shape: ChatShape | CompletionShape
) -> Response:
    """Answer a live call, streamed or whole."""
    if body.stream:
        return await answers.stream(request, generation, shape)
    await answers.finished(request, generation)
    return answers.json_answer(shape.whole())


# ---- the bodies into asks -----------------------------------------------------------------------


def _check_common(service: Service, body: _Body) -> None:
    """Refuse another model's name and what is not served."""
    if body.model is not None:
        check_model(service, body.model)
    kind = (
        body.response_format.get("type") if isinstance(body.response_format, dict) else body.response_format
    )
    if kind not in (None, "text"):
        raise invalid("response_format", f"is {shown(body.response_format)}: allowed is {{'type': 'text'}}")


def _fields(body: _Body, max_new_tokens: int | None) -> SamplingFields:
    """OpenAI's sampling fields under the names of the one door."""
    return SamplingFields(
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        no_stop_trim=body.no_stop_trim,
        n=body.n,
        seed=body.seed,
        logit_bias=body.logit_bias,
    )


def _check_count(prompts: int, fields: SamplingFields, names: Names) -> None:
    """Before any prompt is encoded. Raises ApiError 400."""
    count = prompts * fields.choices
    if count > limits.SEQUENCES_MAX:
        raise invalid(names.prompt, f"asks for {count} sequences: allowed are {limits.SEQUENCES_MAX}")


async def _encoded(service: Service, given: list[str | list[Any]], names: Names) -> list[tuple[int, ...]]:
    """The ids of each prompt. Raises ApiError."""
    return [
        check_prompt(await service.encode(item) if isinstance(item, str) else item, service.facts, names)
        for item in given
    ]


def _asks(
    service: Service,
    body: _Body,
    fields: SamplingFields,
    prompts: list[tuple[int, ...]],
    names: Names,
    call_id: str,
    default_new_tokens: int | None,
) -> list[Ask]:
    """`n` sequences for each prompt, in the order of the choices' indices."""
    count = len(prompts) * fields.choices
    stops = StopStrings(stop_strings(fields, names))
    asks: list[Ask] = []
    for prompt_ids in prompts:
        sampling = complete(
            fields,
            prompt_tokens=len(prompt_ids),
            facts=service.facts,
            names=names,
            default_new_tokens=default_new_tokens,
        )
        numbers = range(len(asks), len(asks) + fields.choices)
        asks += asks_of(
            fields,
            [call_id] if count == 1 else [f"{call_id}_{number}" for number in numbers],
            prompt_ids=prompt_ids,
            sampling=sampling,
            stops=stops,
            cache_salt=body.cache_salt,
        )
    return asks


def _with_logprobs(ask: Ask, *, start: int, top: int) -> Ask:
    sampling = msgspec.structs.replace(
        ask.sampling, return_logprob=True, logprob_start=start, top_logprobs=top
    )
    return dataclasses.replace(ask, sampling=sampling)


def _prompts(prompt: str | list[Any] | None) -> list[str | list[Any]]:
    """The prompts of a completion: a text, texts, ids, or lists of ids."""
    if prompt is None or prompt in ("", []):
        raise invalid("prompt", f"is {shown(prompt)}: a prompt needs at least one token")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise invalid("prompt", "mixes kinds: allowed are a text, a list of texts, ids, or lists of ids")
    return [prompt] if kinds == {int} else prompt


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as a template sees it: parts joined into one text, absent fields left out."""
    content = message.content
    if isinstance(content, list):
        content = "".join(
            _part_text(part, f"messages[{index}].content[{j}]") for j, part in enumerate(content)
        )
    plain = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        raise invalid(f"messages[{index}].tool_calls", "is not supported; allowed is null")
    return plain


def _part_text(part: dict[str, Any], name: str) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise invalid(name, f"is {shown(part)}: allowed is {{'type': 'text', 'text': ...}}")
    return text


def _envelope(body: _Body, call_id: str, generation: Generation, whole: str, chunk: str) -> Envelope:
    options = body.stream_options or StreamOptions()
    return Envelope(
        call_id=call_id,
        model=generation.model,
        created=int(time.time()),
        whole=whole,
        chunk=chunk,
        choices_per_prompt=body.n or 1,
        usage_last=bool(options.include_usage),
        usage_always=bool(options.continuous_usage_stats),
        tiers=bool(body.return_cached_tokens_details),
        sequences=generation.sequences,
    )
