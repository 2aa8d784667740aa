"""One rank from its environment to its exit code: find the others, make links, run the control loop.

Imported only by processes that compute, after the number of threads has been settled, since it imports torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store

from engine.config import EngineConfig
from engine.distributed import parallel_state
from engine.distributed.agreement import Agreement
from engine.distributed.frames import Kind
from engine.distributed.launch import Children, ExitCode, Place, front_socket, read_secret, start_front_end
from engine.distributed.links import Link
from engine.distributed.rendezvous import RankLinks, establish, share_folder
from engine.distributed.run_folder import RunFolder
from engine.faults import read_faults
from engine.leader import Leader
from engine.model.source import ModelSource
from engine.stage import Follower, Stage
from engine.startup import Started, Startup
from engine.topology import Topology
from engine.types import Fatal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where the ranks of this service meet."""

    where: Path | str
    secret: bytes
    address: str
    """To which gloo's sockets are bound."""
    folder: RunFolder | None


def run_rank(
    config: EngineConfig, source: ModelSource, topology: Topology, place: Place, command: list[str]
) -> int:
    """Live as one rank; returns the exit code. `command` starts the front end, should this be torchrun's leader."""
    children: Children | None = None
    if not topology.is_leader:
        # Only the leader turns signals into a drain; the others follow the log, or the end of a link.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    front: socket.socket | None = None
    if topology.is_leader:
        if place.torchrun:
            children = start_front_end(command)
            front = children.front
        else:
            front = front_socket(place)
    try:
        try:
            store = parallel_state.open_store(place)
            meeting = _meet(config, topology, place, store)
            links = (
                establish(topology, meeting.where, store, meeting.secret)
                if store
                else RankLinks({}, None, None)
            )
        except (ValueError, OSError, RuntimeError) as error:
            return _refuse(front, str(error))
        try:
            return _serve(config, source, topology, place, store, meeting.address, links, front)
        finally:
            if meeting.folder is not None:
                meeting.folder.remove()
    finally:
        if children is not None:
            children.wait(5.0)
            children.terminate(1.0)


def _serve(
    config: EngineConfig,
    source: ModelSource,
    topology: Topology,
    place: Place,
    store: Store | None,
    address: str,
    links: RankLinks,
    front: socket.socket | None,
) -> int:
    agreement = Agreement(topology.rank, topology.world_size, links.log)
    faults = read_faults()
    stage = Stage(config, topology, links, agreement, faults)

    def bring_up() -> Started:
        parallel_state.initialize(topology, store, address=address)
        return Startup(config, source, topology, place, agreement, faults).run()

    if front is None:
        return stage.run(Follower(stage), bring_up)
    leader = Leader(stage, Link(front, "the front end"))
    leader.listen_to_signals()
    return stage.run(leader, bring_up)


def _meet(config: EngineConfig, topology: Topology, place: Place, store: Store | None) -> _Meeting:
    """On one machine: a private folder of unix sockets. Over machines: one address of each, and a shared secret."""
    if not place.one_machine or config.link_address is not None:
        if config.link_address is None:
            raise ValueError(
                "--link-address absent: ranks run on several machines, so each needs its own address"
            )
        return _Meeting(config.link_address, read_secret(os.environ), config.link_address, None)
    if place.run_folder is not None:
        folder = RunFolder.open(place.run_folder)
        return _Meeting(folder.path, folder.secret, parallel_state.LOOPBACK, None)
    assert store is not None, "torchrun always brings a store"
    folder = share_folder(store, is_leader=topology.is_leader)
    return _Meeting(folder.path, folder.secret, parallel_state.LOOPBACK, folder)


def _refuse(front: socket.socket | None, message: str) -> int:
    """The rank could not meet the others: the front end, or whoever reads the log, learns why."""
    line = message.splitlines()[0] if message else "the ranks could not meet"
    log.error("%s", line)
    if front is not None:
        body = msgspec.msgpack.encode(Fatal(exit_code=ExitCode.REFUSED, message=line))
        Link(front, "the front end").send(Kind.FATAL, body)
    return ExitCode.REFUSED
