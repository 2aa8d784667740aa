"""The offline door: `LLM(model).generate(prompts)`, without HTTP, on the same ranks, scheduler and cache.

    from engine.llm import LLM

    with LLM(pp_size=2) as llm:
        for answer in llm.generate(["The capital of France is", "2 + 2 ="], {"max_new_tokens": 8, "temperature": 0}):
            print(answer["text"])

It starts its ranks itself and is their front end; they end with it. Requests are checked and answered by the same code
as `POST /generate`, so parameters, answers and error messages are the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress

import engine
from engine.config import ConfigError, EngineConfig, as_flags, check, check_model
from engine.distributed.launch import Children, start_ranks
from engine.distributed.run_folder import RunFolder
from engine.frontend import native
from engine.frontend.app import FrontEnd
from engine.frontend.errors import ApiError
from engine.frontend.limits import TEXT_JOBS_MAX
from engine.frontend.link import EngineLink
from engine.frontend.tokenizer import Tokenizer
from engine.model.source import open_source, resolve_model
from engine.topology import Topology
from engine.types import Ready

SERVER = Path(engine.__file__).parent.parent / "server.py"
LEAVE_S = 5.0

Prompt = str | Sequence[int]


class LLM:
    """A model on its ranks, for one thread to use. Close it, or use it in a `with`."""

    def __init__(self, model_path: str | None = None, **flags: Any) -> None:
        """Start the ranks and wait until they serve; `flags` are the fields of `EngineConfig`.

        Raises ConfigError for a flag that does not exist or is out of range, ValueError for a model that cannot be
        opened, RuntimeError with the ranks' own line when they refuse to start.
        """
        try:
            self.config = check(EngineConfig(model_path=model_path, **flags))
        except TypeError:
            known = {item.name for item in dataclasses.fields(EngineConfig)}
            wrong = next(name for name in flags if name not in known)
            raise ConfigError(f"{wrong}: no such flag; allowed are the fields of EngineConfig") from None
        source = open_source(resolve_model(model_path), self.config.load_format)
        check_model(self.config, source.spec.context_length)
        topology = Topology.build(
            0,
            tp_size=self.config.tp_size,
            pp_size=self.config.pp_size,
            layer_count=source.spec.layer_count,
            partition=self.config.pp_layer_partition,
        )
        self.tokenizer = Tokenizer.of_source(source)
        self._runner = asyncio.Runner()
        self._folder = RunFolder.create()
        self._children: Children | None = None
        try:
            self._children = start_ranks(
                [sys.executable, str(SERVER), *as_flags(self.config)],
                topology.world_size,
                self._folder.path,
                threads=self.config.threads_per_rank,
            )
            link = self._runner.run(_open(self._children))
            self._front = FrontEnd(self.config, source, self.tokenizer, link)
            self._runner.run(_begin(self._front))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        *,
        progress: bool = True,
        **fields: Any,
    ) -> Any:
        """Answer prompts (texts or lists of ids); one prompt gives one answer, several a list in their order.

        `sampling_params` is one dict for all or one for each prompt, `fields` are further fields of `/generate` that
        hold for all prompts (`return_logprob=True`). Answers have the shape of `/generate`; with `n` > 1 each is a
        list.
        Raises ValueError for what `/generate` would refuse, with its words, and RuntimeError when the ranks are gone.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if single else list(prompts)
        params: list[Any] = [sampling_params] * len(listed)
        if sampling_params is not None and not isinstance(sampling_params, dict):
            params = list(sampling_params)
            if len(params) != len(listed):
                raise ValueError(
                    f"sampling_params: {len(params)} for {len(listed)} prompts; allowed is one for each"
                )
        bodies = [
            {("text" if isinstance(prompt, str) else "input_ids"): prompt, "sampling_params": one, **fields}
            for prompt, one in zip(listed, params, strict=True)
        ]
        answers = self._runner.run(self._answer_all(bodies, progress))
        return answers[0] if single else answers

    @property
    def ready(self) -> Ready:
        """What the ranks agreed at their start: capacities, and a line for each rank."""
        return self._front.link.ready.result()

    def close(self) -> None:
        """End the ranks. Twice does no harm."""
        if self._children is not None:
            self._children.terminate(LEAVE_S)
            self._children = None
        self._folder.remove()
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _answer_all(self, bodies: list[dict[str, Any]], progress: bool) -> list[Any]:
        """All answers, with as many requests under way as the ranks take."""
        # What came while no call ran, like the end of a rank, is heard before anything is sent.
        await asyncio.sleep(0.001)
        try:
            service = self._front.service
        except ApiError as error:
            raise RuntimeError(error.message) from None
        # As many calls at once as the queue takes when each has the most sequences that one of these has, and fewer
        # than the texts that may wait for the tokenizer.
        sequences_most = max((_choices(body) for body in bodies), default=1)
        places = asyncio.Semaphore(
            max(min(service.facts.sequences_max // sequences_most, TEXT_JOBS_MAX // 2), 1)
        )
        console = Console(stderr=True)
        with Progress(console=console, disable=not (progress and console.is_terminal), transient=True) as bar:
            task = bar.add_task("generating", total=len(bodies))

            async def one(body: dict[str, Any]) -> Any:
                async with places:
                    answer = await native.answer(service, native.read_body(body))
                bar.advance(task)
                return answer

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(body)) for body in bodies]
            except* ApiError as failed:
                first = failed.exceptions[0]
                assert isinstance(first, ApiError)
                kind = ValueError if first.status < 500 else RuntimeError
                raise kind(first.message) from None
        return [done.result() for done in tasks]


def _choices(body: dict[str, Any]) -> int:
    """How many sequences a body asks for; what it says wrongly is refused when it is read."""
    params = body["sampling_params"]
    choices = params.get("n") if isinstance(params, dict) else None
    return choices if isinstance(choices, int) and choices > 0 else 1


async def _open(children: Children) -> EngineLink:
    assert children.front is not None
    return await EngineLink.open(children.front)


async def _begin(front: FrontEnd) -> None:
    """Wait until the ranks serve. Raises RuntimeError with their own words if they do not."""
    await asyncio.wait((front.link.ready, front.link.ended), return_when=asyncio.FIRST_COMPLETED)
    if front.link.ended.done():
        raise RuntimeError(front.link.ended.result().message)
    await front.begin()


__all__ = ["LLM"]
