"""Process groups: the world, the tensor-parallel and the pipeline-parallel groups of this rank, and their store.

This module holds the one module-level variable of the project, the groups of this process, because sizing code
asks `get_pp_group()` and must get an AssertionError before set-up. Groups of one have no torch.distributed group,
and a world of one initialises nothing. Collectives belong to the start and to tensor parallelism; the step loop
never makes one over a PP group. Sockets are bound to one address: loopback, unless ranks are on several machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from engine.distributed.launch import Place
from engine.distributed.run_folder import store_path
from engine.topology import Topology

TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class GroupCoordinator:
    """One group of ranks, seen from this rank."""

    rank_in_group: int
    ranks: tuple[int, ...]
    """World ranks of the members, in the group's order."""
    cpu_group: dist.ProcessGroup | None
    """A gloo group for CPU tensors; None when the group is this rank alone."""

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class _Groups:
    world: GroupCoordinator
    tp: GroupCoordinator
    pp: GroupCoordinator


_groups: _Groups | None = None


def initialize(
    topology: Topology,
    store: Store | None,
    *,
    timeout_s: float = TIMEOUT_S,
    address: str = LOOPBACK,
    epoch: int = 0,
) -> None:
    """Make this rank's groups, together with all other ranks. Once per process, until `destroy`.

    `address` is this machine's, to which gloo's sockets are bound. Raises ValueError when no network interface has it,
    and torch's DistError or RuntimeError when a rank does not come within `timeout_s` (at most 60).
    """
    global _groups
    assert _groups is None, "the groups of this process exist already"
    assert 0 < timeout_s <= TIMEOUT_S, f"{timeout_s} s to make groups; at most {TIMEOUT_S} are allowed"
    if topology.world_size > 1:
        assert store is not None, f"a world of {topology.world_size} ranks needs a store to meet in"
        # gloo takes its address from this variable alone; without it, it would bind what the host name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(address)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"groups/{epoch}", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    size, tp_size = topology.world_size, topology.tp_size
    tp_groups = [tuple(range(start, start + tp_size)) for start in range(0, size, tp_size)]
    pp_groups = [tuple(range(start, size, tp_size)) for start in range(tp_size)]
    _groups = _Groups(
        _coordinator(topology.rank, tuple(range(size)), dist.group.WORLD if size > 1 else None),
        _join(topology.rank, tp_groups, timeout_s),
        _join(topology.rank, pp_groups, timeout_s),
    )


def get_world_group() -> GroupCoordinator:
    """All ranks. Raises AssertionError before `initialize`."""
    assert _groups is not None, "the world group is not initialized"
    return _groups.world


def get_tp_group() -> GroupCoordinator:
    """The ranks of this rank's stage. Raises AssertionError before `initialize`."""
    assert _groups is not None, "the tensor parallel group is not initialized"
    return _groups.tp


def get_pp_group() -> GroupCoordinator:
    """The ranks of all stages with this rank's tp rank, in stage order. Raises AssertionError before `initialize`."""
    assert _groups is not None, "the pipeline parallel group is not initialized"
    return _groups.pp


def destroy() -> None:
    """Forget the groups and close their sockets; without groups it does nothing."""
    global _groups
    _groups = None
    if dist.is_initialized():
        dist.destroy_process_group()


def open_store(place: Place, *, timeout_s: float = TIMEOUT_S) -> Store | None:
    """The store in which the ranks of a service meet: a file in the run folder, or torchrun's; None for a world of one.

    Raises ValueError when torchrun does not offer one: a rank would have to open it on every interface.
    """
    if place.world_size == 1 and not place.torchrun:
        return None
    if place.run_folder is not None:
        store: Store = FileStore(str(store_path(place.run_folder)), place.world_size)
    else:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise ValueError(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must not be set; the ranks share torchrun's own store"
            )
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _join(rank: int, groups: list[tuple[int, ...]], timeout_s: float) -> GroupCoordinator:
    """Make all `groups`, which every rank must do in the same order, and return the one that has this rank."""
    own: GroupCoordinator | None = None
    for ranks in groups:
        group = None
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
        if rank in ranks:
            own = _coordinator(rank, ranks, group)
    assert own is not None, f"rank {rank} is in none of {groups}"
    return own


def _coordinator(rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> GroupCoordinator:
    return GroupCoordinator(ranks.index(rank), ranks, group)


def _interface(address: str) -> str:
    """The network interface that has this address."""
    read_interfaces: Callable[[], dict[str, list[Any]]] = psutil.net_if_addrs
    for name, addresses in read_interfaces().items():
        if any(known.address == address for known in addresses):
            return name
    raise ValueError(f"--link-address {address}: allowed is an address of this machine")
