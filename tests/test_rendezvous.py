"""How ranks meet: everyone gets the right links, the missing are named, strangers get nothing and disturb nobody."""

import contextlib
import os
import pickle
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from engine.distributed.frames import Kind, encode
from engine.distributed.links import Poller
from engine.distributed.rendezvous import RanksMissing, dial, establish, listen, share_folder
from engine.distributed.run_folder import RunFolder
from engine.topology import Topology

SECRET = b"s" * 32


class DictStore:
    """A store within one process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def topology(rank, pp_size, tp_size=1):
    return Topology.build(rank, tp_size=tp_size, pp_size=pp_size, layer_count=pp_size)


def meet(pp_size, tp_size, where, store, **options):
    """Every rank in a thread of its own; their links, or what they raised."""
    secrets = options.pop("secrets", {})

    def one(rank):
        try:
            secret = secrets.get(rank, SECRET)
            return establish(topology(rank, pp_size, tp_size), where, store, secret, **options)
        except ConnectionError as error:
            return error

    with ThreadPoolExecutor(pp_size * tp_size) as pool:
        return list(pool.map(one, range(pp_size * tp_size)))


def close(all_links):
    for links in all_links:
        for link in links.all:
            link.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_every_rank_gets_a_log_link_to_the_leader_and_pipes_to_its_neighbours(kind, folder):
    # pp 3 x tp 2: ranks 0 1 | 2 3 | 4 5.
    all_links = meet(3, 2, folder if kind == "unix" else "127.0.0.1", DictStore())
    assert sorted(all_links[0].log) == [1, 2, 3, 4, 5]
    for rank, links in enumerate(all_links):
        for link in links.all:
            link.send(Kind.AGREE, bytes([rank]))
    for rank, links in enumerate(all_links):
        if rank:
            assert sorted(links.log) == [0] and links.log[0].name == "rank 0"
        heard = {}
        with contextlib.closing(Poller()) as poller:
            for link in links.all:
                poller.add(link)
            while len(heard) < len(links.all):
                heard |= {event.link: event.frame.body[0] for event in poller.poll(5)}
            expected = {link: peer for peer, link in links.log.items()}
            if rank >= 2:
                expected[links.previous] = rank - 2
            else:
                assert links.previous is None
            if rank < 4:
                expected[links.next] = rank + 2
            else:
                assert links.next is None
            assert heard == expected
    assert list(folder.iterdir()) == [], "a listening socket was left behind"


def test_a_world_of_one_touches_nothing():
    links = establish(topology(0, 1), "no address", None, b"")
    assert links.all == ()


def test_missing_ranks_are_named(folder):
    # The documented limit is 60 s; 0.4 s here.
    store = DictStore()
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(establish, topology(rank, 4), folder, store, SECRET, timeout_s=0.4) for rank in (0, 2)
        ]
    for rank, run in zip((0, 2), runs, strict=True):
        with pytest.raises(RanksMissing) as raised:
            run.result()
        assert str(raised.value) == (
            f"rank {rank} waited 0.4 s for other ranks: rank 1 has not shown up; rank 3 has not shown up"
        )
    assert list(folder.iterdir()) == []


def test_a_rank_with_another_secret_gets_no_link(folder):
    results = meet(2, 1, folder, DictStore(), secrets={1: b"t" * 32}, timeout_s=0.5)
    assert [str(result) for result in results] == [
        "rank 0 waited 0.5 s for other ranks: rank 1 has made no link; "
        "the latest connection from elsewhere was turned away: a peer does not know our secret",
        "rank 1 waited 0.5 s for other ranks: rank 0 cannot be reached (it closed the connection during the handshake)",
    ]


def test_another_epoch_is_another_service(folder):
    store = DictStore()
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(establish, topology(rank, 2), folder, store, SECRET, epoch=rank, timeout_s=0.4)
            for rank in (0, 1)
        ]
    for run in runs:
        with pytest.raises(RanksMissing, match="has not shown up"):
            run.result()


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_strangers_get_nothing_and_disturb_nobody(tmp_path):
    # sglang#21435: bytes from anybody who reaches an internal port must never be unpickled, or stop the service.
    marker = tmp_path / "marker"
    noises = [
        pickle.dumps(Marker(str(marker))),
        random.Random(1).randbytes(65536),
        encode(Kind.HELLO, pickle.dumps(Marker(str(marker)))),
        encode(Kind.HELLO, bytes(4096)),
        encode(Kind.HELLO, bytes(4097)),
        encode(Kind.ENTRY, b"entry"),
        encode(Kind.HELLO, b"half")[:20],
        b"",
    ]
    store, strangers = DictStore(), []
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(establish, topology(0, 2), "127.0.0.1", store, SECRET)
        while not store.check(["links/0/0"]):
            time.sleep(0.01)
        port = int(store.get("links/0/0").decode().rpartition(":")[2])
        for noise in noises * 12:  # more than may wait at once
            stranger = socket.create_connection(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                stranger.sendall(noise)
            strangers.append(stranger)
        assert not leader.done()
        other = pool.submit(establish, topology(1, 2), "127.0.0.1", store, SECRET)
        all_links = [leader.result(), other.result()]
    assert sorted(all_links[0].log) == [1]
    all_links[1].log[0].send(Kind.AGREE, b"fine")
    with contextlib.closing(Poller()) as poller:
        poller.add(all_links[0].log[1])
        (event,) = poller.poll(5)
        assert event.frame.body == b"fine"
    for stranger in strangers:  # at most the challenge, then the end
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert len(stranger.recv(1000)) < 100
            assert stranger.recv(1000) == b""
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not marker.exists()
    close(all_links)


def test_a_stranger_who_says_nothing_is_shown_out_in_time(monkeypatch):
    monkeypatch.setattr("engine.distributed.rendezvous.HANDSHAKE_S", 0.2)
    store = DictStore()
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(establish, topology(0, 2), "127.0.0.1", store, SECRET, timeout_s=2)
        while not store.check(["links/0/0"]):
            time.sleep(0.01)
        port = int(store.get("links/0/0").decode().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            assert b"LKST" in stranger.recv(1000)
            assert stranger.recv(1000) == b""
        assert not leader.done()
        with pytest.raises(RanksMissing, match="turned away: no end of the handshake"):
            leader.result()


def test_tcp_listens_on_the_one_address_it_was_given():
    # sglang#21435 again: ports bound to every interface.
    listener, address = listen("127.0.0.1", 3)
    port = int(address.rpartition(":")[2])
    bound = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert bound == ["127.0.0.1"]
    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listener.close()


@pytest.mark.parametrize("address", ["0.0.0.1", "192.0.2.7", "localhost", "*", "10.0.0.5:80"])
def test_an_address_that_is_not_ours_is_refused_by_name(address):
    with pytest.raises(ValueError, match=r"--link-address .*: .*allowed is"):
        listen(address, 0)


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:x", "tcp:host", "ftp:x", "", "unix:/nowhere/at/all"])
def test_a_published_address_that_makes_no_sense_is_an_error_not_a_crash(address):
    with pytest.raises((OSError, ValueError)):
        dial(address)


def test_a_run_folder_that_others_can_enter_is_refused(folder):
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="has mode 0750; allowed is 0700"):
        establish(topology(0, 2), folder, DictStore(), SECRET)


def test_ranks_under_torchrun_share_the_leaders_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = DictStore()
    found = []
    thread = threading.Thread(target=lambda: found.append(share_folder(store, is_leader=False)))
    thread.start()
    own = share_folder(store, is_leader=True)
    thread.join()
    assert found[0].path == own.path and found[0].secret == own.secret and len(own.secret) == 32
    found[0].remove()
    assert own.path.exists(), "a rank removed the leader's folder"
    own.remove()
    assert not own.path.exists()
    with pytest.raises(RanksMissing, match="rank 0 has not shown up"):
        share_folder(DictStore(), is_leader=False, timeout_s=0.1)


# ---- the run folder -----------------------------------------------------------------------------


def test_a_run_folder_is_private_and_goes_away(tmp_path):
    folder = RunFolder.create(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "secret").stat().st_mode & 0o777 == 0o600
    assert RunFolder.open(folder.path).secret == folder.secret
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_dead_services_are_cleared(tmp_path):
    alive, dead = RunFolder.create(tmp_path), RunFolder.create(tmp_path)
    os.close(dead._lock_fd)  # what the kernel does at any death
    foreign = tmp_path / "lockstep-open"
    foreign.mkdir(mode=0o755)
    starting, abandoned = tmp_path / "lockstep-starting", tmp_path / "lockstep-abandoned"
    for path in (starting, abandoned):
        path.mkdir(mode=0o700)
    os.utime(abandoned, (1, 1))
    new = RunFolder.create(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, new.path, foreign, starting])
    alive.remove()
    new.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_foreign_run_folder_is_refused(folder):
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345; allowed is 0"):
        RunFolder.open(folder)


def test_a_link_in_place_of_a_run_folder_is_refused(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="is not a folder"):
        RunFolder.open(tmp_path / "link")


def test_a_parent_with_too_long_a_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"TMPDIR .* shorter path"):
        RunFolder.create(tmp_path / ("x" * 90))
