"""The proof of identity between ranks, without sockets: who gets in, who does not, and why."""

import msgspec
import pytest

from engine.distributed import handshake
from engine.distributed.frames import HELLO_BYTES_MAX, Frame, Kind
from engine.distributed.handshake import Answer, HandshakeError, Welcome

SECRET = b"s" * 32


def hello(body):
    return Frame(Kind.HELLO, 0, 0, 0, body)


def accepting(expected=frozenset({(2, "log")}), secret=SECRET, epoch=1, nonce=b"a" * 32):
    talk = handshake.accept(rank=0, epoch=epoch, secret=secret, nonce=nonce, expected=expected)
    return talk, next(talk)


def connecting(secret=SECRET, epoch=1, peer_rank=0, rank=2, purpose="log", nonce=b"c" * 32):
    talk = handshake.connect(
        rank=rank, peer_rank=peer_rank, purpose=purpose, epoch=epoch, secret=secret, nonce=nonce
    )
    assert next(talk) == b""
    return talk


def peer_of(talk, body):
    with pytest.raises(StopIteration) as end:
        talk.send(hello(body))
    return end.value.value


def test_two_ranks_with_one_secret_know_each_other():
    acceptor, challenge = accepting()
    connector = connecting()
    answer = connector.send(hello(challenge))
    peer = peer_of(acceptor, answer)
    assert (peer.rank, peer.purpose) == (2, "log")
    other = peer_of(connector, peer.last_word)
    assert (other.rank, other.purpose, other.last_word) == (0, "log", b"")
    assert max(map(len, (challenge, answer, peer.last_word))) < HELLO_BYTES_MAX


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret": b"t" * 32}, "does not know our secret"),
        ({"rank": 3}, "rank 3 has no log link to make"),
        ({"purpose": "pipe"}, "rank 2 has no pipe link to make"),
    ],
)
def test_the_acceptor_turns_away(change, words):
    acceptor, challenge = accepting()
    answer = connecting(**change).send(hello(challenge))
    with pytest.raises(HandshakeError, match=words):
        acceptor.send(hello(answer))


def test_the_connector_goes_only_where_it_meant_to_go():
    _, challenge = accepting(epoch=2)
    with pytest.raises(HandshakeError, match="rank 0 of epoch 2 answers where rank 0 of epoch 1 should be"):
        connecting().send(hello(challenge))
    _, challenge = accepting()
    with pytest.raises(HandshakeError, match="where rank 1 of epoch 1 should be"):
        connecting(peer_rank=1).send(hello(challenge))


def test_an_acceptor_without_the_secret_is_found_out():
    _, challenge = accepting()
    connector = connecting()
    connector.send(hello(challenge))
    with pytest.raises(HandshakeError, match="rank 0 does not know our secret"):
        connector.send(hello(msgspec.msgpack.encode(Welcome(b"?" * 32))))


def test_the_connectors_own_proof_does_not_serve_as_the_acceptors():
    _, challenge = accepting()
    connector = connecting()
    answer = msgspec.msgpack.decode(connector.send(hello(challenge)), type=Answer)
    with pytest.raises(HandshakeError, match="does not know our secret"):
        connector.send(hello(msgspec.msgpack.encode(Welcome(answer.proof))))


def test_an_old_answer_does_not_serve_again():
    _, challenge = accepting()
    answer = connecting().send(hello(challenge))
    acceptor, _ = accepting(nonce=b"b" * 32)
    with pytest.raises(HandshakeError, match="does not know our secret"):
        acceptor.send(hello(answer))


@pytest.mark.parametrize("field", ["rank", "purpose", "epoch", "nonce"])
def test_every_field_of_an_answer_is_under_the_proof(field):
    acceptor, challenge = accepting(expected=frozenset({(2, "log"), (2, "pipe"), (3, "log")}))
    answer = msgspec.msgpack.decode(connecting().send(hello(challenge)), type=Answer)
    other = {"rank": 3, "purpose": "pipe", "epoch": 2, "nonce": b"x" * 32}[field]
    with pytest.raises(HandshakeError, match="does not know our secret"):
        acceptor.send(hello(msgspec.msgpack.encode(msgspec.structs.replace(answer, **{field: other}))))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.ENTRY, 0, 0, 0, b"\x80"),
        hello(b""),
        hello(b"\xc1"),
        hello(b"\x80\x04."),
        hello(msgspec.msgpack.encode({"rank": 2, "purpose": "log"})),
        hello(
            msgspec.msgpack.encode({"rank": "2", "purpose": "log", "epoch": 1, "nonce": b"", "proof": b""})
        ),
    ],
)
def test_anything_but_a_hello_is_turned_away(frame):
    acceptor, _ = accepting()
    with pytest.raises(HandshakeError):
        acceptor.send(frame)
    with pytest.raises(HandshakeError):
        connecting().send(frame)
