"""A leader for tests of the front end: real frames over a real socket, but the tokens come from a script.

`StubLeader` plays rank 0 in a thread of its own. What it hears is kept in lists that tests read; what it says next
is set by attributes. `front_end` runs the real HTTP server against it in another thread. `byte_tokenizer` makes a
tokenizer whose ids 0..255 are the bytes, so that a script is a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.distributed import frames
from engine.distributed.frames import Kind
from engine.frontend.serve import open_listener, run
from engine.frontend.tokenizer import Tokenizer
from engine.model.source import ModelSource
from engine.model.spec import ModelSpec
from engine.types import (
    Abort,
    Books,
    Control,
    ControlResult,
    Emission,
    Emissions,
    Fatal,
    Finish,
    FinishReason,
    Pulse,
    Ready,
    Refused,
    Request,
    StageStatus,
    Submit,
    TokenLogprob,
)

PATIENCE = 20.0
BOS, EOS = 256, 257
VOCABULARY = 640
Script = Callable[[Request], Sequence[int]]
_HEARD = msgspec.msgpack.Decoder(Submit | Abort | Finish | Control)


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until something holds; fail loudly if it does not."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)


# ---- the leader ---------------------------------------------------------------------------------


class StubLeader:
    """Rank 0 as the front end sees it. Each request gets the tokens of `script(request)`, over and over."""

    def __init__(self, script: Script | str | Sequence[int] = "hello ") -> None:
        if callable(script):
            self.script = script
        else:
            tokens = list(script.encode()) if isinstance(script, str) else list(script)
            self.script = lambda _: tokens
        self.ready = Ready(
            capacity_tokens=4096,
            max_running_requests=8,
            page_size=16,
            context_length=2048,
            dtype="float32",
            device="cpu",
            stages=(),
        )
        self.say_ready = True
        self.running_max = 8
        self.step_seconds = 0.001
        self.tokens_per_step = 1
        self.pulsing = True
        self.stuck = False
        self.busy_flush = False
        self.answer_controls = True
        self.refuse: tuple[int, str] | None = None
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.finishes: list[Finish] = []
        self.controls: list[Control] = []
        self.emitted: dict[int, int] = {}
        self.step = 0
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._draining = False
        self.front, self._socket = socket.socketpair()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._main(),), daemon=True
        )

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """All requests ever submitted."""
        return [request for submit in self.submits for request in submit.requests]

    def start(self) -> StubLeader:
        self._thread.start()
        return self

    def die(self) -> None:
        """Close the link without a word, as a killed process does."""
        self._loop.call_soon_threadsafe(self._writer.close)

    def fatal(self, exit_code: int, message: str) -> None:
        """Say that the service ends."""
        fatal = Fatal(exit_code=exit_code, message=message)
        self._loop.call_soon_threadsafe(self._send, Kind.FATAL, fatal)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(PATIENCE)
        self._socket.close()

    async def _main(self) -> None:
        self._stopped = asyncio.Event()
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        tasks = [asyncio.create_task(work) for work in (self._hear(reader), self._steps(), self._pulses())]
        await self._stopped.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()

    def _send(self, kind: Kind, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():
            self._writer.write(frames.encode(kind, msgspec.msgpack.encode(message)))

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while not self.say_ready:
            await asyncio.sleep(0.005)
        self._send(Kind.MESSAGE, self.ready)
        decoder = frames.Decoder()
        while data := await reader.read(65536):
            for frame in decoder.feed(data):
                self._take(_HEARD.decode(frame.body))

    def _take(self, message: Submit | Abort | Finish | Control) -> None:
        match message:
            case Submit():
                self.submits.append(message)
                if self.refuse is not None:
                    ids = tuple(request.request_id for request in message.requests)
                    self._send(
                        Kind.MESSAGE, Refused(request_ids=ids, status=self.refuse[0], message=self.refuse[1])
                    )
                else:
                    self._waiting.update((request.request_id, request) for request in message.requests)
            case Abort():
                self.aborts.append(message)
                reason = FinishReason(type="abort", message=message.message, status=message.status)
                if self._end(message.request_id):
                    self._emit([Emission(request_id=message.request_id, first_position=0, finish=reason)])
            case Finish():
                self.finishes.append(message)
                self._end(message.request_id)
            case Control():
                self.controls.append(message)
                self._control(message)

    def _control(self, control: Control) -> None:
        if control.action == "drain":
            self._draining = True
        elif self.answer_controls:
            busy = control.action == "flush" and (self.busy_flush or self.live > 0)
            self._send(
                Kind.MESSAGE,
                ControlResult(
                    control_id=control.control_id,
                    ok=not busy,
                    message="requests are running" if busy else "",
                    stages=tuple(map(self._status, range(2))) if control.action == "status" else (),
                ),
            )

    def _status(self, rank: int) -> StageStatus:
        return StageStatus(
            rank=rank,
            pp_rank=rank,
            tp_rank=0,
            pid=100 + rank,
            layers=(rank * 2, rank * 2 + 2),
            bytes_per_token=512,
            device=Books(capacity=4096, available=4000, evictable=96, protected=0),
            host=None,
            state=None,
            running=len(self._running),
            waiting=len(self._waiting),
            step=self.step,
            digest=f"{self.step:016x}",
        )

    def _end(self, request_id: int) -> bool:
        running = self._running.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        return running is not None or waiting is not None

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            while self._waiting and len(self._running) < self.running_max:
                request_id = next(iter(self._waiting))
                self._running[request_id] = self._waiting.pop(request_id)
            self._emit([self._next(request) for request in list(self._running.values())])
            if self._draining and not self.live:
                self._send(Kind.FATAL, Fatal(exit_code=0, message="drained"))

    def _next(self, request: Request) -> Emission:
        """What one step brings a request: the next tokens of its script, and perhaps its end."""
        sampling, script = request.sampling, self.script(request)
        first = self.emitted.get(request.request_id, 0)
        tokens: list[int] = []
        finish = None
        while finish is None and len(tokens) < self.tokens_per_step:
            position = first + len(tokens)
            tokens.append(script[position % len(script)])
            if tokens[-1] in sampling.stop_token_ids and position >= sampling.min_new_tokens:
                finish = FinishReason(type="stop", matched=tokens[-1])
            elif position + 1 >= sampling.max_new_tokens:
                finish = FinishReason(type="length")
        self.emitted[request.request_id] = first + len(tokens)
        if finish is not None:
            self._end(request.request_id)
        length, wanted = len(request.prompt_ids), sampling.return_logprob
        prompt = (
            range(max(sampling.logprob_start, 1), length)
            if sampling.logprob_start >= 0 and first == 0
            else ()
        )
        return Emission(
            request_id=request.request_id,
            first_position=first,
            tokens=tuple(tokens),
            cached_tokens=(length - 1) // 16 * 16,
            cached_host_tokens=16 if length > 64 else 0,
            finish=finish,
            prompt_logprobs=tuple(
                _logprob(p, request.prompt_ids[p], sampling.top_logprobs) for p in prompt if wanted
            ),
            output_logprobs=tuple(
                _logprob(length + first + i, token, sampling.top_logprobs)
                for i, token in enumerate(tokens)
                if wanted
            ),
        )

    def _emit(self, emissions: list[Emission]) -> None:
        self.step += 1
        if emissions:
            self._send(Kind.MESSAGE, Emissions(step=self.step, emissions=tuple(emissions)))

    async def _pulses(self) -> None:
        while True:
            if self.pulsing and self.say_ready:
                pulse = Pulse(stuck=self.stuck, draining=self._draining)
                self._send(Kind.PULSE, pulse)
            await asyncio.sleep(0.1)


def _logprob(position: int, token_id: int, top: int) -> TokenLogprob:
    """A log probability that a test can compute too: minus a hundredth of the position."""
    alternatives = tuple((token_id + i, -position / 100 - i) for i in range(top))
    return TokenLogprob(position=position, token_id=token_id, logprob=-position / 100, top=alternatives)


# ---- the model and the server -------------------------------------------------------------------


def byte_metadata(*, add_bos: bool = False, words: Sequence[str] = ()) -> dict[str, object]:
    """GGUF metadata of a tokenizer: 256 bytes, BOS, EOS, then `words`, up to 640 tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in words]
    tokens = [*letters, "<|bos|>", "<|eos|>", *spelled]
    tokens += [f"<|unused_{i}|>" for i in range(len(tokens), VOCABULARY)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)


