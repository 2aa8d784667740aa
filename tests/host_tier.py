"""Services with a host tier, and the questions that their tests have in common.

`tier` starts one over uneven stages and, at its end, checks what holds after any traffic; `check_legs` walks one prompt
through all the places where its prefix can be. Right ids come from `transformers` (`reference.py`), and an answer that
is wrong is compared with the others: a page of somebody else's shows as somebody else's text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.reference import Reference
from tests.service import FP32, Service, serve

POLICIES = ("write_through", "write_through_selective", "write_back")
COUNTERS = (
    "evicted_pages",
    "demoted_pages",
    "backed_up_pages",
    "loaded_pages",
    "host_evicted_pages",
    "dropped_mirror_pages",
    "failed_copies",
    "copies_under_way",
)
UNEVEN = {1: "5", 2: "3,2", 3: "3,1,1"}
"""Layers of the stages of the tiny model, by their number: a token takes 768 and 512 bytes over two."""
LEG_TOKENS = 320
FILLER_TOKENS = 160


def host_flags(model: Reference, pp_size: int, tokens: int, **flags: Any) -> list[str]:
    """Flags of a service with a host tier; `page_size=1` becomes `--page-size 1`, True a bare flag."""
    given = [*FP32, "--enable-hierarchical-cache"]
    split = {"pp_layer_partition": UNEVEN[pp_size]} if pp_size in UNEVEN else {}
    shared = {"model_path": model.folder, "pp_size": pp_size, "max_total_tokens": tokens} | split
    for name, value in (shared | flags).items():
        given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return given


@contextlib.contextmanager
def tier(
    model: Reference, pp_size: int, tokens: int, *, faults: dict[str, Any] | None = None, **flags: Any
) -> Iterator[Service]:
    """A service whose counters exist from the start with value 0, and whose books balance when the test is done.

    It must then answer as it did at first, no copy may have failed that was not meant to (a checksum would hide an
    error of the books), and no process may have told of an exception.
    """
    trouble = (faults or {}).get("copy", {})
    with serve(*host_flags(model, pp_size, tokens, **flags), faults=faults, probe=False) as service:
        counters = service.stats()["counters"]
        assert set(COUNTERS) <= set(counters) and not any(counters.values()), counters
        service.check_alive()
        yield service
        failed = service.check_idle(20.0)["counters"]["failed_copies"]
        assert bool(failed) == ("fail_every" in trouble or "damage_every" in trouble), service.stats()
        service.check_alive()
        assert "Traceback" not in service.stderr


def ask_all(
    service: Service, prompts: Sequence[list[int]], n: int | Sequence[int], at_once: int, **body: Any
) -> list[dict[str, Any]]:
    """Greedy answers to prompts, `at_once` of them at a time; `n` may be one number of tokens for each."""
    counts = [n] * len(prompts) if isinstance(n, int) else n
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt, count: service.generate(prompt, count, **body), prompts, counts))


def check_right(answers: Sequence[dict[str, Any]], right: Sequence[list[int]]) -> None:
    """All ids are right; of one that is not, say whose text it could be."""
    for number, (answer, ids) in enumerate(zip(answers, right, strict=True)):
        found = answer["output_ids"]
        if found != ids[: len(found)]:
            like = [
                other for other, theirs in enumerate(right) if other != number and found[:3] == theirs[:3]
            ]
            raise AssertionError(
                f"answer {number} is {found}, right is {ids}; it begins like answers {like}; {answer['meta_info']}"
            )


def from_host(answer: dict[str, Any]) -> int:
    """Prompt tokens that came back from host memory."""
    return (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]


def loaded_bytes(service: Service) -> list[int]:
    """What each stage has copied from the host to the device since the start."""
    return [stage["bytes_copied"]["load"] for stage in service.info()["stages"]]


def check_legs(service: Service, model: Reference, tokens: int, *, length: int = LEG_TOKENS) -> None:
    """One prompt cold, from the device, from the host, from the device after its load-back, and from the host again.

    `tokens` is the device capacity. Ids are right and log probabilities those of the cold leg within 1e-4; the
    details say where the prefix was, all in one tier; and each stage has copied the bytes of exactly these tokens.
    """
    filler_count = tokens // FILLER_TOKENS + 1
    prompt, *fillers = model.clear_prompts([length] + [FILLER_TOKENS] * filler_count, 8, seed=0)
    (right, *fillers_right), page = model.answers([prompt, *fillers], 8), service.info()["page_size"]
    covered, cold = (length - 1) // page * page, None
    for leg in ("cold", "device", "push out", "host", "device", "push out", "host"):
        if leg == "push out":
            check_right(ask_all(service, fillers, 8, 1), [answer.ids for answer in fillers_right])
            continue
        before, moved_before = service.check_idle(20.0)["counters"]["loaded_pages"], loaded_bytes(service)
        answer = service.generate(prompt, 8, return_logprob=True)
        meta, loaded = answer["meta_info"], service.stats()["counters"]["loaded_pages"] - before
        moved = [now - then for now, then in zip(loaded_bytes(service), moved_before, strict=True)]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        cold = cold or logprobs
        assert answer["output_ids"] == right.ids, leg
        assert logprobs == pytest.approx(cold, abs=1e-4), leg
        assert logprobs == pytest.approx(right.logprobs, abs=2e-3), leg
        if leg == "cold":
            assert (meta["cached_tokens"], meta["cached_tokens_details"], loaded) == (0, None, 0)
        else:
            details = {"device": 0, "host": 0} | {leg: covered}
            assert (meta["cached_tokens"], meta["cached_tokens_details"]) == (covered, details), leg
            assert loaded == details["host"] // page, leg
            prices = [stage["bytes_per_token"] for stage in service.info()["stages"]]
            assert moved == [details["host"] * price for price in prices], leg
