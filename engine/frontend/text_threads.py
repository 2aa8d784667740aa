"""A few threads for work on long texts: tokenising, templates, detokenising a prompt, parsing a large body.

The event loop must answer /health and pass on tokens while such work runs. The number of waiting jobs is bounded;
beyond it a call is refused. Jobs must only touch what never changes (a tokenizer, a compiled template).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engine.frontend import limits
from engine.frontend.errors import ApiError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TextThreads:
    """A bounded pool; used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(limits.TEXT_THREADS, thread_name_prefix="text")
        self._jobs = 0

    async def run(
        self, job: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """The result of `job(...)`, computed in a thread. Raises what it raises; ApiError 429 when too many wait."""
        if self._jobs >= limits.TEXT_JOBS_MAX:
            raise ApiError(
                429, f"{self._jobs} texts wait to be worked on, at most {limits.TEXT_JOBS_MAX} may"
            )
        self._jobs += 1
        future = self._pool.submit(job, *arguments, **named)
        # A caller that gives up leaves its job behind; it counts until it is done.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._job_done))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more jobs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _job_done(self) -> None:
        self._jobs -= 1
