"""How the ranks of one service find and recognise each other: addresses in a store, then an authenticated link each.

Every rank publishes where it listens (a unix socket in the run folder, or one TCP address), reaches the ranks it
owes a link, and lets in those that owe one to it: a log link between the leader and every rank, a pipe link
between neighbouring stages. Strangers are read at most one small frame at a time, for at most five seconds, beside
all others; they get no link and disturb none. Listening ends when all have met. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from engine.distributed import handshake
from engine.distributed.frames import HELLO_BYTES_MAX, Decoder, FrameError, Kind, encode
from engine.distributed.handshake import NONCE_BYTES, Handshake, HandshakeError, Peer, Purpose
from engine.distributed.links import Link
from engine.distributed.run_folder import SOCKET_PATH_BYTES_MAX, RunFolder, check_private, socket_path
from engine.topology import Topology

TIMEOUT_S_MAX = 60.0
HANDSHAKE_S = 5.0
FOLDER_KEY = "run_folder"
RETRY_S, RETRY_S_MAX = 0.05, 1.0
STRANGERS_MAX = 64
"""Most connections that are not authenticated yet; one more, and the oldest has to go."""
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
"""Room in the kernel for a hidden state of 512 rows of 2,048 fp32 numbers; the kernel may grant less."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is needed of a key-value store that all ranks share; stores of torch.distributed fit."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """A value that has been published."""

    def check(self, keys: list[str], /) -> bool:
        """True when all keys have been published; never waits."""


class RanksMissing(ConnectionError):
    """Not all ranks came together in time. The text is one line that names who is missing."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """The links of one rank, authenticated and not yet watched by any poller."""

    log: dict[int, Link]
    """By the peer's rank: on the leader one for every other rank, elsewhere only the leader's."""
    previous: Link | None
    """The pipe from the previous stage's rank of the same tp rank; hidden states come in here."""
    next: Link | None
    """The pipe to the next stage's rank of the same tp rank."""

    @property
    def all(self) -> tuple[Link, ...]:
        """Every link once."""
        return (*self.log.values(), *(link for link in (self.previous, self.next) if link is not None))


def establish(
    topology: Topology,
    where: Path | str,
    store: Store,
    secret: bytes,
    *,
    epoch: int = 0,
    timeout_s: float = TIMEOUT_S_MAX,
) -> RankLinks:
    """Meet the other ranks; returns this rank's links. A world of one has none, and touches neither store nor socket.

    `where` is the run folder (a Path: unix sockets) or this machine's address (a text: TCP, port chosen by the
    kernel). Raises RanksMissing after `timeout_s` (at most 60), PermissionError for a run folder that is open to
    others, ValueError for an address that cannot be bound.
    """
    assert 0 < timeout_s <= TIMEOUT_S_MAX, f"{timeout_s} s to meet; at most {TIMEOUT_S_MAX} are allowed"
    if topology.world_size == 1:
        return RankLinks({}, None, None)
    with _Meeting(topology, where, store, secret, epoch) as meeting:
        return meeting.run(time.monotonic() + timeout_s, timeout_s)


def share_folder(store: Store, *, is_leader: bool, timeout_s: float = TIMEOUT_S_MAX) -> RunFolder:
    """Under torchrun on one machine: the leader makes the run folder and says where, the others enter it.

    The store is open to anybody on this machine, so it carries no secret: that lies in the folder, and a folder
    that is not ours alone is refused. Raises RanksMissing or PermissionError.
    """
    if is_leader:
        folder = RunFolder.create()
        store.set(FOLDER_KEY, str(folder.path))
        return folder
    deadline = time.monotonic() + timeout_s
    while not store.check([FOLDER_KEY]):
        if time.monotonic() >= deadline:
            raise RanksMissing(f"rank 0 has not shown up within {timeout_s:g} s")
        time.sleep(RETRY_S)
    return RunFolder.open(Path(store.get(FOLDER_KEY).decode()))


def listen(where: Path | str, rank: int) -> tuple[socket.socket, str]:
    """A listening socket and the address under which `dial` finds it: `unix:PATH` or `tcp:HOST:PORT`."""
    if isinstance(where, Path):
        check_private(where)
        path = socket_path(where, rank)
        if len(str(path).encode()) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"run folder {where}: unix sockets need a shorter path")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        address = f"unix:{path}"
    else:
        listener = _tcp_socket(where)
        _tune(listener)
        try:
            listener.bind((where, 0))
        except OSError as error:
            listener.close()
            raise ValueError(
                f"--link-address {where}: {error.strerror}; allowed is an address of this machine"
            ) from None
        address = f"tcp:{where}:{listener.getsockname()[1]}"
    listener.listen(STRANGERS_MAX)
    listener.setblocking(False)
    return listener, address


