"""One request on its way through the scheduler: its ids, its pages, and how far it has come.

Who owns each interval of a sequence of 11 ids, with pages of 4, that found one page in the cache:

    ids        [ 0  1  2  3 | 4  5  6  7 | 8  9 10 ]
    rows       [ cached     | planned, some in flight | not planned (id 10 may just have been sampled)
               0            4            8  9        computed = 9     len(ids) = 11
    pages      [ tree's     | tree's     | own      ]
                                         in_tree = 2 pages: the tree is a holder of these, and so is the sequence

Only the scheduler changes a sequence. A sequence holds every page of its table once, and locks the tree down to
`node`, from its admission until it has ended (or is retracted) and the last step that names it has retired.
"""

from __future__ import annotations

import enum
import zlib

from engine.mem_cache.radix_cache import pack
from engine.mem_cache.tier import Node
from engine.scheduler.digest import random_bits
from engine.types import Request, Sample, Span


class State(enum.Enum):
    """Where a sequence is in its life. ENDED ones are kept until no step in flight names them."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """The state of one request. `number` is its place in the order of arrival."""

    __slots__ = (
        "cached_host_tokens",
        "cached_tokens",
        "computed",
        "deferred",
        "ids",
        "in_flight",
        "in_tree",
        "key",
        "loading",
        "logprob_next",
        "node",
        "number",
        "overtaken",
        "pages",
        "prompt_length",
        "request",
        "retractions",
        "salt",
        "state",
    )

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.number = number
        self.ids = [*request.prompt_ids, *request.delivered_ids]
        self.key = bytearray(pack(self.ids))
        self.prompt_length = len(request.prompt_ids)
        self.salt = request.cache_salt.encode()
        self.state = State.WAITING
        self.computed = 0
        self.pages: list[int] = []
        self.in_tree = 0
        self.node: Node | None = None
        self.in_flight = 0
        self.cached_tokens = -1
        self.cached_host_tokens = 0
        self.loading = 0  # The transfer that brings more of its prefix; no row is planned until then.
        self.retractions = 0
        self.overtaken = 0
        self.deferred = False
        sampling = request.sampling
        wants_prompt = sampling.return_logprob and sampling.logprob_start >= 0
        self.logprob_next = max(sampling.logprob_start, 1) if wants_prompt else self.prompt_length

    @property
    def generated(self) -> int:
        """Tokens generated so far, those of earlier lives included."""
        return len(self.ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Rows whose ids are known and that no step computes yet. 0: the next id is being sampled."""
        return len(self.ids) - self.computed

    @property
    def rows_max(self) -> int:
        """The rows this sequence can have at most: the last id of an answer is never computed."""
        return self.prompt_length + self.request.sampling.max_new_tokens - 1

    def facts(self) -> tuple[int, ...]:
        """Everything of the request that decides anything in the scheduler, for the digest."""
        sampling = self.request.sampling
        ids = self.prompt_length, len(self.ids), zlib.crc32(self.key), zlib.crc32(self.salt)
        limits = sampling.max_new_tokens, sampling.min_new_tokens, self.logprob_next
        stops = len(sampling.stop_token_ids), *sampling.stop_token_ids
        return self.request.request_id, *ids, *limits, *stops

    def append(self, token_id: int) -> None:
        """Take a sampled token."""
        self.ids.append(token_id)
        self.key += pack((token_id,))

    def found(self, host_tokens: int) -> None:
        """Note, once in a life, how much came from the cache: `computed` rows, the last `host_tokens` by a copy."""
        if self.cached_tokens < 0:
            self.cached_tokens = min(self.computed, self.prompt_length)
            self.cached_host_tokens = max(self.cached_tokens - (self.computed - host_tokens), 0)

    def cache_pages_max(self, page_size: int) -> int:
        """How many pages may come from the cache: one row at least must run, and rows whose log probabilities
        are still owed must run too (the row before position p gives the log probability of p)."""
        rows = len(self.ids) - 1
        if self.logprob_next < self.prompt_length:
            rows = min(rows, self.logprob_next - 1)
        return rows // page_size

    def advance(self, count: int) -> Span:
        """Plan the next `count` rows. The page table covers them already."""
        start, end = self.computed, self.computed + count
        assert end <= len(self.ids), f"rows up to {end} planned, but only {len(self.ids)} ids are known"
        self.computed = end
        self.in_flight += 1
        first_target = max(start + 1, self.logprob_next)
        targets = tuple(self.ids[first_target : min(end + 1, self.prompt_length)])
        self.logprob_next += len(targets)
        return Span(
            request_id=self.request.request_id,
            start=start,
            token_ids=tuple(self.ids[start:end]),
            pages=tuple(self.pages),
            sample=self._sample() if end == len(self.ids) else None,
            logprob_targets=targets,
            logprob_start=first_target if targets else 0,
            top_logprobs=self.request.sampling.top_logprobs,
        )

    def _sample(self) -> Sample:
        """How the next id is chosen. The history goes along only where a penalty needs it."""
        params, position = self.request.sampling, len(self.ids)
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
        return Sample(
            params=params,
            position=position,
            random=random_bits(params.seed, position),
            banned_ids=params.stop_token_ids if self.generated < params.min_new_tokens else (),
            prompt_ids=self.request.prompt_ids if penalised else (),
            output_ids=tuple(self.ids[self.prompt_length :]) if penalised else (),
        )
