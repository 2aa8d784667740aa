"""From checked requests to text: the one path that both API shapes share.

A call is a unit. Its sequences go to the leader in one message, are accepted or refused together, and when one of
them fails the call fails and the others are aborted. `Generation` is a live call, `Sequence` the truth about one of
its sequences: what was asked, what has been generated, and the text so far. Knows no HTTP and no JSON.

    Ask -> Service.start -> Submit ... Emission -> Sequence.take -> Delta -> an API's shape
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.frontend import limits
from engine.frontend.admission import ModelFacts, SamplingFields, choice_seed, derived_seed
from engine.frontend.detokenizer import NO_STOPS, OutputText, StopStrings
from engine.frontend.errors import CLIENT_GONE, ApiError, invalid
from engine.frontend.link import EngineLink
from engine.frontend.template import TemplateFailure
from engine.frontend.text_threads import TextThreads
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.types import Emission, FinishReason, Request, SamplingParams, TokenLogprob

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sequence that a client wants: checked and complete, but for its seed if the client gave none."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int | None
    stops: StopStrings = NO_STOPS
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    cache_salt: str = ""


def asks_of(
    fields: SamplingFields,
    rids: Iterable[str],
    *,
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    stops: StopStrings,
    cache_salt: str | None,
) -> list[Ask]:
    """The `n` sequences that continue one prompt, one for each of `rids`, alike but for their seeds."""
    return [
        Ask(
            rid=rid,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=choice_seed(fields, choice),
            stops=stops,
            skip_special_tokens=fields.skip_special_tokens is not False,
            no_stop_trim=bool(fields.no_stop_trim),
            cache_salt=cache_salt or "",
        )
        for choice, rid in enumerate(rids)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one sequence gained since the last look."""

    sequence: Sequence
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, if they were asked for."""

    @property
    def index(self) -> int:
        """The sequence's place among those of its call."""
        return self.sequence.index


class Sequence:
    """One sequence of a call, from its request to its last character."""

    def __init__(self, ask: Ask, index: int, request_id: int, tokenizer: Tokenizer) -> None:
        self.ask = ask
        self.index = index
        self.request_id = request_id
        self.output_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.output_logprobs: list[TokenLogprob] = []
        self.cached_tokens = 0
        self.cached_host_tokens = 0
        self.retractions = 0
        self.finish: FinishReason | None = None
        self._text = OutputText(
            tokenizer.plain_piece if ask.skip_special_tokens else tokenizer.piece,
            ask.stops,
            keep_stop=ask.no_stop_trim,
        )
        self._texts: list[str] = []
        self._started = time.monotonic()
        self._ended = self._started

    @property
    def cached_tokens_by_tier(self) -> dict[str, int] | None:
        """Where the cached part of the prompt lay, in tokens; None when nothing was cached."""
        if not self.cached_tokens:
            return None
        return {"device": self.cached_tokens - self.cached_host_tokens, "host": self.cached_host_tokens}

    @property
    def text(self) -> str:
        """All text so far."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    @property
    def prompt_logprobs_due(self) -> int:
        """How many log probabilities of its prompt a sequence gets: the first token of a text has none."""
        sampling = self.ask.sampling
        if not sampling.return_logprob or sampling.logprob_start < 0:
            return 0
        return max(len(self.ask.prompt_ids) - max(sampling.logprob_start, 1), 0)

    @property
    def done(self) -> bool:
        """True once the sequence has ended."""
        return self.finish is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the sequence, if one did."""
        matched = None if self.finish is None else self.finish.matched
        return matched if isinstance(matched, str) else None

    @property
    def seconds(self) -> float:
        """From the request to its end, or to now."""
        return (self._ended if self.done else time.monotonic()) - self._started

    def take(self, emissions: Iterable[Emission]) -> Delta:
        """Add news. Raises ApiError when the news is that the sequence was aborted."""
        texts: list[str] = []
        first = len(self.output_ids)
        for emission in emissions:
            if not self.done:
                texts.append(self._take(emission))
        self._texts += texts
        return Delta(
            sequence=self,
            text="".join(texts),
            token_ids=tuple(self.output_ids[first:]),
            logprobs=tuple(self.output_logprobs[first:]),
        )

    def _take(self, emission: Emission) -> str:
        finish = emission.finish
        if finish is not None and finish.type == "abort":
            raise ApiError(finish.status or 500, finish.message or "the request was aborted")
        if emission.tokens and emission.first_position != len(self.output_ids):
            raise ApiError(
                500,
                f"request {self.ask.rid} got token {emission.first_position} where {len(self.output_ids)} was due",
            )
        delta = self._text.feed(self._visible(emission))
        text, kept = delta.text, len(emission.tokens)
        if delta.matched is not None:
            kept, finish = delta.tokens, FinishReason(type="stop", matched=delta.matched)
        elif finish is not None:
            last = self._text.finish()
            text += last.text
            finish = finish if last.matched is None else FinishReason(type="stop", matched=last.matched)
        self.output_ids += emission.tokens[:kept]
        self.output_logprobs += emission.output_logprobs[:kept]
        self.prompt_logprobs += emission.prompt_logprobs
        if emission.tokens or finish is not None:  # log probabilities of a prompt come without the counts
            self.cached_tokens = emission.cached_tokens
            self.cached_host_tokens = emission.cached_host_tokens
            self.retractions = emission.retractions
        if finish is not None:
            self.finish = finish
            self._ended = time.monotonic()
        return text

    def _visible(self, emission: Emission) -> tuple[int, ...]:
        """The tokens whose text counts. A stop id, like a stop string, is shown only if that was asked for."""
        tokens = emission.tokens
        stop_id = None if emission.finish is None else emission.finish.matched
        return tokens[:-1] if tokens[-1:] == (stop_id,) and not self.ask.no_stop_trim else tokens


