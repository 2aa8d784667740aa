"""safetensors files: an index of tensors, read with bounds, and rows of a tensor as float32.

The file is untrusted: the header's length is held against the file's before it is read, and each tensor must fill
its bytes exactly. Rows are read straight from the file and not mapped, so that pages of a checkpoint never count
as memory of a stage. No torch. Layout after the format's public description: a header length (8 bytes, little-endian),
a JSON object of dtype, shape and data offsets per name, then the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class SafetensorsError(ValueError):
    """The file is not a safetensors file that can be trusted. The text is one line that says where it breaks."""


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where a tensor lies, and how its rows are read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    """First byte in the file."""

    @property
    def row_count(self) -> int:
        """Rows of the tensor seen as a matrix; a vector is one row."""
        return math.prod(self.shape[:-1])

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) as float32, [stop - start, columns]. Exact for every kind of float that is allowed."""
        assert 0 <= start < stop <= self.row_count, f"rows {start}..{stop} of {self.row_count} in {self.name}"
        if self.kind not in _FLOATS:
            raise SafetensorsError(
                f"{self.path}: tensor {self.name!r} has dtype {self.kind}; allowed are {', '.join(_FLOATS)}"
            )
        columns = self.shape[-1]
        dtype = _FLOATS[self.kind]
        with self.path.open("rb") as file:
            file.seek(self.offset + start * columns * dtype.itemsize)
            raw = np.fromfile(file, dtype=dtype, count=(stop - start) * columns).reshape(
                stop - start, columns
            )
        if self.kind == "BF16":  # bfloat16 is the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        floats: npt.NDArray[np.float32] = raw.astype(np.float32, copy=False)
        return floats


_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_HEADER_BYTES_MAX = 1 << 26
_DIMENSIONS_MAX = 8


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of a file, by name. Raises SafetensorsError; OSError when the file cannot be opened."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, _HEADER_BYTES_MAX):
            raise SafetensorsError(
                f"{path}: header of {header_bytes} bytes in a file of {file_bytes}; allowed is at most what the "
                f"file holds, and {_HEADER_BYTES_MAX}"
            )
        text = file.read(header_bytes)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path}: its header is not a JSON object")
    data_start = 8 + header_bytes
    return {
        name: _described(path, name, entry, data_start, file_bytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _described(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> SafetensorsTensor:
    try:
        kind, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise SafetensorsError(f"{path}: tensor {name!r} lacks its dtype, shape or data_offsets") from None
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise SafetensorsError(f"{path}: tensor {name!r} has numbers in its entry that are not whole")
    # Checkpoints may hold tensors of other kinds that no parameter wants; those are refused only when they are read.
    item_bytes = _FLOATS[kind].itemsize if kind in _FLOATS else None
    exact = item_bytes is None or end - begin == math.prod(shape) * item_bytes
    if not exact or begin > end or data_start + end > file_bytes or len(shape) > _DIMENSIONS_MAX:
        raise SafetensorsError(
            f"{path}: tensor {name!r} of {kind} {list(shape)} lies at [{begin}, {end}); "
            f"allowed is its exact size, inside the file's {file_bytes - data_start} bytes of data"
        )
    return SafetensorsTensor(path, name, shape, kind, data_start + begin)
