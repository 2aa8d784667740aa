"""GGUF files: metadata and an index of tensors, read with bounds, and rows of a tensor as float32.

The file is untrusted: each count and length is held against the bytes that are left before anything is made
from it, and each tensor must lie inside the file. No torch. Owns the format's layout and nothing else: what the
numbers mean is told by `spec.py`, which tensor goes where by `weights.py`. Layout after the format's public
specification, versions 2 and 3 (little-endian): header, metadata pairs, tensor descriptions, aligned data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants


class GgufError(ValueError):
    """The file is not a GGUF file that can be trusted. The text is one line that says where it breaks."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, and how its rows are read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy and torch have it (the file stores the reverse)."""
    kind: GGMLQuantizationType
    offset: int
    """First byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, whole quantisation blocks."""
        block_numbers, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block_numbers * block_bytes

    @property
    def row_count(self) -> int:
        """Rows of the tensor seen as a matrix; a vector is one row."""
        return math.prod(self.shape[:-1])

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) as float32, [stop - start, columns]; nothing else of the file is read."""
        assert 0 <= start < stop <= self.row_count, f"rows {start}..{stop} of {self.row_count} in {self.name}"
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.row_bytes)
            raw = np.fromfile(file, dtype=np.uint8, count=(stop - start) * self.row_bytes)
        raw = raw.reshape(stop - start, self.row_bytes)
        try:
            return quants.dequantize(raw, self.kind).astype(np.float32, copy=False)
        except NotImplementedError:
            raise GgufError(
                f"{self.path}: tensor {self.name!r} has the type {self.kind.name}, not done yet"
            ) from None


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the head of a GGUF file says."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    head_bytes: int
    """Bytes before the first tensor's data: they determine everything but the weights' values."""


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types -> struct codes; 8 is a string and 9 an array."""
_STRING, _ARRAY = 8, 9
_HEAD_BYTES_FIRST, _HEAD_BYTES_MAX = 1 << 21, 1 << 26
_DIMENSIONS_MAX = 4
_ARRAY_DEPTH_MAX = 2


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor index. Raises GgufError; OSError when the file cannot be opened."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        # A head is a few megabytes, nearly all of it vocabulary. A longer one is read in growing parts; one that
        # is longer than the limit is refused by running into the end of what was read.
        head = file.read(_HEAD_BYTES_FIRST)
        while True:
            try:
                return _parse(path, _Cursor(path, head), file_bytes)
            except _Truncated as error:
                more = file.read(min(len(head) * 3, _HEAD_BYTES_MAX - len(head)))
                if not more:
                    raise GgufError(str(error)) from None
                head += more


class _Truncated(GgufError):
    """The bytes read so far end inside the head."""


class _Cursor:
    """Reads forward through bytes, never past their end."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they began."""
        if size > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise _Truncated(f"{self.path}: {what} at byte {self.at} needs {size} bytes, but {left} are left")
        self.at += size
        return self.at - size

    def number(self, code: str, what: str) -> Any:
        at = self.take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, at)[0]

    def count(self, code: str, item_bytes_min: int, what: str) -> int:
        """A count of items of at least `item_bytes_min` bytes each, all of which must still fit."""
        count: int = self.number(code, what)
        if count * item_bytes_min > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise _Truncated(
                f"{self.path}: {what} {count} at byte {self.at} cannot fit into the {left} bytes left"
            )
        return count

    def string(self, what: str) -> str:
        size = self.count("Q", 1, f"length of {what}")
        at = self.take(size, what)
        return self.data[at : at + size].decode("utf-8", errors="replace")


def _parse(path: Path, cursor: _Cursor, file_bytes: int) -> GgufFile:
    if cursor.data[:4] != b"GGUF":
        raise GgufError(f"{path}: begins with {cursor.data[:4]!r}; a GGUF file begins with b'GGUF'")
    cursor.take(4, "magic")
    version = cursor.number("I", "version")
    if version not in (2, 3):
        raise GgufError(f"{path}: GGUF version {version}; allowed are 2 and 3, little-endian")
    tensor_count = cursor.count("Q", 24, "tensor count")
    pair_count = cursor.count("Q", 13, "metadata count")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string("metadata key")
        if key in metadata:
            raise GgufError(f"{path}: metadata key {key!r} stands twice")
        metadata[key] = _value(cursor, cursor.number("I", "value type"), key, 0)
    described = [_description(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise GgufError(f"{path}: general.alignment {alignment!r}; allowed is a whole number from 1 to 65536")
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in described:
        tensor = GgufTensor(path, name, shape, kind, data_start + offset)
        end = tensor.offset + tensor.row_count * tensor.row_bytes
        if name in tensors or end > file_bytes:
            why = "stands twice" if name in tensors else f"ends at byte {end} of a file of {file_bytes}"
            raise GgufError(f"{path}: tensor {name!r} {why}")
        tensors[name] = tensor
    return GgufFile(metadata, tensors, cursor.at)


def _value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], key)
    if kind == _STRING:
        return cursor.string(key)
    if kind != _ARRAY or depth == _ARRAY_DEPTH_MAX:
        raise GgufError(f"{cursor.path}: metadata {key!r} has value type {kind}; allowed is 0 to 12")
    item_kind = cursor.number("I", key)
    if item_kind in _SCALARS:
        code = _SCALARS[item_kind]
        count = cursor.count("Q", struct.calcsize(code), f"count of {key}")
        at = cursor.take(count * struct.calcsize("<" + code), key)
        return list(struct.unpack_from(f"<{count}{code}", cursor.data, at))
    count = cursor.count("Q", 8, f"count of {key}")
    if item_kind == _STRING:
        return [cursor.string(key) for _ in range(count)]
    return [_value(cursor, item_kind, key, depth + 1) for _ in range(count)]


def _description(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string("tensor name")
    dimensions = cursor.number("I", f"dimensions of {name}")
    if not 1 <= dimensions <= _DIMENSIONS_MAX:
        raise GgufError(
            f"{cursor.path}: tensor {name!r} has {dimensions} dimensions; allowed is 1 to {_DIMENSIONS_MAX}"
        )
    shape = tuple(cursor.number("Q", f"shape of {name}") for _ in range(dimensions))[::-1]
    number = cursor.number("I", f"type of {name}")
    offset = cursor.number("Q", f"offset of {name}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise GgufError(f"{cursor.path}: tensor {name!r} has the unknown type {number}") from None
    if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise GgufError(
            f"{cursor.path}: tensor {name!r} of type {kind.name} cannot have the shape {list(shape)}"
        )
    return name, shape, kind, offset