class Generation:
    """The live sequences of one call. Whoever starts one closes it, whatever happens."""

    def __init__(self, service: Service, sequences: tuple[Sequence, ...]) -> None:
        self.sequences = sequences
        self.model = service.facts.name
        self._service = service
        self._by_id = {sequence.request_id: sequence for sequence in sequences}
        self._inbox = service.link.submit(service.request(sequence) for sequence in sequences)

    @property
    def done(self) -> bool:
        """True once every sequence has ended."""
        return all(sequence.done for sequence in self.sequences)

    async def next(self) -> list[Delta]:
        """What the sequences gained, once they gained something: one delta for each of those. Raises ApiError.

        A reader that falls behind gets several steps in one delta.
        """
        news: dict[int, list[Emission]] = {}
        for emission in await self._inbox.take():
            news.setdefault(emission.request_id, []).append(emission)
        deltas = []
        for request_id, emissions in news.items():
            sequence = self._by_id[request_id]
            if not sequence.done:
                deltas.append(sequence.take(emissions))
                if sequence.stop_string is not None:
                    self._service.link.finish(request_id, len(sequence.output_ids), sequence.stop_string)
        return deltas

    async def finish(self) -> None:
        """Returns once every sequence has ended. Raises ApiError."""
        while not self.done:
            await self.next()

    def abort(self) -> None:
        """Ask for the end of what still runs; whoever reads this call learns it from `next`."""
        for sequence in self.sequences:
            self._service.link.abort(sequence.request_id, "the request was aborted", CLIENT_GONE)

    def close(self) -> None:
        """Nobody reads this call any more: abort what still runs. Does nothing the second time."""
        for sequence in self.sequences:
            self._service.link.abort(sequence.request_id, "the client is gone", CLIENT_GONE)
            self._service.link.forget(sequence.request_id)
        self._service.release(self)


