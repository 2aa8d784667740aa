"""The start-up conversation: one verdict on every rank, in the same words, whatever goes wrong."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distributed.agreement import Agreement, RankLost, Refused, first_difference
from engine.distributed.frames import Frame, Kind
from engine.distributed.memory import HostMemory, MemoryNeed, check_memory, host_memory


class Wire:
    """A link within one process: what is sent is put into the other side's agreement at once."""

    def __init__(self):
        self.agreement = None
        self.back = None
        self.sent = []

    def send(self, kind, *buffers, epoch=0):
        assert kind is Kind.AGREE
        self.sent.append(b"".join(buffers))
        if self.agreement is not None:
            self.agreement.put(self.back, Frame(kind, epoch, 0, 0, b"".join(buffers)))


def star(size):
    """The agreements of `size` ranks, joined as the log links join them."""
    down = {rank: Wire() for rank in range(1, size)}
    up = {rank: Wire() for rank in range(1, size)}
    agreements = [Agreement(0, size, down)]
    for rank in range(1, size):
        agreements.append(Agreement(rank, size, {0: up[rank]}))
        down[rank].agreement, down[rank].back = agreements[rank], up[rank]
        up[rank].agreement, up[rank].back = agreements[0], down[rank]
    return agreements


def together(agreements, work):
    """`work(agreement, rank)` on every rank at once: results, or what was raised."""

    def one(rank):
        try:
            return work(agreements[rank], rank)
        except (Refused, RankLost) as error:
            return error

    with ThreadPoolExecutor(len(agreements)) as pool:
        return list(pool.map(one, range(len(agreements))))


def test_everyone_leaves_with_the_same_list():
    values = [{"a": 1}, [1, "zwei"], None, 2**63 - 1]
    agreements = star(4)
    for phase in ("first", "second", "first"):
        results = together(
            agreements, lambda agreement, rank, phase=phase: agreement.gather(phase, values[rank])
        )
        assert results == [values] * 4


def test_a_world_of_one_agrees_with_itself():
    alone = Agreement(0, 1, {})
    assert alone.gather("any", (1, 2)) == [(1, 2)]
    assert alone.minimum("any", 5) == 5
    alone.must_equal("any", {"a": 1})
    alone.vote("any", None)
    with pytest.raises(Refused, match=r"^no weights$"):
        alone.vote("any", "no weights")


def test_the_minimum_is_everyones():
    # sglang#29258: stages that own 19 and 20 layers priced 100 GB differently; MIN makes them one number.
    locally = [8_023_168, 8_023_168, 7_621_952, 7_621_952]
    results = together(star(4), lambda agreement, rank: agreement.minimum("host tokens", locally[rank]))
    assert results == [7_621_952] * 4


def test_the_first_differing_field_is_named_on_every_rank():
    tables = [
        {"version": "1", "dtype": "float32", "page_size": 16},
        {"version": "1", "dtype": "bfloat16", "page_size": 32},
        {"version": "1", "dtype": "float32", "page_size": 16},
    ]
    results = together(star(3), lambda agreement, rank: agreement.must_equal("settings", tables[rank]))
    assert [type(result) for result in results] == [Refused] * 3
    assert {str(result) for result in results} == {"dtype differs: float32 on ranks 0, 2, bfloat16 on rank 1"}


