"""The run folder: where one service on one machine keeps its sockets, its file store and its secret.

It is made with mode 0700 in the system's folder for temporary files, and removed at the end. While its owner
lives, the owner holds a lock on a file in it; the kernel drops that lock whichever way the owner dies, and the
next service clears such folders away. Nobody else's folder is ever entered or removed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "lockstep-"
SOCKET_PATH_BYTES_MAX = 103
"""Unix socket paths have at most 107 bytes on Linux and 103 elsewhere."""
PARENT_BYTES_MAX = SOCKET_PATH_BYTES_MAX - len("/lockstep-12345678/rank1023")
UNLOCKED_AGE_S = 60.0
"""A folder without a lock file is somebody's who is just starting, unless it is older than this."""


class RunFolder:
    """One service's folder. `create` makes it (the owner), `open` checks and enters one that exists (the ranks)."""

    def __init__(self, path: Path, lock_fd: int | None) -> None:
        """Not for callers: use `create` or `open`."""
        self.path = path
        self._lock_fd = lock_fd

    @staticmethod
    def create(parent: Path | None = None) -> RunFolder:
        """Make a new folder, locked by this process, with a fresh secret; clear away those of dead services.

        Raises ValueError when the parent's path is so long that sockets inside could not be named.
        """
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if len(os.fsencode(parent)) > PARENT_BYTES_MAX:
            raise ValueError(
                f"TMPDIR {parent}: unix sockets need a shorter path; allowed are {PARENT_BYTES_MAX} bytes"
            )
        clear_dead(parent)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # The lock is taken before the file gets its name, so a lock file without a lock has a dead owner.
        lock_fd = os.open(path / "lock.new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        os.rename(path / "lock.new", path / "lock")
        secret_fd = os.open(path / "secret", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(secret_fd, "wb") as file:
            file.write(secrets.token_bytes(32))
        return RunFolder(path, lock_fd)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Enter another process' folder. Raises PermissionError unless it is ours alone."""
        check_private(path)
        return RunFolder(path, None)

    @property
    def secret(self) -> bytes:
        """The 32 random bytes by which the ranks of this service know each other."""
        return (self.path / "secret").read_bytes()

    def remove(self) -> None:
        """Remove the folder and all in it, if this process made it; twice does no harm."""
        if self._lock_fd is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None


def store_path(folder: Path) -> Path:
    """The file of the file store through which the ranks find each other."""
    return folder / "store"


def socket_path(folder: Path, rank: int) -> Path:
    """The unix socket on which a rank listens while ranks meet."""
    return folder / f"rank{rank}"


def check_private(path: Path) -> None:
    """Raise PermissionError unless `path` is a true folder that belongs to this user and to nobody else."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"run folder {path}: is not a folder")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"run folder {path}: belongs to user {found.st_uid}; allowed is {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"run folder {path}: has mode {stat.S_IMODE(found.st_mode):04o}; allowed is 0700"
        )


def clear_dead(parent: Path) -> list[Path]:
    """Remove this user's run folders whose owner is dead. Returns what was removed."""
    return [path for path in sorted(parent.glob(PREFIX + "*")) if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    try:
        check_private(path)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _remove_if_abandoned(path)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(lock_fd)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a folder whose owner died before it made the lock file."""
    try:
        old = time.time() - path.lstat().st_mtime > UNLOCKED_AGE_S
    except OSError:
        return False
    if old:
        shutil.rmtree(path, ignore_errors=True)
    return old