def dial(address: str) -> socket.socket:
    """A socket on its way to `address`; whether it gets there shows when it is read. Raises OSError or ValueError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = rest
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        connection = _tcp_socket(host)
        target = (host, int(port))
    else:
        raise ValueError(f"an address {address!r} is neither unix: nor tcp:")
    _tune(connection)
    connection.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(target)
    except OSError:
        connection.close()
        raise
    return connection


def _tcp_socket(host: str) -> socket.socket:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ValueError(f"--link-address {host}: allowed is one numeric address, such as 10.0.0.5") from None
    return socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)


def _tune(sock: socket.socket) -> None:
    """Room for hidden states, no delay for small frames, and a peer that vanished is noticed by TCP as well."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


class _Attempt:
    """A connection under way to become a link."""

    def __init__(self, sock: socket.socket, talk: Handshake, target: tuple[int, Purpose] | None) -> None:
        """`target` is whom we dialled; None for a stranger who dialled us."""
        sock.setblocking(False)
        self.sock = sock
        self.talk = talk
        self.target = target
        self.decoder = Decoder(HELLO_BYTES_MAX)
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.say(next(talk))

    def say(self, body: bytes) -> None:
        """Send a HELLO frame. A fresh socket takes a small frame whole; one that does not is no use."""
        data = encode(Kind.HELLO, body) if body else b""
        if data and self.sock.send(data) != len(data):
            raise HandshakeError("a peer does not read")

    def hear(self) -> Peer | None:
        """Take in what came, never past the frame in progress; the peer, once it is known."""
        data = self.sock.recv(self.decoder.wanted)
        if not data:
            raise HandshakeError("it closed the connection during the handshake")
        for frame in self.decoder.feed(data):
            try:
                self.say(self.talk.send(frame))
            except StopIteration as end:
                peer: Peer = end.value
                self.say(peer.last_word)
                return peer
        return None