class Service:
    """What all routes share: the link, the model's facts, its tokenizer, and who is live under which name."""

    def __init__(self, link: EngineLink, facts: ModelFacts, tokenizer: Tokenizer) -> None:
        self.link = link
        self.facts = facts
        self.tokenizer = tokenizer
        self.text_threads = TextThreads()
        self.draining = False
        """Set once the service takes no more requests."""
        self._live: dict[str, Generation] = {}

    def start(self, asks: list[Ask], rid: str | None = None) -> Generation:
        """Send the sequences of one call to the leader. Raises ApiError when the service does not take them.

        `rid` is the client's name for the whole call; each sequence can be aborted by its own name too.
        """
        self.check_open()
        rids = tuple(dict.fromkeys([*([] if rid is None else [rid]), *(ask.rid for ask in asks)]))
        for name in rids:
            if name in self._live:
                raise invalid(
                    "rid", f"is {name!r}, which is still running: allowed is one that is not in use"
                )
        self._check_size(asks)
        sequences = tuple(
            Sequence(ask, index, self.link.take_id(), self.tokenizer) for index, ask in enumerate(asks)
        )
        _check_prompt_logprobs(sequences)
        generation = Generation(self, sequences)
        self._live.update(dict.fromkeys(rids, generation))
        return generation

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A text's ids, made beside the event loop. Raises ApiError 400 when there are none to be had."""
        encode = self.tokenizer.encode
        try:
            return await self.text_threads.run(encode, text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise ApiError(400, str(error)) from None

    async def encode_chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The ids of a chat, in the form its model was trained on. Raises ApiError 400.

        The template writes the special tokens itself, so none are added.
        """
        if self.tokenizer.template is None:
            raise ApiError(
                400, "the model has no chat template; /v1/completions and /generate take plain text"
            )
        try:
            text = await self.text_threads.run(self.tokenizer.template.render, messages)
        except TemplateFailure as error:
            raise ApiError(400, str(error), param="messages") from None
        return await self.encode(text, add_special_tokens=False)

    def check_open(self) -> None:
        """Raises ApiError 503 when no request would be taken."""
        if self.link.ended.done():
            raise ApiError(503, self.link.ended.result().message)
        if self.draining or (self.link.pulse is not None and self.link.pulse.draining):
            raise ApiError(503, "the server is shutting down and takes no more requests")
        if self.link.pulse_age > limits.PULSE_SECONDS_MAX:
            raise ApiError(503, f"the leader has been silent for {self.link.pulse_age:.1f} seconds")
        if self.link.unsent_bytes > limits.UNSENT_BYTES_MAX:
            raise ApiError(503, f"the leader has yet to read {self.link.unsent_bytes} bytes")

    def abort(self, rid: str) -> bool:
        """Abort the call that this name stands for. False when none is live under it."""
        generation = self._live.get(rid)
        if generation is not None:
            generation.abort()
        return generation is not None

    def abort_all(self) -> None:
        """Abort every live call."""
        for generation in dict.fromkeys(self._live.values()):  # a call is live under many names
            generation.abort()

    def request(self, sequence: Sequence) -> Request:
        """What the leader gets to know of a sequence."""
        ask = sequence.ask
        seed = ask.seed
        if seed is None:
            seed = derived_seed(self.facts.random_seed, sequence.request_id)
        return Request(
            request_id=sequence.request_id,
            rid=ask.rid,
            prompt_ids=ask.prompt_ids,
            sampling=msgspec.structs.replace(ask.sampling, seed=seed),
            cache_salt=ask.cache_salt,
        )

    def release(self, generation: Generation) -> None:
        """Free the names of a call."""
        for rid in [rid for rid, live in self._live.items() if live is generation]:
            del self._live[rid]

    def _check_size(self, asks: list[Ask]) -> None:
        prompt_tokens = sum(len(ask.prompt_ids) for ask in asks)
        if prompt_tokens > limits.CALL_PROMPT_TOKENS_MAX:
            raise ApiError(
                400,
                f"the call has {prompt_tokens} prompt tokens: allowed are {limits.CALL_PROMPT_TOKENS_MAX}",
            )
        if len(asks) > self.facts.sequences_max:
            raise ApiError(
                400,
                f"the call has {len(asks)} sequences, but only {self.facts.sequences_max} may run or wait",
            )
        live = self.link.live_count + len(asks)
        if live > self.facts.sequences_max:
            raise ApiError(
                429,
                f"the queue is full: {live} requests would run or wait, at most "
                f"{self.facts.sequences_max} may",
            )


def _check_prompt_logprobs(sequences: Iterable[Sequence]) -> None:
    entries = sum(
        sequence.prompt_logprobs_due * (1 + sequence.ask.sampling.top_logprobs) for sequence in sequences
    )
    if entries > limits.CALL_PROMPT_LOGPROBS_MAX:
        raise ApiError(
            400,
            f"the call asks for {entries} log probabilities of prompt tokens, that is positions from "
            "logprob_start_len (or echo) on, times 1 + top_logprobs_num (or logprobs): allowed are "
            f"{limits.CALL_PROMPT_LOGPROBS_MAX}",
        )
