"""The planner's numbers: the public case of GLM-5.2, hand-computed small ones, and every split of small models."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from engine.capacity_plan import CapacityPlan, PlannerFlags, plan_capacity
from engine.config import ConfigError
from engine.layer_split import even_split, least_limits
from engine.planner import main, print_plan

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "glm-5.2-fp8.json"
GLM_FLAGS = "--pp-size 4 --tp-size 4 --hicache-size 100 --page-size 64 --kv-cache-dtype fp8"
DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
"""256 bytes a token and layer in fp32."""
HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
"""256 bytes a token and attention layer; (2 x 16 + 32) x 3 x 4 + 4 x 8 x 8 x 4 = 1,792 a slot and linear layer."""


def plan(config: dict, **flags) -> CapacityPlan:
    return plan_capacity(config, PlannerFlags(**{"dtype": "float32", "page_size": 1, **flags}))


def hybrid(kinds: str, **flags) -> CapacityPlan:
    """A hybrid of attention (a) and linear (l) layers."""
    names = [{"a": "full_attention", "l": "linear_attention"}[kind] for kind in kinds]
    return plan({**HYBRID, "num_hidden_layers": len(kinds), "layer_types": names}, **flags)


def pool(plan: CapacityPlan, name: str) -> list:
    return [next(row for row in stage.pools if row.name == name) for stage in plan.stages]


def before(plan: CapacityPlan, name: str) -> list:
    return [row.count_before for row in pool(plan, name)]


def after(plan: CapacityPlan, name: str) -> int:
    (count,) = {row.count_after for row in pool(plan, name)}
    return count


# ---- fixed GB --------------------------------------------------------------------------------------


def test_glm_5_2_fp8_over_four_stages():
    """sglang#29258: 5.26 % between stages of 19 and 20 layers until they agree."""
    glm = plan_capacity(
        json.loads(EXAMPLE.read_text()),
        PlannerFlags(pp_size=4, tp_size=4, hicache_size=100, page_size=64, kv_cache_dtype="fp8"),
    )
    assert before(glm, "latent") == [8_023_168, 8_023_168, 7_621_952, 7_621_952]
    assert after(glm, "latent") == 7_621_952
    assert [row.bytes_each for row in pool(glm, "latent")] == [12_464, 12_464, 13_120, 13_120]
    assert [stage.layers for stage in glm.stages] == [(0, 19), (19, 38), (38, 58), (58, 78)]
    assert [stage.bytes_pinned for stage in glm.stages] == [95_000_009_728] * 2 + [100_000_010_240] * 2
    assert [stage.bytes_unused for stage in glm.stages] == [4_999_990_272] * 2 + [-10_240] * 2
    # 7, 4, 5 and 5 of the 21 indexers, 132 bytes each, beside the budget and as many tokens as the main pool.
    assert [stage.bytes_sidecar for stage in glm.stages] == [7_621_952 * 132 * n for n in (7, 4, 5, 5)]
    (spread,) = glm.unagreed
    assert (spread.least, spread.most, spread.agreed) == (7_621_952, 8_023_168, 7_621_952)
    assert f"{spread.most / spread.least - 1:.4f}" == "0.0526"
    assert glm.best_split == glm.split and glm.split.partition == (19, 19, 20, 20)


@pytest.mark.parametrize(
    ("size", "local"), [(1, [1_302_084, 1_953_126]), (0.001536, [2001, 3001]), (1e-6, [2, 2])]
)
def test_two_stages_of_three_and_two_layers(size: float, local: list[int]):
    """768 and 512 bytes a token; one token more than fits is kept, even where they fit exactly."""
    found = plan(DENSE, pp_size=2, pp_layer_partition=(3, 2), hicache_size=size)
    assert before(found, "kv") == local
    assert after(found, "kv") == min(local)
    assert [stage.bytes_pinned for stage in found.stages] == [768 * min(local), 512 * min(local)]


def test_pages_are_whole_and_one_more_than_fit():
    """10^6 // 768 = 1302 tokens, 10^6 // 512 = 1953; 81 + 1 and 122 + 1 pages of 16."""
    found = plan(DENSE, pp_size=2, pp_layer_partition=(3, 2), hicache_size=0.001, page_size=16)
    assert before(found, "kv") == [1312, 1968] and after(found, "kv") == 1312