class _Meeting:
    """The state of `establish`."""

    def __init__(
        self, topology: Topology, where: Path | str, store: Store, secret: bytes, epoch: int
    ) -> None:
        self._topology = topology
        self._store = store
        self._secret = secret
        self._epoch = epoch
        self._links: dict[tuple[int, Purpose], Link] = {}
        self._attempts: list[_Attempt] = []
        self._troubles: dict[int, str] = {}
        """Why the latest attempt to reach a rank failed."""
        self._turned_away = ""
        """Why the latest stranger was turned away."""
        self._pause_s = RETRY_S
        """Until the next round of dialling; longer with every round, since a refusal seldom heals."""
        self._dial_at = 0.0
        self._to_accept: set[tuple[int, Purpose]] = set()
        self._to_reach: set[tuple[int, Purpose]] = set()
        if topology.is_leader:
            self._to_accept |= {(rank, "log") for rank in range(1, topology.world_size)}
        else:
            self._to_reach.add((0, "log"))
        if topology.next_rank is not None:
            self._to_accept.add((topology.next_rank, "pipe"))
        if topology.previous_rank is not None:
            self._to_reach.add((topology.previous_rank, "pipe"))
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        address = "none"
        if self._to_accept:
            self._listener, address = listen(where, topology.rank)
            self._selector.register(self._listener, selectors.EVENT_READ)
        store.set(self._key(topology.rank), address)

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything that is no link; links too, if we leave without them."""
        for attempt in list(self._attempts):
            self._end(attempt)
        self._selector.close()
        if self._listener is not None:
            path = self._listener.getsockname()
            self._listener.close()
            if isinstance(path, str):
                Path(path).unlink(missing_ok=True)
        if kind is not None:
            for link in self._links.values():
                link.close()

    def run(self, deadline: float, timeout_s: float) -> RankLinks:
        """Listen and dial until every link is made."""
        while self._to_accept or self._to_reach:
            now = time.monotonic()
            if now >= deadline:
                raise RanksMissing(self._who_is_missing(timeout_s))
            for attempt in [one for one in self._attempts if now >= one.deadline]:
                self._give_up(attempt, f"no end of the handshake within {HANDSHAKE_S:.0f} s")
            if now >= self._dial_at:
                self._dial_all()
                self._dial_at = now + self._pause_s
            for key, _ in self._selector.select(RETRY_S):
                if key.data is None:
                    self._let_in()
                elif key.data in self._attempts:
                    self._listen_to(key.data)
        topology = self._topology
        before, after = topology.previous_rank, topology.next_rank
        return RankLinks(
            {rank: link for (rank, purpose), link in sorted(self._links.items()) if purpose == "log"},
            None if before is None else self._links[before, "pipe"],
            None if after is None else self._links[after, "pipe"],
        )

    def _key(self, rank: int) -> str:
        return f"links/{self._epoch}/{rank}"

    def _dial_all(self) -> None:
        """Start an attempt at every rank that is still to be reached and has said where it is."""
        if self._troubles:
            self._pause_s = min(2 * self._pause_s, RETRY_S_MAX)
        busy = {attempt.target for attempt in self._attempts}
        for rank, purpose in sorted(self._to_reach - busy):
            if not self._store.check([self._key(rank)]):
                continue
            address = self._store.get(self._key(rank)).decode(errors="replace")
            talk = handshake.connect(
                rank=self._topology.rank,
                peer_rank=rank,
                purpose=purpose,
                epoch=self._epoch,
                secret=self._secret,
                nonce=secrets.token_bytes(NONCE_BYTES),
            )
            try:
                self._begin(dial(address), talk, (rank, purpose))
            except (OSError, ValueError) as error:
                self._troubles[rank] = str(error)

    def _let_in(self) -> None:
        """Take the next stranger from the listening socket."""
        assert self._listener is not None, "a listening socket woke us, but there is none"
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        strangers = [attempt for attempt in self._attempts if attempt.target is None]
        if len(strangers) >= STRANGERS_MAX:
            self._give_up(strangers[0], "too many strangers at once")
        talk = handshake.accept(
            rank=self._topology.rank,
            epoch=self._epoch,
            secret=self._secret,
            nonce=secrets.token_bytes(NONCE_BYTES),
            expected=self._to_accept,
        )
        with contextlib.suppress(OSError):
            _tune(sock)
            self._begin(sock, talk, None)

    def _begin(self, sock: socket.socket, talk: Handshake, target: tuple[int, Purpose] | None) -> None:
        try:
            attempt = _Attempt(sock, talk, target)
        except OSError:
            sock.close()
            raise
        self._attempts.append(attempt)
        self._selector.register(sock, selectors.EVENT_READ, attempt)

    def _listen_to(self, attempt: _Attempt) -> None:
        """One read from one attempt."""
        try:
            peer = attempt.hear()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, FrameError) as error:
            self._give_up(attempt, str(error))
            return
        if peer is None:
            return
        self._selector.unregister(attempt.sock)
        self._attempts.remove(attempt)
        self._to_accept.discard((peer.rank, peer.purpose))
        self._to_reach.discard((peer.rank, peer.purpose))
        self._links[peer.rank, peer.purpose] = Link(attempt.sock, f"rank {peer.rank}")

    def _give_up(self, attempt: _Attempt, reason: str) -> None:
        if attempt.target is None:
            if reason != self._turned_away:
                log.warning("a connection to rank %d was turned away: %s", self._topology.rank, reason)
            self._turned_away = reason
        else:
            self._troubles[attempt.target[0]] = reason
        self._end(attempt)

    def _end(self, attempt: _Attempt) -> None:
        self._selector.unregister(attempt.sock)
        self._attempts.remove(attempt)
        attempt.talk.close()
        attempt.sock.close()

    def _who_is_missing(self, timeout_s: float) -> str:
        """One line: the ranks that have published nothing, else those whose link is not made, each with the reason."""
        others = [rank for rank in range(self._topology.world_size) if rank != self._topology.rank]
        missing = {rank: "has not shown up" for rank in others if not self._store.check([self._key(rank)])}
        if not missing:
            missing = {rank: "has made no link" for rank, _ in sorted(self._to_accept)}
            missing |= {
                rank: f"cannot be reached ({self._troubles.get(rank, 'it does not answer')})"
                for rank, _ in sorted(self._to_reach)
            }
        told = "; ".join(f"rank {rank} {reason}" for rank, reason in missing.items())
        if self._turned_away:
            told += f"; the latest connection from elsewhere was turned away: {self._turned_away}"
        return f"rank {self._topology.rank} waited {timeout_s:g} s for other ranks: {told}"
