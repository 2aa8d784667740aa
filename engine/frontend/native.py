"""`POST /generate` in SGLang's shape: its body, its answer and its stream.

Unknown keys of the body are ignored, unknown sampling parameters refused; what SGLang knows and this server does not
serve is refused by name, unless it is null or asks for nothing. A batch or `n` > 1 is answered by a list.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from engine.frontend import answers, limits
from engine.frontend.admission import (
    Label,
    Names,
    SamplingFields,
    TopLogprobs,
    check_prompt,
    complete,
    stop_strings,
)
from engine.frontend.bodies import parse_body
from engine.frontend.detokenizer import StopStrings
from engine.frontend.errors import invalid
from engine.frontend.generation import Ask, Delta, Generation, Sequence, Service, asks_of
from engine.frontend.tokenizer import Tokenizer
from engine.types import FinishReason, SamplingParams, TokenLogprob

Value = TypeVar("Value")
Rid = Annotated[str, Meta(min_length=1, max_length=limits.RID_CHARACTERS_MAX)]
LogprobStart = Annotated[int, Meta(ge=-1)]


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of `/generate`. A field that may be a list has one value per prompt then."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: LogprobStart | list[LogprobStart] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    extra_key: Label | None = None
    cache_salt: Label | None = None
    # Known to SGLang, not served here.
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    token_ids_logprob: Any = None
    priority: Any = None


_UNSERVED = (
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "token_ids_logprob",
    "priority",
)
_NO_FIELDS = SamplingFields()


async def generate(service: Service, request: Request) -> Response:
    """Answer one call over HTTP. Raises ApiError."""
    service.check_open()
    body = await answers.received(request, service.text_threads, GenerateBody, strict=SamplingFields)
    generation, shape, one = await answers.while_connected(request, _start(service, body))
    if body.stream:
        return await answers.stream(request, generation, shape)
    await answers.finished(request, generation)
    return answers.json_answer(_answer(generation, shape, one))


def read_body(fields: dict[str, Any]) -> GenerateBody:
    """A body given as plain values, read as if it had come over HTTP. Raises ApiError."""
    return parse_body(msgspec.json.encode(fields), GenerateBody, strict=SamplingFields)


async def answer(service: Service, body: GenerateBody) -> Any:
    """Answer one call in this process: what an unstreamed call over HTTP would get. Raises ApiError."""
    generation, shape, one = await _start(service, body)
    try:
        await generation.finish()
    finally:
        generation.close()
    return _answer(generation, shape, one)


async def _start(service: Service, body: GenerateBody) -> tuple[Generation, _NativeShape, bool]:
    """Send a call to the leader; the flag says whether its answer is one object rather than a list."""
    asks, one = await _asks(service, body)
    whole_rid = body.rid if isinstance(body.rid, str) else None
    shape = _NativeShape(service.tokenizer, indexed=not one, texts=bool(body.return_text_in_logprobs))
    return service.start(asks, whole_rid), shape, one


def _answer(generation: Generation, shape: _NativeShape, one: bool) -> Any:
    shown = [shape.answer(sequence) for sequence in generation.sequences]
    return shown[0] if one else shown


# ---- the body into asks -------------------------------------------------------------------------


async def _asks(service: Service, body: GenerateBody) -> tuple[list[Ask], bool]:
    """The sequences that a body asks for, and whether it asks for just one and wants no list. Raises ApiError."""
    for name in _UNSERVED:
        if getattr(body, name):
            raise invalid(name, "is not supported; allowed is null")
    names = Names(prompt="text" if body.input_ids is None else "input_ids")
    prompts, single = _prompts(body)
    count = len(prompts)
    every_fields = _per_prompt(body.sampling_params, count, "sampling_params") or [_NO_FIELDS] * count
    if sum(fields.choices for fields in every_fields) > limits.SEQUENCES_MAX:
        raise invalid(
            names.prompt,
            f"has {count} prompts, in all {sum(fields.choices for fields in every_fields)} sequences: "
            f"allowed are {limits.SEQUENCES_MAX}",
        )
    rids = _rids(body.rid, count, single)
    wanted = _Logprobs(body, count)
    stops = _matchers(every_fields, names)
    asks: list[Ask] = []
    for i, (prompt, fields) in enumerate(zip(prompts, every_fields, strict=True)):
        ids = await service.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(ids, service.facts, names)
        sampling = complete(fields, prompt_tokens=len(prompt_ids), facts=service.facts, names=names)
        choices = range(fields.choices)
        asks += asks_of(
            fields,
            [rids[i]] if fields.choices == 1 else [f"{rids[i]}_{choice}" for choice in choices],
            prompt_ids=prompt_ids,
            sampling=wanted.added_to(sampling, i, len(prompt_ids)),
            stops=stops[stop_strings(fields, names)],
            cache_salt=body.cache_salt or body.extra_key,
        )
    return asks, single and len(asks) == 1


def _matchers(every_fields: list[SamplingFields], names: Names) -> dict[tuple[str, ...], StopStrings]:
    """One matcher for each different set of stop strings in a call. Raises ApiError 400."""
    different = dict.fromkeys(stop_strings(fields, names) for fields in every_fields)
    characters = sum(len(string) for strings in different for string in strings)
    if characters > limits.CALL_STOP_CHARACTERS_MAX:
        raise invalid(
            names.sampling + "stop",
            f"has {characters} characters over the whole call: allowed are {limits.CALL_STOP_CHARACTERS_MAX}",
        )
    return {strings: StopStrings(strings) for strings in different}


def _prompts(body: GenerateBody) -> tuple[list[str | list[Any]], bool]:
    """The prompts, texts or ids, and whether the client sent one alone rather than a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "and input_ids: exactly one of them is allowed")
    if isinstance(body.text, str):
        return [body.text], True
    given: list[Any] = body.input_ids if body.text is None else list(body.text)  # type: ignore[assignment]
    if not given:
        raise invalid(
            "text" if body.input_ids is None else "input_ids", "is empty: a prompt needs at least one token"
        )
    nested = [isinstance(item, list) for item in given]
    if body.text is None and not any(nested):
        return [given], True
    if body.text is None and not all(nested):
        raise invalid("input_ids", "mixes ids and lists: allowed is a list of ids or a list of lists of ids")
    return given, False


