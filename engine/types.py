"""The vocabulary: every value that crosses a process border or joins the pure half to the torch half.

Read this file first. It owns no state. Values that travel on a wire are frozen `msgspec.Struct`s (typed
msgpack, checked when decoded); values that stay inside a rank are frozen dataclasses. Nothing here may
import torch, read a clock or draw a random number.

    front end --Submit/Abort/Finish/Control--> leader --Entry--> every rank --Report--> leader --Emission--> front end
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


class Wire(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Base of all values on a wire: immutable, named fields, tagged with the class name."""


# ---- what a client asks -------------------------------------------------------------------------


class SamplingParams(Wire, frozen=True, kw_only=True):
    """How tokens of one request are chosen. Complete: the front end has filled in every default.

    Floats are carried to the sampler and take part in no scheduling decision.
    """

    max_new_tokens: int
    """Most tokens to generate, counted over the whole life of the request; at least 1."""
    min_new_tokens: int = 0
    """`stop_token_ids` cannot be sampled before this many tokens exist."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request; the model's end-of-sequence ids are among them unless ignored."""
    seed: int = 0
    """64-bit seed; with the position it gives the one random number of each sampled token."""
    return_logprob: bool = False
    logprob_start: int = -1
    """First prompt position whose log probability is wanted; -1 for none. The prefix cache is read only up to here."""
    top_logprobs: int = 0
    """How many alternatives go with each log probability."""


class Request(Wire, frozen=True, kw_only=True):
    """One sequence to generate. Retracted, reset or restarted, it has the same form: prompt plus delivered ids."""

    request_id: int
    """The front end's number for it, never used twice in the life of a service."""
    rid: str
    """The client's name for it, for logs and recordings only."""
    prompt_ids: tuple[int, ...]
    delivered_ids: tuple[int, ...] = ()
    """Tokens already sent to the client by an earlier life of this request; they count towards `max_new_tokens`."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Part of the root key of every cache tier: requests share prefixes only under the same salt."""
    constraint: str | None = None
    """Reserved for a grammar that the output must follow."""


class Submit(Wire, frozen=True, kw_only=True):
    """Front end to leader: requests that are accepted or refused together."""

    requests: tuple[Request, ...]


class Abort(Wire, frozen=True, kw_only=True):
    """End a request now. Its client is gone, asked for it, or ran into a limit of time."""

    request_id: int
    message: str
    status: int = 499
    """HTTP status that goes with the message, should anybody still listen."""


class Finish(Wire, frozen=True, kw_only=True):
    """The front end saw a stop string: the request ends with its first `kept_tokens` generated tokens."""

    request_id: int
    kept_tokens: int
    matched: str


ControlAction = Literal["status", "flush", "drain", "shutdown"]


class Control(Wire, frozen=True, kw_only=True):
    """Something for the service as a whole; `control_id` names the answer."""

    action: ControlAction
    control_id: int


# ---- the log ------------------------------------------------------------------------------------


class RetiredStep(Wire, frozen=True, kw_only=True):
    """A step that the last stage has finished, with one token for each of its spans that samples, in plan order."""

    step: int
    tokens: tuple[int, ...] = ()


class TransferResult(Wire, frozen=True, kw_only=True):
    """The agreed end of a transfer: `ok` only if it went well on every rank."""

    transfer_id: int
    ok: bool


class Entry(Wire, frozen=True, kw_only=True):
    """One record of the log. `Scheduler.apply` takes its fields in the order in which they stand here."""

    step: int
    settled: tuple[TransferResult, ...] = ()
    retired: tuple[RetiredStep, ...] = ()
    finishes: tuple[Finish, ...] = ()
    arrivals: tuple[Request, ...] = ()
    aborts: tuple[Abort, ...] = ()
    controls: tuple[Control, ...] = ()


# ---- what ranks report --------------------------------------------------------------------------


class TokenLogprob(Wire, frozen=True, kw_only=True, array_like=True):
    """Log probability of the token at one position under the model's own distribution, with the likeliest others."""

    position: int
    """Index of the token in prompt + output."""
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), likeliest first."""


class SpanLogprobs(Wire, frozen=True, kw_only=True, array_like=True):
    """Log probabilities that one span of a step produced: prompt positions first, the sampled token last."""

    request_id: int
    prompt: tuple[TokenLogprob, ...] = ()
    output: TokenLogprob | None = None


class FinishedStep(Wire, frozen=True, kw_only=True):
    """The last stage's news of one step. Log probabilities go to the client beside the log, never through it."""

    step: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[SpanLogprobs, ...] = ()


class Report(Wire, frozen=True, kw_only=True):
    """What one rank learnt. It changes nothing until it comes back in an entry."""

    rank: int
    watermark: int
    """Last step whose work this rank has finished."""
    finished: tuple[FinishedStep, ...] = ()
    transfers: tuple[TransferResult, ...] = ()


# ---- from the leader to the front end -----------------------------------------------------------


class FinishReason(Wire, frozen=True, kw_only=True):
    """Why a request ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop token id or stop string, for `stop`."""
    message: str = ""
    status: int = 0
    """HTTP status, for `abort`."""


class Emission(Wire, frozen=True, kw_only=True):
    """News of one request for its client: tokens in order, each once, and at last the reason of the end."""

    request_id: int
    first_position: int
    """How many generated tokens came before these, counted from the request's first life."""
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    """Prompt tokens that this request took from the cache when it was first admitted."""
    cached_host_tokens: int = 0
    """How many of them came back from host memory."""
    retractions: int = 0
    finish: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    output_logprobs: tuple[TokenLogprob, ...] = ()


