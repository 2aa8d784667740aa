"""Trouble with the host tier, in real services: copies that are slow, fail or come back damaged, capacities that are
too small, differ or do not fit, and processes that end while copies run. Cases of public faults name their threads.
"""

import json
import random
import re
import signal
import time

import pytest

from tests.host_tier import POLICIES, ask_all, check_right, from_host, host_flags, tier
from tests.reference import Reference
from tests.service import run_to_end, serve, until
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.process

GB = 10**9
GONE_S = 20.0


# ---- capacities ----

FRACTION = {"hicache_size": 0.001536, "max_running_requests": 8}
"""2,000 tokens of 768 bytes, and 3,000 of 512."""


def cyclic(model):
    """100 prompts of 100 tokens in rotation, more than 2,000 tokens hold and fewer than 3,000."""
    return model.clear_prompts([100] * 25, 4, seed=1) * 4


def test_a_fixed_size_is_the_same_number_of_tokens_on_every_stage(dense):
    # sglang#29258
    with tier(dense, 2, 512, **FRACTION) as service:
        assert [stage["host"]["capacity"] for stage in service.info()["stages"]] == [2016, 2016]
        said = "[PP1 TP0] host pool: room for 3000 here, but only 2000 on another stage; all take that"
        assert said in service.stderr and "[PP0 TP0] host pool: room" not in service.stderr
        prompts = cyclic(dense)
        check_right(ask_all(service, prompts, 4, 8), dense.ids(prompts, 4))
        assert service.check_idle()["counters"]["host_evicted_pages"] > 0


def test_without_agreement_the_same_traffic_parts_the_stages(dense):
    # sglang#29258, sglang#29054: stages with other capacities; nobody could name the first divergence.
    flags = [*host_flags(dense, 2, 512, **FRACTION), "--debug-unagreed-hicache"]
    with serve(*flags, probe=False) as service:
        assert "--debug-unagreed-hicache: stages keep their own host capacity" in service.stderr
        prompts = cyclic(dense)[:22]
        for prompt, ids in zip(prompts, dense.ids(prompts, 4), strict=True):
            stream = service.stream(prompt, 4).wait_end()
            assert stream.output_ids == ids[: len(stream.output_ids)]
            assert stream.failed == (prompt is prompts[-1])
        assert stream.error["code"] == 503 and "DIVERGED" in stream.error["message"]
        assert service.wait_exit(GONE_S) == 70
        # Stage 0 has 126 pages, room for 21 prompts of 6 pages; the next one evicts 6, and on stage 1 none.
        told = r"DIVERGED step=\d+ rank=1 \[PP1 TP0\] vs rank=0 \[PP0 TP0\] field='host evictions' 0 != 6 "
        assert re.search(told, service.last_line), service.last_line


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_pool_far_smaller_than_the_device_pool(dense, policy):
    # sglang#16909, sglang#28614, sglang#22062: a child on the host whose parent is not, or a backup without room.
    order, prompts = random.Random(2), list[list[int]]()
    for _ in range(10):
        parent = order.choices(range(640), k=208)
        children = [parent + order.choices(range(640), k=32) for _ in range(2)]
        prompts += [parent, *children, order.choices(range(640), k=40)]
    answers = zip(prompts, dense.answers(prompts, 4), strict=True)
    prompts = [prompt for prompt, answer in answers if answer.clear]
    flags = {"hicache_ratio": 0.0625, "hicache_write_policy": policy, "max_running_requests": 4}
    with tier(dense, 1, 1024, **flags) as service:
        assert service.stats()["host"]["capacity"] == 80
        for _ in range(2):
            check_right(ask_all(service, prompts, 4, 4), dense.ids(prompts, 4))
        counters = service.check_idle()["counters"]
        assert counters["backed_up_pages"] > 5 and counters["evicted_pages"] > 64


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            "--enable-hierarchical-cache --disable-radix-cache",
            "--enable-hierarchical-cache, --disable-radix-cache",
        ),
        ("--hicache-size 1", "--hicache-size 1.0: allowed with --enable-hierarchical-cache only"),
        (
            "--debug-unagreed-hicache",
            "--debug-unagreed-hicache: allowed with --enable-hierarchical-cache only",
        ),
    ],
)
def test_flags_that_contradict_are_refused_by_name(flags, named):
    # sglang#9452: the host tier without the radix cache crashed at the first request.
    code, lines = run_to_end(*flags.split())
    assert code == 2 and named in lines[-1]


# ---- copies that go wrong ----


