"""How OpenAI's routes write their answers: whole objects, stream chunks, usage and log probabilities.

Owns the little that a stream must remember between chunks: which choices have begun, and how long their text is.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import Any

from engine.frontend.generation import Delta, Sequence
from engine.frontend.tokenizer import Tokenizer
from engine.types import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all objects of one answer have in common."""

    call_id: str
    model: str
    created: int
    whole: str
    """`object` of an unstreamed answer."""
    chunk: str
    """`object` of a stream's event."""
    choices_per_prompt: int
    usage_last: bool
    """A last event tells the usage."""
    usage_always: bool
    """Every event tells the usage so far."""
    tiers: bool
    """The answer tells, beside the usage, in which tier of the cache each part of the prompt lay."""
    sequences: tuple[Sequence, ...]

    def answer(self, choices: list[Any]) -> dict[str, Any]:
        """A whole answer."""
        return self._object(self.whole, choices) | {"usage": self._usage()} | self._tiers()

    def event(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One event of a stream."""
        event = self._object(self.chunk, [choice])
        return event | {"usage": self._usage()} if self.usage_always else event

    def closing(self) -> Iterator[dict[str, Any]]:
        """The usage at a stream's end, if asked for; it has no choices."""
        if self.usage_last:
            yield self._object(self.chunk, []) | {"usage": self._usage()} | self._tiers()

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _tiers(self) -> dict[str, Any]:
        """SGLang's extension `sglext`, if it was asked for: cached tokens of all prompts by tier."""
        if not self.tiers:
            return {}
        firsts = [one.cached_tokens_by_tier or {} for one in self.sequences[:: self.choices_per_prompt]]
        sums = {tier: sum(one.get(tier, 0) for one in firsts) for tier in ("device", "host")}
        return {"sglext": {"cached_tokens_details": sums}}

    def _usage(self) -> dict[str, Any]:
        """Token counts; a prompt counts once however many choices continue it."""
        firsts = self.sequences[:: self.choices_per_prompt]
        prompt = sum(len(sequence.ask.prompt_ids) for sequence in firsts)
        completion = sum(len(sequence.output_ids) for sequence in self.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in firsts)},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


class ChatShape:
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._begun = [False] * len(envelope.sequences)

    def whole(self) -> dict[str, Any]:
        """The unstreamed answer."""
        return self._envelope.answer(
            [
                {
                    "index": sequence.index,
                    "message": {"role": "assistant", "content": sequence.text, "refusal": None},
                    "logprobs": self._logprobs(sequence, sequence.output_logprobs),
                    "finish_reason": _finish_reason(sequence),
                }
                for sequence in self._envelope.sequences
            ]
        )

    def events(self, delta: Delta) -> Iterator[Any]:
        """The role once, then text as it comes, then the reason of the end."""
        if not self._begun[delta.index]:
            self._begun[delta.index] = True
            yield self._event(delta, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta.sequence, delta.logprobs)
        if delta.text or delta.logprobs:
            yield self._event(delta, {"content": delta.text}, logprobs=logprobs)
        if delta.sequence.done:
            yield self._event(delta, {}, finish_reason=_finish_reason(delta.sequence))

    def closing(self) -> Iterator[Any]:
        """The usage, if asked for."""
        return self._envelope.closing()

    def _event(
        self, delta: Delta, gained: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": delta.index, "delta": gained, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.event(choice)

    def _logprobs(self, sequence: Sequence, entries: Sized[TokenLogprob]) -> dict[str, Any] | None:
        if not sequence.ask.sampling.return_logprob:
            return None
        content = []
        for entry in entries:
            top = [self._entry(token_id, logprob) for token_id, logprob in entry.top]
            content.append(self._entry(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(self._tokenizer.piece(token_id))}


class CompletionShape:
    """`/v1/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, echoes: list[str]) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._echoes = echoes
        """The text of each prompt, if it is to come before the answer; else empty."""
        self._begun = [False] * len(envelope.sequences)
        self._offsets = [0] * len(envelope.sequences)
        """Characters of each choice's tokens so far, for `text_offset`."""

    def whole(self) -> dict[str, Any]:
        """The unstreamed answer."""
        return self._envelope.answer(
            [
                {
                    "index": sequence.index,
                    "text": self._echo(sequence) + sequence.text,
                    "logprobs": self._logprobs(sequence, sequence.output_logprobs, first=True),
                    "finish_reason": _finish_reason(sequence),
                }
                for sequence in self._envelope.sequences
            ]
        )

    def events(self, delta: Delta) -> Iterator[Any]:
        """Text as it comes, the echoed prompt first; the last one has the reason of the end."""
        sequence = delta.sequence
        if not (delta.text or delta.logprobs or sequence.done):
            return
        first = not self._begun[sequence.index]
        self._begun[sequence.index] = True
        yield self._envelope.event(
            {
                "index": sequence.index,
                "text": (self._echo(sequence) if first else "") + delta.text,
                "logprobs": self._logprobs(sequence, delta.logprobs, first=first),
                "finish_reason": _finish_reason(sequence),
            }
        )

    def closing(self) -> Iterator[Any]:
        """The usage, if asked for."""
        return self._envelope.closing()

    def _echo(self, sequence: Sequence) -> str:
        return self._echoes[sequence.index // self._envelope.choices_per_prompt] if self._echoes else ""

    def _logprobs(
        self, sequence: Sequence, entries: Sized[TokenLogprob], *, first: bool
    ) -> dict[str, Any] | None:
        """The log probabilities of some tokens; before the first of them, those of an echoed prompt."""
        if not sequence.ask.sampling.return_logprob:
            return None
        rows: list[tuple[int, float | None, tuple[tuple[int, float], ...]]] = []
        if first and self._echoes:
            rows.append((sequence.ask.prompt_ids[0], None, ()))
            rows += [(entry.token_id, entry.logprob, entry.top) for entry in sequence.prompt_logprobs]
        rows += [(entry.token_id, entry.logprob, entry.top) for entry in entries]
        shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, top in rows:
            token = self._tokenizer.token_text(token_id)
            shown["tokens"].append(token)
            shown["token_logprobs"].append(logprob)
            tops = {self._tokenizer.token_text(other): value for other, value in top}
            shown["top_logprobs"].append(None if logprob is None else tops)
            shown["text_offset"].append(self._offsets[sequence.index])
            self._offsets[sequence.index] += len(token)
        return shown


def _finish_reason(sequence: Sequence) -> str | None:
    """`stop` or `length`; a call that was aborted fails and never comes here."""
    return None if sequence.finish is None else sequence.finish.type
