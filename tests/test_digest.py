"""Digests: the same in every process, different for every difference, chained so that nothing heals."""

from __future__ import annotations

import os
import subprocess
import sys

from engine.scheduler.digest import Accumulator, fold_digest, hash64, hash_events, random_bits, show
from tests.sim.single import Driver, request

GOLDEN = """
from tests.sim.single import Driver, request
driver = Driver(page_size=4, device_pages=12, host_pages=16, policy="lpm")
driver.run(*(request(i, [i % 3] * 9, new=9, salt="s" * (i % 2)) for i in range(1, 9)))
print(driver.scheduler.digest)
"""


def test_blake2b_of_known_bytes():
    """RFC 7693's BLAKE2b with an 8-byte digest, as `b2sum -l 64` prints it for the empty file."""
    assert hash64(b"").to_bytes(8, "little").hex() == "e4a6a0577479b2b4"


def test_what_was_noted_is_taken_once():
    events = Accumulator()
    events.note(1, 2)
    events.note(3)
    assert events.take() == [1, 2, 3] and events.take() == []


def test_order_values_and_parts_all_count():
    """A number that moves to the next part, or to the counters, is another state."""
    states = [
        ((7,), ([1, 2], [3])),
        ((7,), ([1], [2, 3])),
        ((7,), ([3], [1, 2])),
        ((7,), ([1, -2], [3])),
        ((7,), ([1, 2], [3, 0])),
        ((7,), ([1, 2, 3], [])),
        ((8,), ([1, 2], [3])),
        ((7, 1), ([2], [3])),
    ]
    assert len({fold_digest(0, *state) for state in states}) == len(states)
    assert len({hash_events(noted) for noted in ([], [0], [1, 2], [2, 1], [1, -2])}) == 5


def test_the_digest_of_a_step_covers_all_steps_before():
    first, other = fold_digest(0, (1, 2), ([4],)), fold_digest(0, (1, 2), ([5],))
    assert fold_digest(first, (5, 6), ([],)) != fold_digest(other, (5, 6), ([],))


def test_random_bits_depend_on_seed_and_position():
    numbers = {random_bits(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400 and all(0 <= number < 2**64 for number in numbers)
    assert random_bits(2**64 + 5, 1) == random_bits(5, 1) and random_bits(-1, 1) == random_bits(2**64 - 1, 1)


def test_a_digest_is_16_hexadecimal_digits():
    assert show(0x2A) == "000000000000002a"


def test_digests_do_not_depend_on_the_process():
    """vllm#12621, LMCache#1842: Python's own hash differs from process to process."""
    outputs = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        outputs.append(subprocess.check_output([sys.executable, "-c", GOLDEN], env=environment))
    assert outputs[0] == outputs[1] and int(outputs[0]) > 0


def test_every_fact_of_a_request_that_decides_anything_is_in_the_digest():
    plain = {
        "new": 5,
        "stop_token_ids": (3,),
        "min_new_tokens": 1,
        "return_logprob": True,
        "logprob_start": 2,
    }
    changes = (
        {},
        {"new": 6},
        {"stop_token_ids": (4,)},
        {"stop_token_ids": (3, 4)},
        {"min_new_tokens": 2},
        {"logprob_start": 3},
        {"salt": "a"},
        {"delivered": (9,)},
        {"prompt": (1, 2, 4)},
    )
    digests = []
    for change in changes:
        driver = Driver()
        arguments = {"prompt": (1, 2, 3), **plain, **change}
        driver.step(request(1, **arguments))
        digests.append((driver.scheduler.state.numbers[0], driver.scheduler.digest))
    assert len({inputs for inputs, _ in digests}) == len({digest for _, digest in digests}) == len(changes)
