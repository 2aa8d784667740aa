"""Checkpoints of several kinds over several stages: tied heads, layers that do not divide, memory of a stage."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.source import open_source
from engine.model.weights import load_weights
from engine.topology import split_layers
from tests.reference import Reference
from tests.service import FP32, serve
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.process

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A checkpoint with tied embeddings without a head, with an equal one, and with another one."""
    folder = tmp_path_factory.mktemp("tied")
    plain = make_tiny(folder / "plain", tie_word_embeddings=True)
    tensors = load_file(plain / "model.safetensors")
    assert HEAD not in tensors
    heads = {"equal": tensors[EMBEDDING].clone(), "differing": torch.randn_like(tensors[EMBEDDING])}
    for name, head in heads.items():
        shutil.copytree(plain, folder / name)
        save_file(tensors | {HEAD: head}, folder / name / "model.safetensors", {"format": "pt"})
    return folder, Reference(plain)


@pytest.mark.parametrize("kind", ["plain", "equal", "differing"])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_a_tied_head_is_the_embedding_on_every_stage_count(tied, kind, pp_size):
    # sglang#15890, sglang#21347, sglang#6908: the last stage projects with weights that nobody filled.
    source = open_source(tied[0] / kind)
    embedding = load_file(tied[0] / kind / "model.safetensors")[EMBEDDING]
    start, stop = split_layers(5, pp_size)[-1]
    weights = load_weights(source, range(start, stop), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(weights.head, embedding)


def test_tied_models_and_seeded_samples_are_the_same_over_any_number_of_stages(tied):
    folder, reference = tied
    prompts = reference.clear_prompts([30] * 4, 24, seed=30)
    sampling = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5}
    sampled = []
    for pp_size, kind in ((1, "plain"), (2, "differing"), (3, "equal"), (5, "plain")):
        flags = ("--pp-size", str(pp_size), "--max-total-tokens", "4096")
        with serve("--model-path", str(folder / kind), *FP32, *flags) as service:
            # Cold, then from the cache.
            for _ in range(2):
                answers = [service.generate(prompt, 24) for prompt in prompts]
                assert [answer["output_ids"] for answer in answers] == reference.ids(prompts, 24)
            assert {answer["meta_info"]["cached_tokens"] for answer in answers} == {16}
            sampled.append([service.generate(p, 24, sampling_params=sampling)["output_ids"] for p in prompts])
            service.check_idle()
    assert sampled[0] != reference.ids(prompts, 24)
    assert all(one == sampled[0] for one in sampled)


def peak_bytes(pid):
    """The most memory that a process has ever held."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])


def test_a_stage_holds_its_own_layers_and_never_more(dense, tmp_path):
    # sglang#21070, sglang#20202, PiPPy#723, vllm-metal#583: every stage builds or reads the whole model.
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 64}
    deep = make_tiny(tmp_path, num_hidden_layers=40, shard_size="20MB", **shape)
    size = sum(file.stat().st_size for file in deep.glob("*.safetensors"))
    assert len(list(deep.glob("*.safetensors"))) > 4
    flags = (*FP32, "--max-total-tokens", "1024")
    with serve("--model-path", str(dense.folder), *flags) as service:
        fixed = peak_bytes(service.living()["rank 0"])  # libraries, and a model of one megabyte
    with serve("--model-path", str(deep), *flags, "--pp-size", "4") as service:
        stages = [service.living()[f"rank {rank}"] for rank in range(4)]
        own = [peak_bytes(pid) - fixed for pid in stages]
    assert max(own) < size / 4 + 30e6, f"{own} bytes beyond {fixed}, of a model of {size}"