def test_equal_fields_pass_and_an_absent_one_does_not():
    assert first_difference([{"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}]) is None
    assert first_difference([{"a": 1}, {"a": 1, "b": 2}]) == "b differs: absent on rank 0, 2 on rank 1"
    assert first_difference([{"a": 1}, {"a": None}]) == "a differs: 1 on rank 0, None on rank 1"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=5))
def test_a_difference_is_found_exactly_when_there_is_one(tables):
    line = first_difference(tables)
    assert (line is None) == all(table == tables[0] for table in tables)


def test_the_first_problem_refuses_everyone():
    problems = [None, "out of memory: 3 GB", "no file x"]
    results = together(star(3), lambda agreement, rank: agreement.vote("weights", problems[rank]))
    assert {(type(result), str(result)) for result in results} == {(Refused, "rank 1: out of memory: 3 GB")}


def test_ranks_in_different_phases_are_refused():
    results = together(
        star(3), lambda agreement, rank: agreement.vote("pools" if rank == 2 else "weights", None)
    )
    assert {(type(result), str(result)) for result in results} == {
        (Refused, "rank 0 starts with 'weights', rank 2 with 'pools'")
    }


def test_a_late_rank_is_named_to_all_that_are_there():
    agreements = star(4)

    def work(agreement, rank):
        return None if rank in (1, 3) else agreement.vote("weights", None, timeout_s=0.2)

    results = together(agreements, work)
    line = "rank 1, rank 3 did not take part in 'weights' within 0.2 s"
    assert [str(results[rank]) for rank in (0, 2)] == [line] * 2
    assert isinstance(results[0], RankLost) and isinstance(results[2], RankLost)


@pytest.mark.parametrize("when", ["before", "while waiting"])
def test_a_rank_that_vanishes_is_named_to_all(when):
    agreements = star(3)
    vanish = threading.Timer(
        0.1, lambda: agreements[0].lost(agreements[0]._links[2], "is gone (end of file)")
    )
    if when == "before":
        vanish.interval = 0
        vanish.start()
        vanish.join()
    else:
        vanish.start()
    results = together(
        agreements, lambda agreement, rank: None if rank == 2 else agreement.vote("weights", None)
    )
    assert [str(results[rank]) for rank in (0, 1)] == ["rank 2 is gone (end of file) during the start"] * 2
    # And it stays so: nobody goes on with a later phase.
    with pytest.raises(RankLost, match="rank 2 is gone"):
        agreements[1].vote("pools", None)


def test_the_leaders_end_is_named_too():
    agreements = star(2)
    agreements[1].lost(agreements[1]._links[0], "is gone (end of file)")
    with pytest.raises(RankLost, match="rank 0 is gone"):
        agreements[1].gather("weights", 1)


@pytest.mark.parametrize("body", [b"", b"\x80\x04.", msgspec.msgpack.encode({"type": "Part", "number": "x"})])
def test_nonsense_in_the_conversation_names_its_speaker(body):
    agreements = star(2)
    agreements[0].put(agreements[0]._links[1], Frame(Kind.AGREE, 0, 0, 0, body))
    with pytest.raises(RankLost, match="rank 1 talks nonsense"):
        agreements[0].gather("weights", 1)


# ---- memory of a machine ------------------------------------------------------------------------

GB = 10**9


def needs(*rows):
    return [MemoryNeed(host, rank, size) for host, rank, size in rows]


def test_the_reserve_is_the_smaller_of_10_gb_and_a_tenth():
    assert HostMemory(total=32 * GB, available=0).reserve == 3_200_000_000
    assert HostMemory(total=1000 * GB, available=0).reserve == 10 * GB


def test_memory_is_checked_over_all_ranks_of_a_machine():
    memory = {"a": HostMemory(total=100 * GB, available=90 * GB), "b": HostMemory(100 * GB, 50 * GB)}
    assert check_memory(needs(("a", 0, 40 * GB), ("a", 1, 40 * GB), ("b", 2, 40 * GB)), memory) is None
    line = check_memory(needs(("b", 2, 20 * GB), ("a", 1, 40 * GB + 1), ("a", 0, 40 * GB)), memory)
    assert line == (
        "memory of a: needed 80.000000001 GB by ranks 0, 1, "
        "but available 90.000000000 GB - reserve 10.000000000 GB is less"
    )
    # Each of the two would have fitted alone.
    line = check_memory(needs(("b", 0, 25 * GB), ("b", 1, 25 * GB)), memory)
    assert (
        line
        == "memory of b: needed 50.00 GB by ranks 0, 1, but available 50.00 GB - reserve 10.00 GB is less"
    )


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 2**50))
def test_the_printed_numbers_show_why(needed, total, available):
    memory = HostMemory(total, available)
    line = check_memory(needs(("a", 0, needed)), {"a": memory})
    if needed <= available - memory.reserve:
        assert line is None
        return
    words = line.split()
    shown = [float(words[words.index(name) + 1]) for name in ("needed", "available", "reserve")]
    assert shown[0] > shown[1] - shown[2]
    assert abs(shown[0] * GB - needed) <= 5_000_001


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_container_limit_counts_v2(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self" / "cgroup", "0::/pod/box\n")
    write(cgroups / "pod" / "box" / "memory.max", "max\n")
    write(cgroups / "pod" / "memory.max", "500000000\n")
    write(cgroups / "pod" / "memory.current", "300000000\n")
    write(cgroups / "pod" / "memory.stat", "anon 1\ninactive_file 60000000\nactive_file 40000000\nshmem 7\n")
    assert host_memory(proc, cgroups) == HostMemory(total=500_000_000, available=300_000_000)


def test_a_container_limit_counts_v1(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self" / "cgroup", "3:cpuset:/\n4:cpu,memory:/box\n0::/\n")
    write(cgroups / "memory" / "box" / "memory.limit_in_bytes", "400000000\n")
    write(cgroups / "memory" / "box" / "memory.usage_in_bytes", "390000000\n")
    write(cgroups / "memory" / "box" / "memory.stat", "total_inactive_file 0\ntotal_active_file 100000000\n")
    write(cgroups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroups / "memory" / "memory.usage_in_bytes", "390000000\n")
    write(cgroups / "memory" / "memory.stat", "total_cache 5\n")
    assert host_memory(proc, cgroups) == HostMemory(total=400_000_000, available=110_000_000)


def test_a_machine_without_containers(tmp_path):
    memory = host_memory(tmp_path, tmp_path)
    assert 0 < memory.available <= memory.total
