"""Loading: each stage reads what it owns, whole and nothing else; files are untrusted."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.mem_cache import sizing
from engine.mem_cache.pool.device import DeviceKVPool, page_run
from engine.model.safetensors import SafetensorsError, read_safetensors
from engine.model.source import SourceError, open_source
from engine.model.weights import StageWeights, WeightError, load_weights, parameter_count, resolve_dtype
from engine.topology import split_layers
from tests.tiny_models import ARCHITECTURES, make_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("untied"), shard_size="100KB", tokenizer=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def load(folder: Path, layers: range, dtype: torch.dtype = torch.float32, **options) -> StageWeights:
    return load_weights(open_source(folder), layers, dtype=dtype, device=CPU, **options)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the format's own library."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_those_of_the_file(architecture: str, tmp_path: Path):
    folder = make_tiny(tmp_path, architecture, shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    expected = stored(folder)
    weights = load(folder, range(1, 3))
    for number, layer in enumerate(weights.layers, start=1):
        part = {
            name.split(".", 3)[3]: tensor for name, tensor in expected.items() if f".layers.{number}." in name
        }
        qkv = [part[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.qkv, torch.cat(qkv))
        assert torch.equal(
            layer.gate_up, torch.cat([part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
        )
        assert torch.equal(layer.down, part["mlp.down_proj.weight"])
        assert torch.equal(layer.output, part["self_attn.o_proj.weight"])
        assert torch.equal(layer.attention_norm, part["input_layernorm.weight"])
        assert torch.equal(layer.feed_forward_norm, part["post_attention_layernorm.weight"])
        if layer.qkv_bias is not None:
            assert torch.equal(
                layer.qkv_bias, torch.cat([part[f"self_attn.{name}_proj.bias"] for name in "qkv"])
            )
        assert (layer.qkv_bias is not None) == (architecture == "Qwen2ForCausalLM")
        assert (layer.query_norm is not None) == (architecture == "Qwen3ForCausalLM")
    assert weights.embedding is None and weights.norm is None and weights.head is None


@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_stages_together_hold_the_model_once(untied: Path, tied: Path, pp_size: int):
    """sglang#21070, sglang#20202: every stage builds the whole model. Here once, plus one embedding if tied and cut."""
    for folder, is_tied in ((untied, False), (tied, True)):
        spec = open_source(folder).spec
        model_bytes = sum(tensor.numel() * 4 for tensor in stored(folder).values())
        extra = spec.vocabulary_size * spec.hidden_size * 4 if is_tied and pp_size > 1 else 0
        stages = [load(folder, range(*bounds)) for bounds in split_layers(spec.layer_count, pp_size)]
        assert sum(stage.byte_count for stage in stages) == model_bytes + extra
        for stage, bounds in zip(stages, split_layers(spec.layer_count, pp_size), strict=True):
            assert stage.byte_count == 4 * parameter_count(spec, range(*bounds))


@pytest.mark.parametrize("redundant", ["none", "equal", "different"])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_tied_head_is_the_embedding_on_every_stage_count(
    tied: Path, tmp_path: Path, pp_size: int, redundant: str
):
    """sglang#15890, sglang#21347, sglang#6908: the last stage's head. A redundant `lm_head`, even a different one, is
    not read: the tie wins, as in transformers."""
    folder = shutil.copytree(tied, tmp_path / "copy")
    tensors = stored(folder)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    if redundant != "none":
        tensors["lm_head.weight"] = embedding + (1.0 if redundant == "different" else 0.0)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bounds = split_layers(5, pp_size)
    first, last = load(folder, range(*bounds[0])), load(folder, range(*bounds[-1]))
    assert torch.equal(last.head, embedding) and torch.equal(first.embedding, embedding)
    assert (last.head is last.embedding) == (pp_size == 1)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_with_its_stage(untied: Path, tmp_path: Path, name: str):
    folder = shutil.copytree(untied, tmp_path / "copy")
    tensors = {key: tensor for key, tensor in stored(folder).items() if key != name}
    replace_weights(folder, tensors)
    with pytest.raises(WeightError, match=rf"{name}.*stage 1") as caught:
        load(folder, range(2, 5), stage="1")
    assert "\n" not in str(caught.value)
    load(folder, range(2), stage="0")  # who does not own it does not miss it


def test_a_wrong_shape_is_named(untied: Path, tmp_path: Path):
    folder = shutil.copytree(untied, tmp_path / "copy")
    tensors = stored(folder)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 63)
    replace_weights(folder, tensors)
    with pytest.raises(WeightError, match=r"k_proj.*\[32, 63\].*\[32, 64\]"):
        load(folder, range(5))


