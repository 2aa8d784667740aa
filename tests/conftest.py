"""Checkpoints that several test files share, made once for a whole run, with what `transformers` says of them."""

import pytest

from engine.model import default_model as default_model_file
from tests.reference import Reference
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Reference:
    """Five layers of 256 bytes a token, untied, with a tokenizer; a context of 4,096 tokens."""
    folder = make_tiny(tmp_path_factory.mktemp("dense"), tokenizer=True, max_position_embeddings=4096)
    return Reference(folder)


@pytest.fixture(scope="session")
def default_model() -> Reference:
    """SmolLM2-135M-Instruct, as `server.py` serves it when told nothing."""
    path = default_model_file.fetch()
    return Reference(path.parent, path.name)
