"""The door: what a request may ask of this model, checked before anything is allocated, and filled with defaults.

Both API shapes lead through here, so that one rule and one message hold for all routes. Pure: knows the agreed
numbers of the service, no link, no clock and no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.frontend import limits
from engine.frontend.bodies import shown
from engine.frontend.errors import invalid
from engine.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below are 0: dividing by them overflows, and all the weight is on the likeliest token anyway."""
DEFAULT_NEW_TOKENS = 128
_MASK = 2**64 - 1

# What one value may be, on every route.
NewTokens = Annotated[int, Meta(ge=1)]
MinTokens = Annotated[int, Meta(ge=0)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=2)]
Choices = Annotated[int, Meta(ge=1, le=limits.CHOICES_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)]
Label = Annotated[str, Meta(max_length=limits.RID_CHARACTERS_MAX)]


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`sampling_params` as a client may send them. None means the default, which the model's makers may have set."""

    max_new_tokens: NewTokens | None = None
    min_new_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: Choices | None = None
    sampling_seed: Seed | None = None
    seed: Seed | None = None
    logit_bias: dict[int, Bias] | None = None
    # Known to clients, not served here: refused unless they say what would happen anyway.
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None

    @property
    def choices(self) -> int:
        """How many sequences continue the prompt."""
        return self.n or 1

    @property
    def explicit_seed(self) -> int | None:
        """The seed the client gave, if any."""
        return self.seed if self.sampling_seed is None else self.sampling_seed


