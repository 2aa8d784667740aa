"""How two ranks prove to each other who they are, before anything else is read. Sans-IO: no sockets, no clock.

    acceptor  -> connector   Challenge(rank, epoch, nonce)
    connector -> acceptor    Answer(rank, purpose, epoch, nonce, proof)     the connector proves itself first, so that
    acceptor  -> connector   Welcome(proof)                                 a stranger gets no proof to guess on

A proof is HMAC-SHA256 under the shared secret over the prover's role and everything said so far, so it can be
neither replayed (fresh nonces) nor sent back (roles). It authenticates the peer at this moment; what follows on
the connection is neither encrypted nor signed, so between machines the network must be trusted or tunnelled.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Generator, Set
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from engine.distributed.frames import Frame, Kind

Purpose = Literal["log", "pipe"]
"""What a link between two ranks is for: entries and reports, or hidden states."""

NONCE_BYTES = 32


class HandshakeError(ConnectionError):
    """The peer is not who it must be. The text says in what."""


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptor's first word."""

    rank: int
    epoch: int
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connector's answer."""

    rank: int
    purpose: Purpose
    epoch: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptor's proof; from here on the connection is a link."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """The authenticated other end."""

    rank: int
    purpose: Purpose
    last_word: bytes = b""
    """Body of the HELLO frame that is still owed to it; empty for none."""


Handshake = Generator[bytes, Frame, Peer]
"""Yields bodies of HELLO frames to send (empty: nothing to say yet), is sent the peer's frames, returns the peer."""


def accept(
    *, rank: int, epoch: int, secret: bytes, nonce: bytes, expected: Set[tuple[int, Purpose]]
) -> Handshake:
    """The acceptor's side. `expected` are the (rank, purpose) that may still come, asked at the last moment, since
    others come meanwhile. Raises HandshakeError."""
    challenge = Challenge(rank, epoch, nonce)
    answer = _read((yield msgspec.msgpack.encode(challenge)), Answer)
    if not hmac.compare_digest(answer.proof, _proof(secret, "connector", challenge, answer)):
        raise HandshakeError("a peer does not know our secret")
    if answer.epoch != epoch:
        raise HandshakeError(f"rank {answer.rank} lives in epoch {answer.epoch}, not {epoch}")
    if (answer.rank, answer.purpose) not in expected:
        raise HandshakeError(
            f"rank {answer.rank} has no {answer.purpose} link to make here, or has it already"
        )
    welcome = Welcome(_proof(secret, "acceptor", challenge, answer))
    return Peer(answer.rank, answer.purpose, msgspec.msgpack.encode(welcome))


def connect(
    *, rank: int, peer_rank: int, purpose: Purpose, epoch: int, secret: bytes, nonce: bytes
) -> Handshake:
    """The connector's side, sure of whom it means to reach. Raises HandshakeError."""
    challenge = _read((yield b""), Challenge)
    if len(challenge.nonce) != NONCE_BYTES:
        raise HandshakeError(f"a challenge of {len(challenge.nonce)} bytes; {NONCE_BYTES} are right")
    if (challenge.rank, challenge.epoch) != (peer_rank, epoch):
        raise HandshakeError(
            f"rank {challenge.rank} of epoch {challenge.epoch} answers "
            f"where rank {peer_rank} of epoch {epoch} should be"
        )
    unproved = Answer(rank, purpose, epoch, nonce, b"")
    answer = msgspec.structs.replace(unproved, proof=_proof(secret, "connector", challenge, unproved))
    welcome = _read((yield msgspec.msgpack.encode(answer)), Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(secret, "acceptor", challenge, answer)):
        raise HandshakeError(f"rank {peer_rank} does not know our secret")
    return Peer(peer_rank, purpose)


def _proof(secret: bytes, role: str, challenge: Challenge, answer: Answer) -> bytes:
    """HMAC over role and transcript; the answer's own proof is left out, since it comes of this."""
    said = msgspec.msgpack.encode((role, challenge, msgspec.structs.replace(answer, proof=b"")))
    return hmac.new(secret, b"lockstep link 1 " + said, hashlib.sha256).digest()


_Said = TypeVar("_Said", Challenge, Answer, Welcome)


def _read(frame: Frame, form: type[_Said]) -> _Said:
    """The body of a HELLO frame. Raises HandshakeError if it is something else."""
    if frame.kind is not Kind.HELLO:
        raise HandshakeError(f"a {frame.kind.name} frame came where a HELLO was due")
    try:
        return msgspec.msgpack.decode(frame.body, type=form)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"a HELLO frame is not a {form.__name__}: {error}") from None
