"""The GGUF reader beside the format's own package (writer, reader, quantisation), and against hostile files."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.model.gguf import GgufError, read_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A file with each kind of metadata and a few kinds of tensors, as the format's package writes it."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("small.float", 0.5)
    writer.add_bool("small.flag", True)
    writer.add_int64("small.negative", -(2**40))
    writer.add_string("small.text", "wörld 你")
    writer.add_token_list(["a", "b", "ü"])
    writer.add_array("small.numbers", [1, -2, 3])
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.add_tensor("vector", values[0].copy())
    for kind in ("Q4_0", "Q4_1", "Q8_0", "BF16"):
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_equal_the_reference_reader(file: Path):
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    expected = {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert ours.metadata == expected
    assert ours.metadata["small.text"] == "wörld 你" and ours.metadata["tokenizer.ggml.tokens"] == [
        "a",
        "b",
        "ü",
    ]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(found.row_count, -1)
        assert found.shape == tuple(int(size) for size in tensor.shape[::-1])
        np.testing.assert_array_equal(found.read_rows(0, found.row_count), rows)
        if found.row_count > 4:
            np.testing.assert_array_equal(found.read_rows(2, 4), rows[2:4])


def test_every_truncation_is_refused(file: Path, tmp_path: Path):
    data = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), *range(400, len(data) - 1, 61)]:
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError):
            read_gguf(cut)


def test_flipped_bytes_give_an_error_or_bounded_content(file: Path, tmp_path: Path):
    """Whatever the head says, nothing outside the file is read and nothing but GgufError is raised."""
    data = file.read_bytes()
    head = read_gguf(file).head_bytes
    flipped = tmp_path / "flipped.gguf"
    generator = random.Random(5)
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 8))):
            changed[generator.randrange(head)] = generator.randrange(256)
        flipped.write_bytes(changed)
        try:
            found = read_gguf(flipped)
        except GgufError:
            continue
        for tensor in found.tensors.values():
            assert tensor.offset >= 0
            assert tensor.offset + tensor.row_count * tensor.row_bytes <= len(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "begins with b''"),
        (b"PK\x03\x04" * 9, "begins with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata count"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"k" * 40, "length of metadata key"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62) + b"x" * 40, "count of k"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**40) + b"x" * 40, "count of k"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + b"x" * 40, "value type 77"),
        # Arrays in arrays in arrays: bounded depth, not a crash of the parser.
        (
            b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 2000,
            "value type 9",
        ),
        # A tensor of 2^63 rows whose byte count would wrap in 64 bits.
        (
            b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 2, 64, 2**63, 0, 0) + b"x" * 64,
            "tensor 't' ends at",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, 0, 2**63) + b"x" * 64,
            "tensor 't' ends at",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0) + b"x" * 64,
            "cannot have the shape",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0) + b"x" * 64, "Q4_0"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9) + b"x" * 64, "9 dimensions"),
    ],
)
def test_hostile_heads(content: bytes, words: str, tmp_path: Path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError) as caught:
        read_gguf(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_kind_that_cannot_be_dequantised_is_refused_when_it_is_read(tmp_path: Path):
    path = tmp_path / "kind.gguf"
    head = b"GGUF" + struct.pack(
        "<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, int(gguf.GGMLQuantizationType.I32), 0
    )
    path.write_bytes(head + b"x" * 512)
    tensor = read_gguf(path).tensors["t"]
    with pytest.raises(GgufError, match="I32"):
        tensor.read_rows(0, 1)