_UNSERVED = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What requests are checked against."""

    name: str
    vocabulary_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    random_seed: int
    """Seeds of requests that bring none are derived from it."""
    suggestions: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults of the model's makers, by the names of `SamplingFields`."""
    capacity_tokens: int
    page_size: int
    sequences_max: int
    """Requests that may be running or waiting at once."""

    def most_new_tokens(self, prompt_tokens: int) -> int:
        """How many tokens an answer to such a prompt can have at most; below 1 if the prompt itself is too long.

        The answer's last token has no KV: ceil((prompt + new - 1) / page) pages must fit.
        """
        by_cache = self.capacity_tokens // self.page_size * self.page_size - prompt_tokens + 1
        return min(self.context_length - prompt_tokens, by_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the fields of one API shape are called, for messages."""

    sampling: str = "sampling_params."
    """Comes before the name of a sampling parameter."""
    prompt: str = "input_ids"
    max_new_tokens: str = "max_new_tokens"


def check_prompt(ids: Iterable[Any], facts: ModelFacts, names: Names) -> tuple[int, ...]:
    """A prompt's ids, if this model knows them all and has room for at least one more token. Raises ApiError."""
    prompt = tuple(ids)
    if not prompt:
        raise invalid(names.prompt, "has no tokens: a prompt needs at least one")
    if set(map(type, prompt)) != {int}:
        wrong = next(token_id for token_id in prompt if type(token_id) is not int)
        raise invalid(names.prompt, f"has {shown(wrong)}: allowed are token ids")
    for token_id in (min(prompt), max(prompt)):
        _check_id(token_id, facts, names.prompt)
    if facts.most_new_tokens(len(prompt)) < 1:
        bound, of_what = facts.context_length, "the context length"
        if len(prompt) < facts.context_length:
            bound, of_what = facts.capacity_tokens, "the cache's capacity"
        raise invalid(
            names.prompt,
            f"has {len(prompt)} tokens and needs room for at least one more, but {of_what} is {bound} tokens",
            code="context_length_exceeded",
        )
    return prompt


def complete(
    fields: SamplingFields,
    *,
    prompt_tokens: int,
    facts: ModelFacts,
    names: Names,
    default_new_tokens: int | None = DEFAULT_NEW_TOKENS,
) -> SamplingParams:
    """Check sampling parameters against the model and fill in defaults; the seed is still 0. Raises ApiError 400.

    `default_new_tokens` None means as many as fit.
    """
    for name in _UNSERVED:
        if getattr(fields, name):
            raise invalid(names.sampling + name, "is not supported; allowed is null")
    new_tokens = _new_tokens(fields.max_new_tokens, prompt_tokens, facts, names, default_new_tokens)
    min_new_tokens = fields.min_new_tokens or 0
    if min_new_tokens > new_tokens:
        raise invalid(
            names.sampling + "min_new_tokens",
            f"is {min_new_tokens}: allowed is at most {names.max_new_tokens}, which is {new_tokens}",
        )
    temperature = _chosen(fields, "temperature", facts, 1.0)
    top_k = int(_chosen(fields, "top_k", facts, -1))
    if fields.top_k == 0:
        raise invalid(names.sampling + "top_k", "is 0: allowed is -1 (no limit) or at least 1")
    return SamplingParams(
        max_new_tokens=new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=top_k if 0 < top_k < facts.vocabulary_size else 0,
        top_p=_chosen(fields, "top_p", facts, 1.0),
        min_p=_chosen(fields, "min_p", facts, 0.0),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=_chosen(fields, "repetition_penalty", facts, 1.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, facts, names),
        stop_token_ids=_stop_token_ids(fields, facts, names),
    )


def usable(suggestions: Mapping[str, float]) -> dict[str, float]:
    """Those of a model's suggested sampling settings that a client might send too; a model file is untrusted."""
    kept = {}
    for name, value in suggestions.items():
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert({name: value}, SamplingFields)
            kept[name] = value
    return kept


def stop_strings(fields: SamplingFields, names: Names) -> tuple[str, ...]:
    """The stop strings of a request. Raises ApiError 400 for empty, too many or too long ones."""
    name = names.sampling + "stop"
    given = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(given) > limits.STOP_STRINGS_MAX:
        raise invalid(name, f"has {len(given)} strings: allowed are {limits.STOP_STRINGS_MAX}")
    if "" in given:
        raise invalid(name, "has an empty string: allowed are strings of at least one character")
    if sum(map(len, given)) > limits.STOP_CHARACTERS_MAX:
        raise invalid(
            name, f"has {sum(map(len, given))} characters in all: allowed are {limits.STOP_CHARACTERS_MAX}"
        )
    return tuple(given)


def choice_seed(fields: SamplingFields, choice: int) -> int | None:
    """The seed of one of the `n` sequences: the client's own for the first, a derived one for each other."""
    seed = fields.explicit_seed
    if seed is None:
        return None
    return seed & _MASK if choice == 0 else derived_seed(seed, choice)


def derived_seed(seed: int, number: int) -> int:
    """64 bits from a seed and a number: output `number` of SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _check_id(token_id: int, facts: ModelFacts, name: str) -> None:
    if not 0 <= token_id < facts.vocabulary_size:
        raise invalid(name, f"has the id {token_id}: allowed is 0 to {facts.vocabulary_size - 1}")


def _new_tokens(
    asked: int | None, prompt_tokens: int, facts: ModelFacts, names: Names, default: int | None
) -> int:
    """An explicit limit that cannot fit is refused with the numbers; an absent one is clipped."""
    most = facts.most_new_tokens(prompt_tokens)
    if asked is None:
        return most if default is None else min(default, most)
    if asked <= most:
        return asked
    total = prompt_tokens + asked
    if total > facts.context_length:
        room = f"{total} together, but the context length is {facts.context_length}"
    else:
        room = f"{total - 1} tokens of cache, but its capacity is {facts.capacity_tokens}"
    raise invalid(
        names.sampling + names.max_new_tokens,
        f"is {asked}: the prompt has {prompt_tokens} tokens, that is {room}; allowed is at most {most}",
        code="context_length_exceeded",
    )


def _chosen(fields: SamplingFields, name: str, facts: ModelFacts, neutral: float) -> float:
    """What the client sent, else what the model's makers suggest, else what changes nothing."""
    sent = getattr(fields, name)
    return float(facts.suggestions.get(name, neutral) if sent is None else sent)


def _logit_bias(
    biases: Mapping[int, float], facts: ModelFacts, names: Names
) -> tuple[tuple[int, float], ...]:
    name = names.sampling + "logit_bias"
    if len(biases) > limits.LOGIT_BIAS_MAX:
        raise invalid(name, f"has {len(biases)} entries: allowed are {limits.LOGIT_BIAS_MAX}")
    for token_id in biases:
        _check_id(token_id, facts, name)
    return tuple(sorted(biases.items()))


def _stop_token_ids(fields: SamplingFields, facts: ModelFacts, names: Names) -> tuple[int, ...]:
    """The client's stop ids and, unless they are ignored, the model's end-of-sequence ids."""
    name = names.sampling + "stop_token_ids"
    given = fields.stop_token_ids or []
    if len(given) > limits.STOP_TOKEN_IDS_MAX:
        raise invalid(name, f"has {len(given)} ids: allowed are {limits.STOP_TOKEN_IDS_MAX}")
    for token_id in given:
        _check_id(token_id, facts, name)
    return tuple(dict.fromkeys([*given, *(() if fields.ignore_eos else facts.eos_ids)]))