def replace_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kinds_of_floats_are_read_exactly(dtype: torch.dtype, tmp_path: Path):
    values = torch.randn(7, 5).to(dtype)
    save_file({"x": values, "ids": torch.arange(3)}, tmp_path / "x.safetensors")
    tensors = read_safetensors(tmp_path / "x.safetensors")
    assert torch.equal(torch.from_numpy(tensors["x"].read_rows(2, 6)), values.float()[2:6])
    with pytest.raises(SafetensorsError, match="I64"):
        tensors["ids"].read_rows(0, 1)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_gguf_gives_the_weights_that_were_converted(
    architecture: str, kind: str, is_tied: bool, tmp_path: Path
):
    """The file is written as llama.cpp's converter does: its tensor names, and q and k of Llama permuted."""
    bias = {"attention_bias": True} if architecture == "LlamaForCausalLM" else {}
    folder = make_tiny(tmp_path / "folder", architecture, tie_word_embeddings=is_tied, head_dim=24, **bias)
    path = write_gguf(folder, kind, tmp_path / "x.gguf")
    expected, found = open_source(folder).spec, open_source(path).spec
    assert {**asdict(found), "eos_ids": ()} == {
        **asdict(expected),
        "norm_epsilon": found.norm_epsilon,
        "eos_ids": (),
    }
    assert found.norm_epsilon == pytest.approx(expected.norm_epsilon)
    for layers in (range(2), range(2, 5)):
        ours, theirs = load(path, layers), load(folder, layers)
        for a, b in zip(ours._tensors(), theirs._tensors(), strict=True):
            assert torch.equal(a, b)


def write_gguf(folder: Path, kind: str, path: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in stored(folder).items():
        count = heads.get(name.split(".")[-2])
        if kind == "llama" and count is not None:
            rows = tensor.shape[0]
            tensor = (
                tensor.reshape(count, 2, rows // count // 2, *tensor.shape[1:])
                .swapaxes(1, 2)
                .reshape(tensor.shape)
            )
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_index_of_a_file_equals_the_librarys(untied: Path):
    for file in untied.glob("*.safetensors"):
        with safe_open(file, "pt") as library:
            expected = {name: tuple(library.get_slice(name).get_shape()) for name in library.keys()}  # noqa: SIM118
        assert {name: tensor.shape for name, tensor in read_safetensors(file).items()} == expected


def test_broken_safetensors_are_refused(untied: Path, tmp_path: Path):
    data = next(iter(untied.glob("*.safetensors"))).read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    path = tmp_path / "x.safetensors"
    for size in (0, 7, 8, 100, 7 + header_bytes, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(SafetensorsError):
            read_safetensors(path)
    generator = random.Random(2)
    for _ in range(200):
        changed = bytearray(data)
        changed[generator.randrange(8 + header_bytes)] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            tensors = read_safetensors(path)
        except SafetensorsError:
            continue
        for tensor in tensors.values():
            assert tensor.offset >= 8 + header_bytes


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]}},
        {"x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"x": {"dtype": "I8", "shape": [2], "data_offsets": [8, 0]}},
        {"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"x": 5},
        [],
    ],
)
def test_hostile_headers(header, tmp_path: Path):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(SafetensorsError):
        read_safetensors(path)


def test_dummy_weights_depend_on_the_name_alone(untied: Path):
    source = open_source(untied, "dummy")
    whole = load_weights(source, range(5), dtype=torch.float32, device=CPU)
    parts = [load_weights(source, range(*b), dtype=torch.float32, device=CPU) for b in split_layers(5, 2)]
    layers = [layer for part in parts for layer in part.layers]
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(whole.layers, layers, strict=True))
    assert torch.equal(whole.embedding, parts[0].embedding) and torch.equal(whole.head, parts[1].head)
    assert not torch.equal(whole.layers[0].qkv, whole.layers[1].qkv)
    other = load_weights(source, range(5), dtype=torch.float32, device=CPU, seed=1)
    assert not torch.equal(whole.layers[0].qkv, other.layers[0].qkv)


def test_dummy_needs_a_config_only(tmp_path: Path, untied: Path):
    shutil.copy(untied / "config.json", tmp_path)
    assert (
        load_weights(open_source(tmp_path, "dummy"), range(5), dtype=torch.float32, device=CPU).byte_count > 0
    )
    with pytest.raises(SourceError, match="no weights"):
        open_source(tmp_path)