def _per_prompt(value: Value | list[Value] | None, count: int, name: str) -> list[Value] | None:
    """One value per prompt: a single one holds for all."""
    if value is None:
        return None
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(
            name, f"has {len(value)} values: allowed is one, or one for each of the {count} prompts"
        )
    return value


def _rids(rid: str | list[str] | None, count: int, single: bool) -> list[str]:
    """A name for each prompt: the client's own, its name for the batch with a number, or a random one."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count:
            raise invalid(
                "rid", f"has {len(rid)} names: allowed is one, or a different one for each of {count} prompts"
            )
        return rid
    base = rid or uuid.uuid4().hex
    return [base] if single else [f"{base}_{i}" for i in range(count)]


class _Logprobs:
    """Which log probabilities a body wants, per prompt."""

    def __init__(self, body: GenerateBody, count: int) -> None:
        self._wanted = _per_prompt(body.return_logprob, count, "return_logprob") or [False] * count
        self._starts = _per_prompt(body.logprob_start_len, count, "logprob_start_len") or [-1] * count
        self._tops = _per_prompt(body.top_logprobs_num, count, "top_logprobs_num") or [0] * count

    def added_to(self, sampling: SamplingParams, index: int, prompt_tokens: int) -> SamplingParams:
        """The parameters of prompt `index` with its wishes in them."""
        if not self._wanted[index]:
            return sampling
        start = self._starts[index]
        if start >= prompt_tokens:
            raise invalid(
                "logprob_start_len", f"is {start}: allowed is -1 to {prompt_tokens - 1}, inside the prompt"
            )
        return msgspec.structs.replace(
            sampling, return_logprob=True, logprob_start=start, top_logprobs=self._tops[index]
        )


# ---- sequences into answers ---------------------------------------------------------------------


class _NativeShape:
    """`{text, output_ids, meta_info}`; in a stream each event has all of the text and of the ids so far.

    Log probabilities of the prompt never change, so a stream shows them only as soon as they are complete, and in
    its last event, which is the whole answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, indexed: bool, texts: bool) -> None:
        self._tokenizer = tokenizer
        self._indexed = indexed
        self._texts = texts
        self._prompts_shown: set[int] = set()

    def events(self, delta: Delta) -> Iterator[Any]:
        """One event: where the sequence stands now."""
        sequence = delta.sequence
        complete = len(sequence.prompt_logprobs) == sequence.prompt_logprobs_due
        news = complete and sequence.index not in self._prompts_shown
        answer = self.answer(sequence, prompt=news or sequence.done)
        if complete:
            self._prompts_shown.add(sequence.index)
        yield answer | {"index": delta.index} if self._indexed else answer

    def closing(self) -> Iterable[Any]:
        """Nothing more: the last event of each sequence has its finish reason."""
        return ()

    def answer(self, sequence: Sequence, *, prompt: bool = True) -> dict[str, Any]:
        """Where a sequence stands, with or without the log probabilities of its prompt."""
        meta: dict[str, Any] = {
            "id": sequence.ask.rid,
            "finish_reason": _finish_reason(sequence.finish, len(sequence.output_ids)),
            "prompt_tokens": len(sequence.ask.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
            "cached_tokens": sequence.cached_tokens,
            "cached_tokens_details": sequence.cached_tokens_by_tier,
            "num_retractions": sequence.retractions,
            "weight_version": "default",
        }
        if sequence.done:
            meta["e2e_latency"] = sequence.seconds
        if sequence.ask.sampling.return_logprob:
            meta |= self._output_logprobs(sequence)
            if prompt and sequence.ask.sampling.logprob_start >= 0:
                meta |= self._prompt_logprobs(sequence)
        return {"text": sequence.text, "output_ids": sequence.output_ids, "meta_info": meta}

    def _output_logprobs(self, sequence: Sequence) -> dict[str, Any]:
        entries = sequence.output_logprobs
        shown: dict[str, Any] = {
            "output_token_logprobs": [self._triple(entry) for entry in entries],
            "output_token_logprobs_length": len(entries),
        }
        if sequence.ask.sampling.top_logprobs:
            shown["output_top_logprobs"] = [self._tops(entry) for entry in entries]
        return shown

    def _prompt_logprobs(self, sequence: Sequence) -> dict[str, Any]:
        """The first token of a text has no log probability, but its place in the lists."""
        sampling, entries = sequence.ask.sampling, sequence.prompt_logprobs
        first = sequence.ask.prompt_ids[0]
        starts_at_0 = sampling.logprob_start == 0
        head = [[None, first, self._text(first)]] if starts_at_0 else []
        shown: dict[str, Any] = {"input_token_logprobs": head + [self._triple(entry) for entry in entries]}
        if sampling.top_logprobs:
            tops = [self._tops(entry) for entry in entries]
            shown["input_top_logprobs"] = ([None] if starts_at_0 else []) + tops
        return shown

    def _triple(self, entry: TokenLogprob) -> list[Any]:
        return [entry.logprob, entry.token_id, self._text(entry.token_id)]

    def _tops(self, entry: TokenLogprob) -> list[list[Any]]:
        return [[logprob, token_id, self._text(token_id)] for token_id, logprob in entry.top]

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._texts else None


def _finish_reason(finish: FinishReason | None, tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": finish.type, "length": tokens}
