"""Where a model comes from: a folder, a GGUF file or a hub id becomes a `ModelSource`, which says what is in it.

Opening reads heads only (configuration, tensor indices), never weights, and imports no torch, so the front end
opens the same source for its tokenizer. Model files are untrusted: nothing is unpickled and no code of theirs is
run. Download of the default model is in `default_model.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from engine.model import default_model
from engine.model.gguf import read_gguf
from engine.model.safetensors import SafetensorsError, SafetensorsTensor, read_safetensors
from engine.model.spec import ModelSpec, spec_from_config, spec_from_gguf


class SourceError(ValueError):
    """The model cannot be had or opened. The text is one line naming --model-path, its value and what is allowed."""


class StoredTensor(Protocol):
    """A tensor in a file. Rows are read on demand; nothing is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        ...

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) of the tensor seen as a matrix (a vector is one row), as float32."""
        ...


WeightFormat = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """An opened model: everything but the values of its weights."""

    path: Path
    name: str
    """The path's last part, or that of the hub id: what clients call the model unless told otherwise."""
    spec: ModelSpec
    weight_format: WeightFormat
    tensors: Mapping[str, StoredTensor]
    """By the name they have in the file or files; empty for `dummy`."""
    tokenizer_path: Path | None
    """`tokenizer.json`, if there is one."""
    tokenizer_config: Mapping[str, Any]
    """`tokenizer_config.json`, or empty."""
    gguf_metadata: Mapping[str, Any] | None
    """A GGUF file's metadata, which hold its tokenizer."""
    chat_template: str | None
    generation_defaults: Mapping[str, float]
    """Sampling settings that the model's makers suggest, by transformers' names: temperature, top_p, top_k, ..."""
    fingerprint: str
    """sha256 in hexadecimal of the configuration and of every tensor's name, kind and shape. Ranks must agree on it."""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pickle", ".pkl")
_JSON_BYTES_MAX = 1 << 26
_SUGGESTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_model(model_path: str | None) -> Path:
    """A local folder or `.gguf` file for what --model-path says, fetched first if need be. Raises SourceError.

    None is the default model. Fetching shows its progress on standard error.
    """
    if model_path is None:
        try:
            return default_model.fetch()
        except default_model.FetchError as error:
            raise SourceError(f"--model-path absent: {error}") from None
    path = Path(model_path).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(model_path) is None:
        raise SourceError(
            f"--model-path {model_path}: does not exist; allowed is a folder with config.json, a .gguf file or a hub id"
        )
    # Imported late: it is slow to import, and only hub ids need it.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model_path, allow_patterns=_HUB_PATTERNS))
    except (
        Exception
    ) as error:  # the library raises errors of several HTTP packages; each means "not to be had"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(
            f"--model-path {model_path}: no such folder here, and the hub did not give it ({reason})"
        ) from None


def open_source(path: Path, load_format: Literal["auto", "dummy"] = "auto") -> ModelSource:
    """Open what `resolve_model` returned. Raises SourceError, UnsupportedModel, GgufError or SafetensorsError.

    All of them are ValueErrors with one line of text.
    """
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path, load_format)
    if path.suffix in _PICKLED_SUFFIXES:
        raise SourceError(
            f"--model-path {path}: pickled checkpoints are refused; allowed are safetensors and GGUF"
        )
    if not path.is_dir():
        raise SourceError(f"--model-path {path}: allowed is a folder with config.json, or a .gguf file")
    return _open_folder(path, load_format)


def _open_gguf(path: Path, load_format: str) -> ModelSource:
    file = read_gguf(path)
    template = file.metadata.get("tokenizer.chat_template")
    with path.open("rb") as opened:
        head = opened.read(file.head_bytes)
    dummy = load_format == "dummy"
    return ModelSource(
        path=path,
        name=_name(path),
        spec=spec_from_gguf(file.metadata, file.tensors),
        weight_format="dummy" if dummy else "gguf",
        tensors={} if dummy else file.tensors,
        tokenizer_path=None,
        tokenizer_config={},
        gguf_metadata=file.metadata,
        chat_template=template if isinstance(template, str) else None,
        generation_defaults={},
        fingerprint=hashlib.sha256(load_format.encode() + head).hexdigest(),
    )


def _open_folder(path: Path, load_format: str) -> ModelSource:
    config = _read_json(path / "config.json")
    if not config:
        found = sorted(item.name for item in path.glob("*.gguf"))
        hint = f"; did you mean {path / found[0]}?" if found else ""
        raise SourceError(f"--model-path {path}: has no config.json; allowed is a Hugging Face folder{hint}")
    generation = _read_json(path / "generation_config.json")
    spec = spec_from_config(config, generation)
    tensors = {} if load_format == "dummy" else _folder_tensors(path)
    described = [(name, tensor.kind, tensor.shape) for name, tensor in sorted(tensors.items())]
    text = json.dumps([load_format, config, generation, described], sort_keys=True)
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    return ModelSource(
        path=path,
        name=_name(path),
        spec=spec,
        weight_format="dummy" if load_format == "dummy" else "safetensors",
        tensors=tensors,
        tokenizer_path=path / "tokenizer.json" if (path / "tokenizer.json").is_file() else None,
        tokenizer_config=tokenizer_config,
        gguf_metadata=None,
        chat_template=_chat_template(path, tokenizer_config),
        generation_defaults={
            key: generation[key] for key in _SUGGESTIONS if isinstance(generation.get(key), int | float)
        },
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )


def _folder_tensors(path: Path) -> dict[str, SafetensorsTensor]:
    """The index of all shards of a folder, or of its one file."""
    index = _read_json(path / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        files = sorted({str(file) for file in index.values()})
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise SourceError(
                f"--model-path {path}: its index names {outside[0]!r}; allowed are files of that folder"
            )
    else:
        files = sorted(item.name for item in path.glob("*.safetensors"))
    if not files:
        pickled = sorted(item.name for item in path.iterdir() if item.suffix in _PICKLED_SUFFIXES)
        why = f"{pickled[0]} is a pickled checkpoint, which is refused" if pickled else "has no weights"
        raise SourceError(f"--model-path {path}: {why}; allowed are *.safetensors")
    tensors: dict[str, SafetensorsTensor] = {}
    for file in files:
        if not (path / file).is_file():
            raise SourceError(f"--model-path {path}: its index names {file}, which is not there")
        for name, tensor in read_safetensors(path / file).items():
            if name in tensors:
                raise SafetensorsError(
                    f"{path}: tensor {name!r} stands in {tensors[name].path.name} and in {file}"
                )
            tensors[name] = tensor
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _JSON_BYTES_MAX:
        raise SourceError(f"{path}: {path.stat().st_size} bytes; allowed are at most {_JSON_BYTES_MAX}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path}: allowed is a JSON object")
    return value


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template beside the tokenizer, or inside its settings: a text, or a list of named texts."""
    file = path / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= _JSON_BYTES_MAX:
        return file.read_text(encoding="utf-8", errors="replace")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _name(path: Path) -> str:
    if path.name == default_model.FILE_NAME:
        return default_model.MODEL_NAME
    path = path.resolve() if path.name in ("", ".", "..") else path
    if path.parent.name == "snapshots":  # the hub's cache: models--organisation--name/snapshots/revision
        return path.parent.parent.name.rpartition("--")[2]
    return path.stem if path.suffix == ".gguf" else path.name
