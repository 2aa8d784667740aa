"""The one entry point: flags -> processes -> HTTP front end.

    python server.py --pp-size 2                        this process is the front end and starts the ranks
    torchrun --nproc-per-node 2 server.py --pp-size 2   each process is a rank; the leader starts the front end

Flags are checked, and the model's configuration read, before anything heavy is imported: a wrong value is one line
and exit code 2 at once. Exit codes: 0 drained, 2 usage, 3 refused at start, 70 divergence, 71 a rank was lost.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
from typing import NoReturn

from engine.config import ConfigError, EngineConfig, check_model, parse_flags
from engine.distributed.launch import (
    Children,
    Exit,
    ExitCode,
    Place,
    front_socket,
    hold_lifeline,
    read_place,
    read_secret,
    start_ranks,
    thread_environment,
    threads_per_rank,
)
from engine.distributed.rendezvous import listen
from engine.distributed.run_folder import RunFolder
from engine.faults import read_faults
from engine.model.source import ModelSource, open_source, resolve_model
from engine.topology import Topology
from engine.types import Fatal

WORD_S = 1.0
"""How long after the end of a rank the leader has to say why."""
LEAVE_S = 5.0
"""How long ranks have to leave by themselves once the service is over."""


def main(arguments: list[str]) -> int:
    """Run what this process is, from flags and environment; returns its exit code."""
    try:
        place = read_place(os.environ)
        hold_lifeline(place)
        if place.role != "rank":
            # Until the event loop takes them over: what has been made by then is still cleared away.
            signal.signal(signal.SIGTERM, _stop)
            signal.signal(signal.SIGINT, _stop)
        config = parse_flags(arguments)
        ranks = config.pp_size * config.tp_size
        if place.role == "rank" and place.world_size != ranks:
            raise ConfigError(
                f"--pp-size {config.pp_size}, --tp-size {config.tp_size}: need {ranks} ranks, "
                f"but {place.world_size} were started"
            )
        # What only ranks use is read here too, so that nonsense is refused before anything is started.
        read_faults()
        if config.link_address is not None:
            read_secret(os.environ)
            listen(config.link_address, place.rank)[0].close()
        source = open_source(resolve_model(config.model_path), config.load_format)
        check_model(config, source.spec.context_length)
        topology = Topology.build(
            place.rank,
            tp_size=config.tp_size,
            pp_size=config.pp_size,
            layer_count=source.spec.layer_count,
            partition=config.pp_layer_partition,
        )
    except ValueError as error:
        print(f"server.py: {error}", file=sys.stderr)
        return ExitCode.USAGE
    tag = topology.tag if place.role == "rank" else "[front end]"
    logging.basicConfig(level=config.log_level.upper(), format=f"{tag} %(message)s", stream=sys.stderr)
    if place.role == "rank":
        return _be_rank(config, source, topology, place)
    return _be_front_end(config, source, topology, place)


def _be_rank(config: EngineConfig, source: ModelSource, topology: Topology, place: Place) -> int:
    if place.torchrun:
        os.environ.update(
            thread_environment(threads_per_rank(config.threads_per_rank, place.local_world_size))
        )
    from engine.rank import run_rank  # imports torch, which reads the number of threads

    return run_rank(config, source, topology, place, [sys.executable, *sys.argv])


def _be_front_end(config: EngineConfig, source: ModelSource, topology: Topology, place: Place) -> int:
    from engine.frontend.serve import open_listener, run
    from engine.frontend.table import show_ready
    from engine.frontend.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.of_source(source)
        listener = open_listener(config.host, config.port)
    except ValueError as error:
        print(f"server.py: {error}", file=sys.stderr)
        return ExitCode.USAGE
    if place.role == "front end":
        return _say(run(config, source, tokenizer, front_socket(place), listener, on_ready=show_ready))
    try:
        folder = RunFolder.create()
    except (ValueError, OSError) as error:
        print(f"server.py: {error}", file=sys.stderr)
        return ExitCode.USAGE
    children: Children | None = None
    logging.getLogger(__name__).info(
        "%s: starting %d rank%s", source.name, topology.world_size, "s" * (topology.world_size > 1)
    )
    try:
        children = start_ranks(
            [sys.executable, *sys.argv], topology.world_size, folder.path, threads=config.threads_per_rank
        )
        assert children.front is not None
        watch = functools.partial(_first_exit, children)
        fatal = run(config, source, tokenizer, children.front, listener, on_ready=show_ready, watch=watch)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the end is under way and takes seconds
        if children is not None:
            children.terminate(LEAVE_S)
        folder.remove()
    return _say(fatal)


async def _first_exit(children: Children) -> Fatal:
    """Returns when a rank has ended, a moment later, so that the leader's own word of why comes first.

    A rank that ended by itself did so because it lost the leader: if that one still lives, it is the one to name.
    """
    while not (exits := _untimely(children)):
        await asyncio.sleep(0.1)
    await asyncio.sleep(WORD_S)
    exits = _untimely(children)
    cause = next((one for one in exits if one.signal_name is not None), exits[0])
    message = str(cause)
    if cause.code == ExitCode.RANK_LOST and all(one.name != "rank 0" for one in exits):
        message = f"rank 0 (pid {children.pids['rank 0']}) is silent: {cause}"
    return Fatal(exit_code=ExitCode.RANK_LOST, message=message)


def _untimely(children: Children) -> list[Exit]:
    """Ranks that have ended, but for those that left a drained service."""
    return [one for one in children.exits() if one.code != ExitCode.DRAINED]


def _stop(*_: object) -> NoReturn:
    """A signal during the start: leave by way of every `finally`."""
    raise SystemExit(ExitCode.DRAINED)


def _say(fatal: Fatal) -> int:
    """The line that says why is the last one printed."""
    if fatal.exit_code != ExitCode.DRAINED:
        print(f"server.py: {fatal.message}", file=sys.stderr, flush=True)
    return fatal.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: a compute thread that waits, or a library's atexit hook, must not keep a process that has ended.
    os._exit(code)