def test_by_ratio_every_stage_takes_the_same_and_there_is_no_budget():
    found = plan(DENSE, pp_size=2, page_size=16, hicache_ratio=1.5, device_tokens=1000)
    assert before(found, "kv") == [1504, 1504] and after(found, "kv") == 1504
    assert found.budget_bytes == 0
    assert [stage.bytes_unused for stage in found.stages] == [256 * 1504, 0]


# ---- hybrids ---------------------------------------------------------------------------------------


def test_a_stage_without_layers_of_a_kind_sets_no_limit_and_divides_by_nothing():
    """vllm#51752, sglang#33666: neither a stage without attention nor one without recurrent layers."""
    found = hybrid("aalll", pp_size=2, pp_layer_partition=(2, 3), hicache_size=0.01)
    # Half of what is left beside a page of 512 and a slot of 5,376 bytes is 4,997,056 for each.
    assert before(found, "kv") == [4_997_056 // 512 + 1, None]
    assert before(found, "state") == [None, 4_997_056 // 5376 + 1]
    assert [row.bytes_each for row in pool(found, "kv")] == [512, 0]
    assert [stage.bytes_pinned for stage in found.stages] == [9760 * 512, 930 * 5376]


def test_tokens_and_slots_share_one_budget():
    """sglang#35540: neither the same GB for each of two pools nor one page too many on top."""
    for size, share in itertools.product((0.0001, 0.01, 1.0), (None, 0.001, 0.3, 0.999)):
        found = hybrid("llalla", pp_size=2, hicache_size=size, state_share=share, page_size=16)
        assert all(stage.bytes_unused >= 0 for stage in found.stages), (size, share)


def test_the_budget_is_shared_as_the_device_shares_its_memory_or_as_the_operator_says():
    flags = {"pp_size": 1, "hicache_size": 1, "device_tokens": 7000, "state_slots": 100}
    shared = hybrid("la", **flags)
    # 7000 x 256 bytes to 100 x 1792: ten to one.
    assert abs(after(shared, "kv") * 256 / 1e9 - 10 / 11) < 1e-5
    assert abs(after(shared, "state") * 1792 / 1e9 - 1 / 11) < 1e-5
    said = hybrid("la", **flags, state_share=0.25)
    assert abs(after(said, "state") * 1792 / 1e9 - 0.25) < 1e-5


def test_a_share_that_buys_nothing_is_one_page_and_not_the_ratio():
    """A budget of one page and one slot leaves nothing to share; counts must not come from the ratio then."""
    found = hybrid("la", pp_size=1, hicache_size=0.000002048, device_tokens=5000, state_slots=5000)
    assert (after(found, "kv"), after(found, "state")) == (1, 1)


def test_by_ratio_slots_follow_the_device_s_slots():
    found = hybrid("lala", pp_size=2, device_tokens=1000, state_slots=10, hicache_ratio=2)
    assert (after(found, "kv"), after(found, "state")) == (2001, 21)


# ---- the best split --------------------------------------------------------------------------------


def every_split(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, layers)))


@pytest.mark.parametrize(
    "flags",
    [
        {"hicache_size": 0.01},
        {"hicache_size": 0.01, "state_share": 0.1},
        {"hicache_size": 0.01, "state_share": 0.8},
        {"device_tokens": 9000, "state_slots": 100},
    ],
    ids=["halves", "mostly tokens", "mostly state", "ratio"],
)
@pytest.mark.parametrize("kinds", ["lllalllalll", "allllllaal", "aaaallll", "lalalalala", "aaalllllllaa"])
def test_no_split_wastes_less_than_the_one_named_and_none_as_wasteful_is_evener(kinds: str, flags: dict):
    def merit(found):
        return found.bytes_unused, max(found.partition), sum(count**2 for count in found.partition)

    for stages in (2, 3, 4):
        splits = {
            partition: hybrid(kinds, pp_size=stages, pp_layer_partition=partition, **flags)
            for partition in every_split(len(kinds), stages)
        }
        least = min(merit(found.split) for found in splits.values())
        for partition, found in splits.items():
            assert merit(found.best_split) == least
            assert (found.best_split == found.split) == (merit(found.split) == least)
            assert splits[found.best_split.partition].split == found.best_split, partition