def test_progress_reaches_its_total(untied: Path):
    calls: list[tuple[int, int]] = []
    load(untied, range(5), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == parameter_count(open_source(untied).spec, range(5))


def test_dtype_auto():
    assert resolve_dtype("float32", CPU) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    expected = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    assert resolve_dtype("auto", CPU) is expected or torch.cpu.get_capabilities().get("amx_bf16")


def test_pool_bytes_are_those_that_were_priced(untied: Path):
    spec = open_source(untied).spec
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        pool = DeviceKVPool(3, 10, 16, (2, spec.kv_heads, spec.head_dim), dtype, CPU).allocate()
        assert pool.byte_count == 160 * sizing.attention_bytes_per_token(spec, 3, tp_size=1, dtype=name)
        assert pool.records.untyped_storage().nbytes() == pool.byte_count


def test_pool_reads_pages_in_order_by_view_or_by_copy():
    pool = DeviceKVPool(2, 6, 4, (2, 2, 3), torch.float32, CPU).allocate()
    pool.clear(torch.arange(24))
    records = torch.randn(24, 4, 3)
    pool.write(1, torch.arange(24), records)
    by_page = records.view(6, 4, 2, 2, 3)
    assert torch.equal(
        pool.read(1, torch.tensor([5, 0, 3]), torch.float32), by_page[[5, 0, 3]].view(12, 2, 2, 3)
    )
    view = pool.read(1, slice(2, 4), torch.float32)
    assert (
        torch.equal(view, by_page[2:4].view(8, 2, 2, 3)) and view.data_ptr() == pool.records[1, 8].data_ptr()
    )
    assert not pool.records[0].any()


def test_pool_of_another_type_rounds_once():
    pool = DeviceKVPool(1, 3, 4, (2, 2, 3), torch.bfloat16, CPU).allocate()
    records = torch.randn(12, 4, 3)
    pool.write(0, torch.arange(12), records)
    rounded = records.to(torch.bfloat16).float().view(12, 2, 2, 3)
    for pages in (slice(0, 3), torch.tensor([0, 1, 2])):
        assert torch.equal(pool.read(0, pages, torch.float32), rounded)


def test_pool_clears_the_slots_it_is_told_in_all_layers():
    pool = DeviceKVPool(2, 3, 4, (2, 2, 3), torch.float32, CPU).allocate()
    pool.records.fill_(torch.nan)
    pool.clear(torch.tensor([5, 6]))
    assert not pool.records[:, 5:7].any() and pool.records.isnan().sum() == 2 * 10 * 12


def test_runs_of_pages():
    assert page_run((7,)) == slice(7, 8) and page_run((3, 4, 5)) == slice(3, 6)
    for pages in ((3, 5), (5, 4, 3), (3, 3), (1, 3, 2, 4), (1, 2, 2, 4)):
        assert page_run(pages) is None


MEMORY_PROBE = """
import re, sys, psutil, torch
from pathlib import Path
from engine.model.source import open_source
from engine.model.weights import load_weights
source = open_source(Path(sys.argv[1]))
torch.zeros(8).sum()
before = psutil.Process().memory_info().rss
layers = range(int(sys.argv[2]), int(sys.argv[3]))
weights = load_weights(source, layers, dtype=torch.float32, device=torch.device("cpu"))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(psutil.Process().memory_info().rss - before, peak - before, weights.byte_count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_memory_of_a_stage_is_its_own_weights(tmp_path: Path):
    """sglang#21070, pytorch/PiPPy#723: 40 layers in several shards; a stage of 10 takes a quarter, at its peak too."""
    folder = make_tiny(
        tmp_path,
        shard_size="20MB",
        num_hidden_layers=40,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    assert len(list(folder.glob("*.safetensors"))) >= 5
    found = {}
    for layers in ((0, 40), (0, 10), (10, 20), (30, 40)):
        command = [sys.executable, "-c", MEMORY_PROBE, str(folder), *map(str, layers)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
        )
        resident, peak, weights = map(int, done.stdout.split())
        # One block of rows (8 MB) and its conversions, and what the allocator keeps.
        assert resident <= weights * 1.05 + (24 << 20), (layers, resident, weights)
        assert peak <= weights * 1.05 + (40 << 20), (layers, peak, weights)
        found[layers] = weights
    assert max(found[layers] for layers in ((0, 10), (10, 20), (30, 40))) < 0.3 * found[0, 40]
