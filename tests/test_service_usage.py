"""Wrong flags: each is one line that names the flag, the value and what is allowed, with exit code 2, at once."""

import json
import shutil
import socket
import time

import pytest

from tests.service import run_to_end

pytestmark = pytest.mark.process

AT_ONCE_S = 10.0
"""Two seconds on an idle machine; no weight is read and no rank started, which takes longer than this on a busy one."""


def refused(*flags, **environment):
    """The one line with which a command line is refused."""
    started_at = time.monotonic()
    code, lines = run_to_end(*flags, **environment)
    assert code == 2, lines
    assert time.monotonic() - started_at < AT_ONCE_S
    (line,) = lines
    return line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pp-siz", "2"], ["--pp-siz", "did you mean --pp-size?"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--pp-size", "0"], ["--pp-size 0", "from 1"]),
        (["--pp-size", "two"], ["--pp-size two", "whole number"]),
        (["--pp-size", "6"], ["--pp-size 6", "5 layers"]),
        (["--pp-size", "3", "--pp-layer-partition", "4,1"], ["4,1", "2 counts", "is 3"]),
        (["--pp-size", "3", "--pp-layer-partition", "5,0,0"], ["5,0,0", "at least 1"]),
        (["--pp-size", "3", "--pp-layer-partition", "3,1,2"], ["3,1,2", "sums to 6", "5 layers"]),
        (["--pp-size", "3", "--pp-layer-partition", "a,b"], ["a,b", "whole numbers"]),
        (["--tp-size", "2"], ["--tp-size 2"]),
        (["--dtype", "fp8"], ["--dtype fp8", "float32"]),
        (["--page-size", "16", "--chunked-prefill-size", "8"], ["--chunked-prefill-size 8", "16"]),
        (["--max-total-tokens", "3"], ["--max-total-tokens 3", "16"]),
        (["--port", "99999"], ["--port 99999", "65535"]),
        (["--host", "192.0.2.7"], ["--host 192.0.2.7"]),
        (["--drain-timeout", "nan"], ["--drain-timeout nan"]),
        (["--link-address", "127.0.0.1"], ["LOCKSTEP_SECRET"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_a_wrong_value_is_one_line(dense, flags, words):
    # sglang#9798, sglang#13282, vllm#6114, mlx-lm#1688, TRT-LLM#3827: layers that do not divide, partitions that crash.
    line = refused("--model-path", str(dense.folder), *flags)
    assert all(word in line for word in words), line


def test_a_port_in_use_is_named(dense):
    # sglang#34755, sglang#29547
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in refused("--model-path", str(dense.folder), "--port", port)


def test_models_that_are_none_are_refused(dense, tmp_path):
    # sglang#21435 and its kin: a checkpoint that is a pickle is never opened.
    assert "/no/such/folder" in refused("--model-path", "/no/such/folder")
    assert "config.json" in refused("--model-path", str(tmp_path))

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    line = refused("--model-path", str(other))
    assert "GPT2LMHeadModel" in line and "LlamaForCausalLM" in line

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(dense.folder / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    assert "pickled" in refused("--model-path", str(pickled))
    assert "pickled" in refused("--model-path", str(pickled / "pytorch_model.bin"))

    cut = shutil.copytree(dense.folder, tmp_path / "cut")
    whole = (dense.folder / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refused("--model-path", str(cut))


def test_nonsense_in_the_environment_is_refused(dense):
    faults = '{"flop": 1}'
    assert "LOCKSTEP_FAULTS" in refused("--model-path", str(dense.folder), LOCKSTEP_FAULTS=faults)
    assert "LOCKSTEP_ROLE" in refused("--model-path", str(dense.folder), LOCKSTEP_ROLE="emperor")