def test_a_lopsided_split_is_told_the_even_one():
    found = plan(DENSE, pp_size=2, pp_layer_partition=(4, 1), hicache_size=0.001024)
    assert found.split.counts == (1001,) and found.best_split.partition == (2, 3)
    assert found.best_split.counts == (1334,)
    assert found.split.bytes_unused - found.best_split.bytes_unused == (1334 - 1001) * 5 * 256


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_what_trying_every_split_finds(seed: int):
    draw = random.Random(seed)
    layers, kinds = draw.randint(2, 9), draw.randint(1, 2)
    stages = draw.randint(1, layers)
    costs = [[draw.choice((0, 1, 1, 2, 5)) for _ in range(layers)] for _ in range(kinds)]
    heaviest = {}
    for counts in every_split(layers, stages):
        ends = list(itertools.accumulate(counts, initial=0))
        heaviest[counts] = tuple(max(sum(cost[a:b]) for a, b in itertools.pairwise(ends)) for cost in costs)
    found = list(least_limits(costs, stages))
    front = {
        one
        for one in heaviest.values()
        if not any(
            other != one and all(x <= y for x, y in zip(other, one, strict=True))
            for other in heaviest.values()
        )
    }
    assert sorted(found) == sorted(front) and len(found) == len(front)
    for limits in found:
        kept = [c for c, most in heaviest.items() if all(x <= y for x, y in zip(most, limits, strict=True))]
        ranges = even_split(costs, limits, stages)
        evenest = min(kept, key=lambda c: (max(c), sum(n**2 for n in c), c))
        assert tuple(end - start for start, end in ranges) == evenest


def test_the_greatest_model_allowed_is_split_at_once():
    """Bounded work: 1,024 layers over 512 stages, and a front of many pairs."""
    ranges = even_split([[1] * 1024], next(least_limits([[1] * 1024], 512)), 512)
    assert ranges == tuple((2 * stage, 2 * stage + 2) for stage in range(512))
    halves = [[1] * 64 + [0] * 64, [0] * 64 + [1] * 64]
    assert list(least_limits(halves, 4)) == [(16, 64), (22, 32), (32, 22), (64, 16)]


# ---- the command -----------------------------------------------------------------------------------