class Emissions(Wire, frozen=True, kw_only=True):
    """All news of one step."""

    step: int
    emissions: tuple[Emission, ...]


class Refused(Wire, frozen=True, kw_only=True):
    """The leader's inbox answers a submission that it does not take; nothing of it enters the log."""

    request_ids: tuple[int, ...]
    status: int
    message: str


class Books(Wire, frozen=True, kw_only=True):
    """Where the tokens of one tier are: capacity = available + evictable + protected."""

    capacity: int
    available: int
    evictable: int
    protected: int


class StageStatus(Wire, frozen=True, kw_only=True):
    """One rank's answer to a `status` control, taken when it applied that entry."""

    rank: int
    pp_rank: int
    tp_rank: int
    pid: int
    layers: tuple[int, int]
    """[start, end) of the model's layers."""
    bytes_per_token: int
    device: Books
    host: Books | None
    state: Books | None
    running: int
    waiting: int
    step: int
    digest: str
    """16 hexadecimal digits."""
    counters: dict[str, int] = {}
    """Totals since the start, equal on all ranks: finished, retractions, evicted_pages, loaded_pages, ..."""
    bytes_copied: dict[str, int] = {}
    """What this rank has copied between tiers since the start, by kind of transfer."""


class ControlResult(Wire, frozen=True, kw_only=True):
    """The answer to a `Control`."""

    control_id: int
    ok: bool
    message: str = ""
    stages: tuple[StageStatus, ...] = ()


class StageSize(Wire, frozen=True, kw_only=True):
    """One line of the start-up table."""

    rank: int
    pp_rank: int
    tp_rank: int
    host_name: str
    layers: tuple[int, int]
    weight_bytes: int
    bytes_per_token: int
    local_tokens: int
    """Device capacity that this rank could hold, before agreement."""
    agreed_tokens: int
    pool_bytes: int
    host_local_tokens: int = 0
    """Host capacity from this rank's own budget and price, before agreement; 0 without a host tier."""
    host_tokens: int = 0
    host_pool_bytes: int = 0
    machine_available_bytes: int
    """Memory of this rank's machine that was available before anything was loaded."""


class Ready(Wire, frozen=True, kw_only=True):
    """The leader's first word to the front end: what has been agreed. The front end checks requests against it."""

    capacity_tokens: int
    """Device tokens of every rank; also what one request may need at most."""
    max_running_requests: int
    page_size: int
    context_length: int
    chunked_prefill_size: int = 0
    """Most rows of a step that computes a prompt, as it was settled at the start."""
    dtype: str
    kv_cache_dtype: str = ""
    device: str
    threads_per_rank: int = 0
    """CPU threads of the leader; other machines may have others."""
    stages: tuple[StageSize, ...]


class Pulse(Wire, frozen=True, kw_only=True):
    """Heartbeat of the leader to the front end, at least twice a second."""

    stuck: bool
    """Work is pending and no step has retired for longer than the watchdog allows."""
    draining: bool


class Fatal(Wire, frozen=True, kw_only=True):
    """The last word of a service that ends: the process' exit code and the one line that says why."""

    exit_code: int
    message: str


# ---- inside one rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """How the token after a span's last row is chosen. Data only: the sampler adds no randomness of its own."""

    params: SamplingParams
    position: int
    """Index of the new token in prompt + output."""
    random: int
    """64 random bits derived from (seed, position)."""
    banned_ids: tuple[int, ...]
    """Ids that may not be sampled now: the stop ids while fewer than `min_new_tokens` exist."""
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """History for the penalties; both empty when no penalty is set."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, start + count) of one sequence in a step."""

    request_id: int
    start: int
    token_ids: tuple[int, ...]
    """The `count` input ids."""
    pages: tuple[int, ...]
    """Page table of [0, start + count): position p lies in pages[p // page_size], at offset p % page_size."""
    sample: Sample | None = None
    """Set when the last row's logits give a token."""
    logprob_targets: tuple[int, ...] = ()
    """Prompt ids whose log probabilities the last rows of this span give: target j belongs to the row whose
    position is `logprob_start - 1 + j`."""
    logprob_start: int = 0
    """Position of the first target."""
    top_logprobs: int = 0

    @property
    def count(self) -> int:
        """Rows of this span."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """One past the last row's position."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of named pages between two tiers. Ids come from the state machine, so they are the same on every rank."""

    transfer_id: int
    kind: Literal["backup", "load"]
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does. Every rank derives the same plan from the same entry."""

    step: int
    digest: int
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    emissions: tuple[Emission, ...] = ()
    controls: tuple[Control, ...] = ()
    """Controls that took effect in this step, to be answered."""
    control_failures: tuple[ControlResult, ...] = ()
    """Controls that could not take effect, with the reason."""

    @property
    def empty(self) -> bool:
        """True when no rank has anything to compute or copy."""
        return not self.spans and not self.transfers


WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
"""When pages are copied to the host tier: when they are first computed, when their prefix is seen a second time, or
when they are about to be evicted from the device."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The agreed counts from which the pure half is built. Equal on every rank, by the handshake."""

    page_size: int
    device_pages: int
    max_running_requests: int
    chunk_tokens: int
    """Most rows of a step that computes a prompt, though no decode row is put off for it and a prefill always gets
    a page; a whole context when chunked prefill is off."""
    depth: int
    """Most steps in flight."""
    context_length: int
    growth_tokens: int = 64
    """Room that admission leaves to each running sequence, so that the next few steps retract nobody."""
    host_pages: int = 0
    """Pages of the host tier; 0 when there is none."""
    write_policy: WritePolicy = "write_through"