def stub_source(
    *, add_bos: bool = False, words: Sequence[str] = (), template: str | None = CHAT_TEMPLATE
) -> ModelSource:
    """A model that has a tokenizer and a shape, but no weights."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        layer_count=4,
        hidden_size=64,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        feed_forward_size=128,
        vocabulary_size=VOCABULARY,
        context_length=2048,
        rope_theta=10000.0,
        norm_epsilon=1e-5,
        tied_embeddings=False,
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        eos_ids=(EOS,),
    )
    return ModelSource(
        path=Path("stub"),
        name="stub",
        spec=spec,
        weight_format="dummy",
        tensors={},
        tokenizer_path=None,
        tokenizer_config={},
        gguf_metadata=byte_metadata(add_bos=add_bos, words=words),
        chat_template=template,
        generation_defaults={},
        fingerprint="",
    )


class FrontEndThread:
    """The real front end in a thread; `code` and `reason` say how it has ended."""

    def __init__(self, leader: StubLeader, source: ModelSource, config: EngineConfig) -> None:
        self.leader = leader
        self.code: int | None = None
        self.reason = ""
        listener = open_listener(config.host, 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        tokenizer = Tokenizer.of_source(source)

        def serve() -> None:
            fatal = run(
                config, source, tokenizer, leader.front, listener, on_ready=lambda ready, url: self._up.set()
            )
            self.code, self.reason = fatal.exit_code, fatal.message

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        if leader.say_ready:
            assert self._up.wait(PATIENCE), "the front end is not up"

    def join(self) -> int:
        """Wait for its end; returns its exit code."""
        self._thread.join(PATIENCE)
        assert self.code is not None, "the front end has not ended"
        return self.code


@contextlib.contextmanager
def front_end(
    leader: StubLeader, *, source: ModelSource | None = None, config: EngineConfig | None = None
) -> Iterator[FrontEndThread]:
    """Run the front end against a leader, for the length of a test."""
    leader.start()
    front = FrontEndThread(leader, source or stub_source(), config or EngineConfig(random_seed=7))
    try:
        yield front
    finally:
        leader.stop()
        front.join()