def run(line: str, capsys) -> tuple[int, str, str]:
    code = main(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_of_glm_5_2_is_the_one_in_the_document(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(f"--config {EXAMPLE} {GLM_FLAGS}", capsys)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0-18", "19", "12,464", "924", "8,023,168", "7,621,952", "95.000", "7.043", "5.000"] in rows
    assert [
        "3",
        "58-77",
        "20",
        "13,120",
        "660",
        "7,621,952",
        "7,621,952",
        "100.000",
        "5.030",
        "0.000",
    ] in rows
    assert "Without agreement: 7,621,952 to 8,023,168 tokens, 401,216 apart (5.26 %)." in out
    assert "--pp-layer-partition 19,19,20,20 " in out and "(this one)" in out
    document = (ROOT / "docs" / "planner.md").read_text()
    assert f"--config examples/glm-5.2-fp8.json {GLM_FLAGS}" in document.replace("\\\n", "").replace(
        "    ", ""
    )
    printed = "\n".join(line.rstrip() for line in out.splitlines() if line.strip())
    assert printed in "\n".join(line for line in document.splitlines() if line.strip())


def test_json_is_the_plan(capsys):
    code, out, _ = run(f"--config {EXAMPLE} {GLM_FLAGS} --json", capsys)
    expected = plan_capacity(
        json.loads(EXAMPLE.read_text()),
        PlannerFlags(pp_size=4, tp_size=4, hicache_size=100, page_size=64, kv_cache_dtype="fp8"),
    )
    assert code == 0 and json.loads(out) == json.loads(json.dumps(dataclasses.asdict(expected)))
    assert json.loads(out)["stages"][0]["pools"][0] == {
        "name": "latent",
        "bytes_each": 12_464,
        "count_before": 8_023_168,
        "count_after": 7_621_952,
        "bytes_pinned": 95_000_009_728,
    }


def test_a_hybrid_s_table_says_where_there_is_no_limit():
    flags = PlannerFlags(dtype="float32", page_size=1, pp_size=2, hicache_size=0.01)
    out = io.StringIO()
    print_plan(hybrid("aalll", pp_size=2, pp_layer_partition=(2, 3), hicache_size=0.01), flags, out)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["0", "0-1", "2", "512", "0", "9,760", "9,760", "no", "limit", "930", "0.005", "0.005"] in rows
    assert "sidecar" not in out.getvalue()


def test_the_folder_of_a_model_will_do(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    code, out, _ = run(f"--config {tmp_path} --hicache-size 1", capsys)
    assert code == 0 and "llama, 5 layers" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--config is missing: allowed is the path of a config.json"),
        ("--config nowhere.json", "--config nowhere.json: No such file or directory; allowed is"),
        ("--config {junk}", "is not JSON; allowed is"),
        ("--config {array}", "holds no JSON object; allowed is"),
        (
            "--config {glm} --pp-size 79",
            "--pp-size 79: the model has 78 layers, so allowed is a number from 1 to 78",
        ),
        ("--config {glm} --pp-size 0", "--pp-size 0: allowed is a whole number from 1 to 1024"),
        (
            "--config {glm} --pp-layer-partition 78,0 --pp-size 2",
            "--pp-layer-partition 78,0: every stage needs",
        ),
        ("--config {glm} --pp-layer-partition 70,7 --pp-size 2", "--pp-layer-partition 70,7: sums to 77"),
        (
            "--config {glm} --tp-size 3",
            "--tp-size 3: the model has 64 attention heads; allowed is one of 1, 2, 4",
        ),
        ("--config {glm} --hicache-size -1", "--hicache-size -1.0: allowed is a number from 0 to 1000000"),
        ("--config {glm} --hicache-size nan", "--hicache-size nan: allowed is"),
        ("--config {glm} --hicache-size 1e-10", "--hicache-size 1e-10: allowed is 0 or at least one byte"),
        (
            "--config {glm} --hicache-size 0",
            "--hicache-size 0.0: allowed is more than 0, or --device-tokens to size",
        ),
        (
            "--config {glm} --kv-cache-dtype fp4",
            "--kv-cache-dtype fp4: allowed is one of auto, float32, bfloat16, fp8",
        ),
        (
            "--config {glm} --device-tokens 3",
            "--device-tokens 3: allowed is at least --page-size, which is 16",
        ),
        (
            "--config {glm} --hicache-size 1 --state-share 0.5",
            "--state-share 0.5: allowed where --hicache-size is",
        ),
        ("--config {glm} --hicach-size 1", "--hicach-size: no such flag; did you mean --hicache-size?"),
        ("--config {hybrid} --device-tokens 99", "allowed is more than 0, or --state-slots to size"),
        (
            "--config {hybrid} --hicache-size 0.000001",
            "--hicache-size: 1000 bytes hold no page of 2048 bytes and slot of",
        ),
    ],
)
def test_what_is_not_allowed_is_one_line_and_exit_code_2(line: str, words: str, tmp_path: Path, capsys):
    files = {"junk": "{", "array": "[1]", "hybrid": json.dumps(HYBRID)}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = {name: tmp_path / name for name in files} | {"glm": EXAMPLE}
    code, out, err = run(line.format(**paths), capsys)
    assert (code, out) == (2, "") and words in err
    assert err.startswith("planner: ") and err.count("\n") == 1


def test_flags_made_in_code_are_checked_too():
    with pytest.raises(ConfigError, match="--page-size 0: allowed is a whole number from 1 to 4096"):
        plan(DENSE, hicache_size=1, page_size=0)


@pytest.mark.process
def test_the_command_loads_no_torch_and_says_what_is_wrong_with_exit_code_2():
    code = "import engine.planner, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "engine.planner", "--config", str(EXAMPLE), *GLM_FLAGS.split()]
    result = subprocess.run([*command, "--tp-size", "3"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("planner: --tp-size 3")
