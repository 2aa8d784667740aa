"""The faked model: what a page holds, what a token is chosen from, and what a request must therefore answer.

Shadow memory: a page holds, per offset, a hash of the prefix that was computed there (the salt included, so that a page
shared across salts is seen). A step first reads what its spans need of earlier steps, then writes all of its
rows, then reads everything again: a span can neither use rows that another span of the same step computes, nor
lose its own to another. The next token is a hash of what was read and of the sampling data in the span, so the right
answer is a pure function of the request and is computed here without any cache, page or batch.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import deque
from dataclasses import dataclass, field

from engine.types import FinishReason, Plan, Request, SamplingParams, Span, Transfer

VOCABULARY = 7
"""Few ids, so that prompts share prefixes by chance and stop tokens come up often."""
_MASK = 2**64 - 1


def extend_chain(chain: int, token_id: int) -> int:
    """The hash of a prefix made longer by one id."""
    return (chain * 6364136223846793005 + 2 * token_id + 1442695040888963407) & _MASK


def random_number(seed: int, position: int) -> int:
    """The random bits of the token at `position`, by the rule of `engine.scheduler.digest`, written a second time."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & _MASK, position), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def choose(
    chain: int,
    params: SamplingParams,
    random: int,
    banned: tuple[int, ...],
    prompt: tuple[int, ...],
    output: tuple[int, ...],
) -> int:
    """The simulated sampler: a pure function of the prefix that was read and of the sampling data."""
    mixed = chain ^ (random if params.temperature else 0) ^ zlib.crc32(repr((prompt, output)).encode())
    token = (mixed * 0x9E3779B97F4A7C15 & _MASK) >> 32
    while token % VOCABULARY in banned:
        token += 1
    return token % VOCABULARY


