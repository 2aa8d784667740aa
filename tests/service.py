"""A whole service for tests: started as a user starts it, talked to over HTTP, and gone without a trace at its end.

`serve` runs `python server.py` (or torchrun) in a folder for temporary files of its own and marks its processes by an
environment variable, so that each of them is found whoever its parent is by now. `Service` holds the questions that
every case of a public fault ends with: are the books of all stages equal and balanced (`check_idle`), does it still
answer as it did at first (`check_alive`). `Stream` is a client that reads one event stream in a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parent.parent
MARK = "LOCKSTEP_TEST_MARK"
PATIENCE_S = 60.0
"""How long tests wait for what must come; long, since the machine may be busy. A hang is what they look for."""
FP32 = ("--dtype", "float32")
ALIVE_PROMPT = [5, 6, 7]
TIERS = ("device", "host")
"""Whose books a stage shows; the host's are null without a host tier."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait for something to become true and return it; fail with `what` if it does not."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_to_end(*flags: str, timeout_s: float = PATIENCE_S, **environment: str) -> tuple[int, list[str]]:
    """Run `python server.py` with flags with which it cannot live; returns its exit code and lines of stderr."""
    command = [sys.executable, str(ROOT / "server.py"), "--port", "0", *flags]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


@contextlib.contextmanager
def serve(
    *flags: str,
    torchrun: int = 0,
    faults: dict[str, Any] | None = None,
    probe: bool = True,
    wait: bool = True,
    **environment: str,
) -> Iterator[Service]:
    """Start a service on a free port and wait until it is ready; at the end nothing of it is left, or the test fails.

    `torchrun` is a number of ranks under torchrun; 0 means `python server.py`. With `probe` the answer to
    `check_alive` is taken at once. Without `wait` the service is handed over while it starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="ls-"))  # short: unix sockets need short paths
    mark = uuid.uuid4().hex
    variables = {MARK: mark, "TMPDIR": str(folder), **environment}
    if faults is not None:
        variables["LOCKSTEP_FAULTS"] = json.dumps(faults)
    start = [*TORCHRUN, "--nproc-per-node", str(torchrun)] if torchrun else [sys.executable]
    port = [] if "--port" in flags else ["--port", "0"]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*start, str(ROOT / "server.py"), *port, *flags],
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=_die_with_tests,
        )
    service = Service(process, mark, folder, "torchrun" if torchrun else "front end")
    try:
        if wait:
            service.wait_ready()
            if probe:
                service.check_alive()
        yield service
    except BaseException:
        print(f"---- stderr of the service ----\n{service.stderr}", file=sys.stderr)
        raise
    finally:
        left = service.end()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes outlived their service: {left}"


class Service:
    """One running service."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, folder: Path, role: str) -> None:
        """`role` is what the started process is: `front end` or `torchrun`."""
        self.process = process
        self.folder = folder
        """Its folder for temporary files, with its run folder while it lives, and its standard error."""
        self.url = ""
        self.client = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))
        self._mark = mark
        self._own_role = role
        self._alive_ids: list[int] | None = None

    # ---- processes ----

    @property
    def stderr(self) -> str:
        """All that its processes have said so far."""
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of standard error."""
        return self.stderr.rstrip().splitlines()[-1]

    def wait_ready(self) -> None:
        """Wait for the line that says where it serves."""

        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, f"ended with {self.process.poll()} before it was ready"
            return re.search(r"ready on (http\S+)", self.stderr)

        self.url = until(ready, "the service is ready")[1]
        self.client.base_url = httpx.URL(self.url)

    def living(self) -> dict[str, int]:
        """Process ids of all that live, by role: `front end`, `rank 0`, ..."""
        found: dict[str, int] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[self._role(process.pid, environment)] = process.pid
        return found

    def _role(self, pid: int, environment: dict[str, str]) -> str:
        if pid == self.process.pid:
            return self._own_role
        is_front_end = environment.get("LOCKSTEP_ROLE") == "front end"
        return "front end" if is_front_end else f"rank {environment.get('RANK')}"

    def signal(self, role: str, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self.living()[role], number)

    def terminate(self) -> None:
        """SIGTERM to the process that was started."""
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code of the process that was started; every other one must be gone as well soon after."""
        code = self.process.wait(patience_s)
        until(lambda: not self.living(), f"no process is left: {self.living()}", 20.0)
        return code

    def run_folders(self) -> list[Path]:
        """Run folders that exist."""
        return list(self.folder.glob("lockstep-*"))

    def end(self) -> dict[str, int]:
        """Kill the process that was started; returns which others did not follow it, after killing those too."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.living(), "all are gone", 20.0)
        left = self.living()
        for pid in left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    # ---- questions ----

    def post(self, path: str, body: Any = None, **named: Any) -> httpx.Response:
        """POST JSON."""
        return self.client.post(path, json=body, **named)

    def generate(self, prompt: list[int] | str, n: int, **body: Any) -> dict[str, Any]:
        """One native answer: greedy, `n` tokens whatever they are, unless `sampling_params` says otherwise."""
        response = self.post("/generate", native_body(prompt, n, **body))
        assert response.status_code == 200, response.text
        return response.json()

    def generate_n(self, prompt: list[int], n: int, **body: Any) -> list[dict[str, Any]]:
        """The same where `sampling_params` asks for several sequences."""
        answers: Any = self.generate(prompt, n, **body)
        return answers

    def gen(self, prompt: list[int], n: int) -> list[int]:
        """Greedy ids that continue a prompt."""
        return self.generate(prompt, n)["output_ids"]

    def gen_all(self, prompts: Iterable[list[int]], n: int, at_once: int = 64) -> list[list[int]]:
        """The same for many prompts, `at_once` of them at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.gen(prompt, n), prompts))

    def stream(self, prompt: list[int] | str, n: int, **body: Any) -> Stream:
        """A client that begins to read at once."""
        return Stream(self.url, native_body(prompt, n, stream=True, **body))

    def health(self) -> int:
        """Status of `/health`; 0 when nobody answers."""
        try:
            return self.client.get("/health", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def info(self) -> dict[str, Any]:
        """`/server_info`. Its stages must be equal and balanced at any moment: they are of one step."""
        info = self.client.get("/server_info").json()
        stages = info["stages"]
        for stage in stages:
            for books in (stage[tier] for tier in TIERS if stage[tier]):
                spread = books["available"] + books["evictable"] + books["protected"]
                assert spread == books["capacity"] and min(books.values()) >= 0, stage
            for name in (*TIERS, "step", "digest", "running", "waiting", "counters"):
                assert stage[name] == stages[0][name], f"stages differ in {name}: {stages}"
        return info

    def stats(self) -> dict[str, Any]:
        """The state that all stages share."""
        return self.info()["stages"][0]

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """Meanwhile the cache is flushed every few milliseconds: refused while anything is under way, and harmless."""
        codes, over = [], threading.Event()

        def flush() -> None:
            while not over.wait(0.005):
                codes.append(self.post("/flush_cache").status_code)

        flusher = threading.Thread(target=flush)
        flusher.start()
        try:
            yield
        finally:
            over.set()
            flusher.join()
        assert 400 in codes and set(codes) <= {200, 400}

    def check_idle(self, patience_s: float = 5.0) -> dict[str, Any]:
        """C-IDLE: soon after the last answer nothing is protected, running, waiting or copied, on any stage."""

        def idle() -> dict[str, Any] | None:
            now = self.stats()
            busy = now["running"] or now["waiting"] or now["counters"]["copies_under_way"]
            protected = any(now[tier]["protected"] for tier in TIERS if now[tier])
            return None if busy or protected else now

        return until(idle, f"idle: {self.stats()}", patience_s)

    def check_alive(self) -> None:
        """C-ALIVE: the same short answer as just after the start, and healthy."""
        ids = self.gen(ALIVE_PROMPT, 4)
        self._alive_ids = self._alive_ids or ids
        assert ids == self._alive_ids
        assert self.health() == 200


class Stream(threading.Thread):
    """A client of one event stream. What it saw may be read at any time; `close` makes it leave."""

    def __init__(self, url: str, body: dict[str, Any], path: str = "/generate") -> None:
        super().__init__(daemon=True)
        self.status: int | None = None
        self.events: list[dict[str, Any]] = []
        """All but the terminator and errors."""
        self.error: dict[str, Any] | None = None
        self.terminators = 0
        self.ended_at: float | None = None
        address = httpx.URL(url)
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=2 * PATIENCE_S)
        self._connection.connect()
        self._socket = self._connection.sock
        self._request = (path, json.dumps(body), {"content-type": "application/json"})
        self.start()

    def run(self) -> None:
        """Read to the end, whatever that is."""
        try:
            self._connection.request("POST", *self._request)
            response = self._connection.getresponse()
            self.status = response.status
            if self.status != 200:
                self.error = json.loads(response.read())["error"]
                return
            for line in response:
                if line.startswith(b"data: "):
                    self._take(line[6:].strip())
        except (OSError, http.client.HTTPException):
            pass  # the connection broke, which the absence of a terminator says
        finally:
            self.ended_at = time.monotonic()
            self._connection.close()

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.terminators += 1
            return
        event = json.loads(data.decode())
        if "error" in event:
            self.error = event["error"]
        else:
            self.events.append(event)

    @property
    def output_ids(self) -> list[int]:
        """Tokens received so far."""
        return self.events[-1]["output_ids"] if self.events else []

    @property
    def finish(self) -> str | None:
        """Why the sequence ended, once it did."""
        reason = self.events[-1]["meta_info"]["finish_reason"] if self.events else None
        return reason and reason["type"]

    @property
    def failed(self) -> bool:
        """Ended by an error or by a connection that closed before the terminator."""
        return self.ended_at is not None and (self.error is not None or not self.terminators)

    def wait_tokens(self, count: int) -> Stream:
        """Wait until so many tokens have come."""
        until(lambda: len(self.output_ids) >= count or not self.is_alive(), f"{count} tokens")
        assert len(self.output_ids) >= count, f"ended after {len(self.output_ids)} tokens: {self.error}"
        return self

    def wait_end(self, patience_s: float = 2 * PATIENCE_S) -> Stream:
        """Wait for the end, whatever it is."""
        self.join(patience_s)
        assert not self.is_alive(), f"a stream hangs after {len(self.output_ids)} tokens"
        return self

    def close(self) -> None:
        """Close the connection, like a client that goes away."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def native_body(prompt: list[int] | str, n: int, **body: Any) -> dict[str, Any]:
    """A body for `/generate`: greedy and without end-of-sequence, unless `sampling_params` says otherwise."""
    asked = body.pop("sampling_params", {})
    sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True} | asked
    return {("text" if isinstance(prompt, str) else "input_ids"): prompt, "sampling_params": sampling} | body


def _die_with_tests() -> None:
    """In the child: SIGKILL when the test run ends, so that a run that is killed leaves no service behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