@pytest.mark.parametrize("checksums", [True, False])
def test_copies_that_fail_or_come_back_damaged_are_computed_again(dense, checksums):
    # LMCache#4991, LMCache#207, LMCache#3022: what was not stored, or not whole, is found and served. One rank's copies
    # are slow, come in another order, fail and are damaged; all ranks drop the same pages. Checksums are for damage:
    # without them what failed must not be served either.
    trouble = {"damage_every": 5, "fail_every": 7} if checksums else {"fail_every": 4}
    faults = {"copy": {"rank": 1, "seconds": 0.001} | trouble}
    flags = {"hicache_ratio": 4, "max_running_requests": 4, "threads_per_rank": 2}
    flags |= {} if checksums else {"disable_hicache_checksum": True}
    prompts, order = dense.clear_prompts([200] * 12, 8, seed=5), random.Random(5)
    with tier(dense, 2, 512, faults=faults, **flags) as service:
        answers = []
        for _ in range(8):
            chosen = order.sample(prompts, 12)
            answers += ask_all(service, chosen, 8, 4)
            check_right(answers[-12:], dense.ids(chosen, 8))
        assert service.check_idle()["counters"]["failed_copies"] > 3
        assert sum(map(from_host, answers)) > 10 * 192
        failed = r"\[PP1 TP0\] .*{} \d+ failed at host page \d+: {}".format
        assert bool(re.search(failed("load", "its checksum is"), service.stderr)) == checksums
        for kind in ("load", "backup"):
            assert re.search(failed(kind, "a fault on purpose"), service.stderr)
        assert not re.search(r"\[PP0 TP0\] .*failed", service.stderr)


# ---- memory of the machine, and four stages ----


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four equal layers: on four stages a token costs the same on each."""
    return Reference(make_tiny(tmp_path_factory.mktemp("four"), num_hidden_layers=4))


MACHINE = {"host_memory": {"total": 10 * GB, "available": 10 * GB}}
"""10 GB, of which 1 GB is reserved."""


def test_memory_of_four_ranks_that_fits_and_bursts_of_cancellations(four):
    # sglang#35540: 4 x 2.0 GB fit into 10 - 1 GB, whoever measures last. sglang#34572, sglang#30476, vllm#6586: a burst
    # of cancellations makes stages disagree.
    flags = {"hicache_size": 2.0, "chunked_prefill_size": 64, "max_running_requests": 16}
    order = random.Random(8)
    prompts = four.clear_prompts([45] * 32, 30, seed=8, prefix=order.choices(range(640), k=405))
    right = four.ids(prompts, 30)
    with tier(four, 4, 2048, **flags, faults=MACHINE) as service:
        for round_number in range(3):
            name = f"r{round_number}-{{}}".format
            streams = [service.stream(prompt, 30, rid=name(number)) for number, prompt in enumerate(prompts)]
            leaving, aborted = (order.sample(range(32), count) for count in (16, 8))
            for number in leaving:
                time.sleep(order.random() * 0.01)
                streams[number].close()
            for number in [*aborted, *aborted[:3], 99]:
                assert service.post("/abort_request", {"rid": name(number)}).status_code == 200
            for number, stream in enumerate(streams):
                stream.wait_end()
                if number not in leaving and stream.error is None:
                    assert stream.output_ids == right[number]
                assert number in leaving or number in aborted or stream.finish == "length"
            service.check_alive()
            service.check_idle()


def test_memory_of_four_ranks_that_does_not_fit_is_refused_by_all(four):
    # sglang#35540
    flags = host_flags(four, 4, 2048, hicache_size=2.5)
    code, lines = run_to_end(*flags, LOCKSTEP_FAULTS=json.dumps(MACHINE))
    assert code == 3
    told = re.search(
        r"needed ([\d.]+) GB by ranks 0, 1, 2, 3, but available ([\d.]+) GB - reserve ([\d.]+) GB", lines[-1]
    )
    assert told, lines[-1]
    needed, available, reserve = map(float, told.groups())
    assert needed > available - reserve and (available, reserve) == (10.0, 1.0)
    assert "--hicache-size" in lines[-1] and not any("to load" in line for line in lines)


# ---- processes that end while copies run ----

SLOW = {"copy": {"rank": -1, "seconds": 0.03}}


def load_slowly(service, model):
    """A stream that waits for a load of ten pages, 0.3 s, with the ids it must get."""
    prompts = model.clear_prompts([160] * 4, 8, seed=9)
    ask_all(service, prompts, 8, 1)
    service.check_idle(20.0)
    stream = service.stream(prompts[0], 8)
    until(lambda: service.stats()["counters"]["copies_under_way"], "a load is under way")
    return stream, model.ids(prompts, 8)[0]


def test_a_rank_is_killed_while_it_loads(dense):
    with serve(*host_flags(dense, 2, 512), faults=SLOW, probe=False) as service:
        stream, _ = load_slowly(service, dense)
        service.signal("rank 1", signal.SIGKILL)
        assert stream.wait_end(GONE_S).failed and not stream.output_ids
        assert service.wait_exit(GONE_S) == 71
        assert "rank 1" in service.last_line and not service.run_folders()


def test_sigterm_lets_copies_and_who_waits_for_them_finish(dense):
    # sglang#23627: workers are killed before they can clean up.
    with serve(*host_flags(dense, 2, 512), faults=SLOW, probe=False) as service:
        stream, ids = load_slowly(service, dense)
        service.terminate()
        assert stream.wait_end(GONE_S).output_ids == ids and stream.finish == "length"
        assert service.wait_exit(GONE_S) == 0
        assert "Traceback" not in service.stderr and not service.run_folders()