class Truth:
    """A request's ids so far and the hash of each of their prefixes, kept beside the cluster."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ids: list[int] = []
        self.chains: list[int] = []
        self.first_chain = zlib.crc32(request.cache_salt.encode()) + 1
        self.positions_told: list[int] = []
        for token_id in (*request.prompt_ids, *request.delivered_ids):
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.chains.append(extend_chain(self.chains[-1] if self.chains else self.first_chain, token_id))

    def next_token(self) -> int:
        """What the next token must be, from the request and the ids alone."""
        params, prompt = self.request.sampling, self.request.prompt_ids
        output = tuple(self.ids[len(prompt) :])
        banned = params.stop_token_ids if len(output) < params.min_new_tokens else ()
        plain = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0, 0, 1)
        random = random_number(params.seed, len(self.ids))
        history = ((), ()) if plain else (prompt, output)
        return choose(self.chains[-1], params, random, banned, *history)

    def positions_wanted(self) -> list[int]:
        """Prompt positions whose log probabilities the client asked for."""
        params = self.request.sampling
        if not params.return_logprob or params.logprob_start < 0:
            return []
        return list(range(max(params.logprob_start, 1), len(self.request.prompt_ids)))


def oracle(request: Request) -> tuple[list[int], FinishReason]:
    """All generated ids of a request (delivered ones included) and why it ends, when nobody interferes."""
    truth, params, prompt_length = Truth(request), request.sampling, len(request.prompt_ids)
    token = -1
    while len(truth.ids) - prompt_length < params.max_new_tokens:
        token = truth.next_token()
        truth.append(token)
        if token in params.stop_token_ids:
            return truth.ids[prompt_length:], FinishReason(type="stop", matched=token)
    return truth.ids[prompt_length:], FinishReason(type="length")


class ShadowMemory:
    """One stage's pages in both tiers, and the arithmetic of a step. `reports` on the stage that samples."""

    def __init__(
        self, page_size: int, page_count: int, host_page_count: int = 0, *, reports: bool = True
    ) -> None:
        self.page_size = page_size
        self.pages = [[0] * page_size for _ in range(page_count)]
        self.host_pages = [[0] * page_size for _ in range(host_page_count)]
        self.damaged: set[int] = set()
        self.written: dict[int, tuple[int, int]] = {}
        self._reports = reports

    def begin(self, transfer: Transfer) -> None:
        """A copy begins: from now on its targets hold neither what they held nor what they will."""
        loads = transfer.kind == "load"
        for page in transfer.device_pages if loads else transfer.host_pages:
            (self.pages if loads else self.host_pages)[page] = [-1 - transfer.transfer_id] * self.page_size

    def finish(self, transfer: Transfer, *, damage: bool = False) -> bool:
        """A copy's bytes arrive, those of a backup perhaps damaged; a load that finds damage has failed."""
        for device, host in zip(transfer.device_pages, transfer.host_pages, strict=True):
            if transfer.kind == "backup":
                self.host_pages[host] = list(self.pages[device])
                self.damaged.discard(host)
            elif host in self.damaged:
                return False
            else:
                self.pages[device] = list(self.host_pages[host])
                self.written[device] = (0, 0)
        if damage and transfer.kind == "backup":
            self.host_pages[transfer.host_pages[-1]][0] ^= 1
            self.damaged.add(transfer.host_pages[-1])
        return True

    def run(self, plan: Plan, truths: dict[int, Truth]) -> tuple[int, ...]:
        """Compute a step; returns its sampled tokens."""
        for span in plan.spans:
            self._read(span, truths[span.request_id], span.start)
        for span in plan.spans:
            self._write(span, truths[span.request_id], plan.step)
        tokens = []
        for span in plan.spans:
            truth = truths[span.request_id]
            chain = self._read(span, truth, span.end)
            for page in span.pages:
                step, request_id = self.written[page]
                assert step < plan.step or request_id == span.request_id, (
                    f"step {plan.step}: request {span.request_id} names page {page}, "
                    f"which request {request_id} fills in the same step"
                )
            if self._reports:
                self._tell_positions(span, truth)
            assert (span.sample is not None) == (span.end == len(truth.ids)), "sampled in the wrong place"
            if span.sample is not None:
                sample = span.sample
                assert sample.params == truth.request.sampling and sample.position == span.end
                history = sample.prompt_ids, sample.output_ids
                tokens.append(choose(chain, sample.params, sample.random, sample.banned_ids, *history))
        return tuple(tokens)

    def _write(self, span: Span, truth: Truth, step: int) -> None:
        size, chain = self.page_size, truth.first_chain
        assert span.count > 0 and len(span.pages) == -(-span.end // size), "a page table of the wrong length"
        if span.start:
            chain = self.pages[span.pages[(span.start - 1) // size]][(span.start - 1) % size]
        for position, token_id in enumerate(span.token_ids, start=span.start):
            chain = extend_chain(chain, token_id)
            self.pages[span.pages[position // size]][position % size] = chain
        for page in span.pages[span.start // size :]:
            self.written[page] = step, span.request_id

    def _read(self, span: Span, truth: Truth, end: int) -> int:
        """Read the rows before `end` through the page table; returns the hash of the last."""
        size = self.page_size
        for first in range(0, end, size):
            last, page = min(first + size, end), span.pages[first // size]
            assert self.pages[page][: last - first] == truth.chains[first:last], (
                f"request {span.request_id} finds foreign rows in page {page}, positions {first} to {last}"
            )
        return truth.chains[end - 1] if end else truth.first_chain

    def _tell_positions(self, span: Span, truth: Truth) -> None:
        """Note for which prompt positions this span gives log probabilities."""
        params = truth.request.sampling
        for position, token_id in enumerate(span.logprob_targets, start=span.logprob_start):
            assert span.start <= position - 1 < span.end, f"no row of this span gives position {position}"
            assert token_id == truth.request.prompt_ids[position] and span.top_logprobs == params.top_logprobs
            truth.positions_told.append(position)


@dataclass
class Pins:
    """Which pages steps in flight name: nobody else may write those before the log says that the step retired."""

    page_size: int
    steps: deque[tuple[int, dict[int, int]]] = field(default_factory=deque)
    copies: dict[int, Transfer] = field(default_factory=dict)

    def retire(self, steps: list[int]) -> None:
        for step in steps:
            assert self.steps.popleft()[0] == step

    def settle(self, transfer_ids: list[int]) -> None:
        for transfer_id in transfer_ids:
            del self.copies[transfer_id]

    def plan(self, plan: Plan) -> None:
        """Check a new plan against the steps and copies under way, then pin what it names (0: by several requests)."""
        self._plan_copies(plan)
        named: dict[int, int] = {}
        for span in plan.spans:
            for page in span.pages:
                named[page] = span.request_id if page not in named else 0
        if named:
            self.steps.append((plan.step, named))
        for span in plan.spans:
            for page in span.pages[span.start // self.page_size :]:
                for step, others in self.steps:
                    assert others.get(page, span.request_id) == span.request_id, (
                        f"step {plan.step}: request {span.request_id} writes page {page}, "
                        f"which step {step} names for another and has not retired"
                    )

    def _plan_copies(self, plan: Plan) -> None:
        """No page that a copy writes is named by anybody else, and none that it reads is written."""
        named = {page for _, pages in self.steps for page in pages}
        named |= {page for span in plan.spans for page in span.pages}
        written = {page for span in plan.spans for page in span.pages[span.start // self.page_size :]}
        for transfer in plan.transfers:
            assert transfer.host_pages and len(transfer.host_pages) == len(transfer.device_pages)
            loads = transfer.kind == "load"
            for other in self.copies.values():
                if loads or other.kind == "load":
                    assert not set(transfer.device_pages) & set(other.device_pages), (transfer, other)
                if not loads or other.kind == "backup":
                    assert not set(transfer.host_pages) & set(other.host_pages), (transfer, other)
            self.copies[transfer.transfer_id] = transfer
        begun = [transfer.transfer_id for transfer in plan.transfers]
        for transfer in self.copies.values():
            pages = set(transfer.device_pages)
            if transfer.kind == "load":
                assert not pages & named, (
                    f"step {plan.step}: pages {pages & named} are named while {transfer} fills them"
                )
            elif transfer.transfer_id not in begun:  # A backup of this very plan reads what the plan writes.
                assert not pages & written, (
                    f"step {plan.step}: pages {pages & written} are written while {transfer} reads"
                )
