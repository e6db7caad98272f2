"""Has torch's kernels work until numba's are compiled, so that a start never waits for that.

numba compiles each kernel once on a machine, which takes half a minute for all of them, and keeps
them beside their source. A file there says that all were compiled, from this source, for this
processor. Where it is missing, one process of the machine has them compiled by a process of its
own, and all others look whether they are ready. Both kinds of kernels give the same bits and keep
the same arrays, so one takes the other's place between any two calls.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from tensorwire.parameter_server.opaque import Untyped

_logger = logging.getLogger("tensorwire")

WORKER: Final = "RPC_WORKER_NAME"
"""The variable that workers of rpcrun have, whose start others wait for."""
_LOADING: Final = "tensorwire.parameter_server.server.loading"
_SECONDS_BETWEEN_LOOKS: Final = 0.5
_SECONDS_TO_END: Final = 5.0


def are_compiled() -> bool:
    """True if numba has compiled all kernels on this machine, as they are now."""
    return _note().is_file()


def note_compiled() -> None:
    """Notes on this machine that numba has compiled all kernels."""
    note = _note()
    with contextlib.suppress(OSError):
        for former in note.parent.glob("kernels-*.compiled"):
            former.unlink(missing_ok=True)
        note.touch()


@functools.cache
def _note() -> Path:
    told = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("numba_*.py")):
        told.update(source.read_bytes())
    told.update(importlib.metadata.version("numba").encode())
    told.update(sys.version.encode())
    told.update(_processor().encode())
    return _folder() / f"kernels-{told.hexdigest()[:16]}.compiled"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _folder() -> Path:
    """The folder in which numba keeps what it has compiled, if this user can write there."""
    beside = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__")
    with contextlib.suppress(OSError):
        beside.mkdir(exist_ok=True, parents=True)
    if os.access(beside, os.W_OK):
        return beside
    return Path(tempfile.gettempdir(), f"tensorwire-{os.getuid()}-{_name(beside)}")


def _name(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


class Meanwhile:
    """The module of torch's kernels, and of numba's once these are compiled and loaded.

    Args:
        now: torch's.
        later: the name of numba's.
    """

    def __init__(self, now: ModuleType, later: str) -> None:
        self._now, self._later = now, later
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rpc-ps-kernels", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _logger.warning(
            "the parameter server's kernels are compiled in the background, which takes half a "
            "minute the first time on a machine; until then slower ones give the same results"
        )

    def __getattr__(self, name: str) -> Untyped:
        return getattr(self._now, name)

    @property
    def has_changed(self) -> bool:
        """True if numba's kernels work by now."""
        return self._now.__name__ == self._later

    def close(self) -> None:
        """Stops looking, and ends the compilation if this process runs it."""
        self._over.set()
        self._thread.join(_SECONDS_TO_END)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not are_compiled() and not self._over.wait(_SECONDS_BETWEEN_LOOKS):
                with _being_the_one() as is_the_one:
                    if is_the_one and not self._compile():
                        return
            if not self._over.is_set():
                later = importlib.import_module(self._later)
                importlib.import_module(_LOADING).exercise(later)
                self._now = later
        except Exception:
            _logger.exception("the slower kernels go on: numba's cannot be used")

    def _compile(self) -> bool:
        """Has a process compile the kernels; False if it cannot."""
        environment = {name: value for name, value in os.environ.items() if name != WORKER}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {_LOADING} import main; main()"],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if self._over.wait(_SECONDS_BETWEEN_LOOKS):
                    return False
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            _logger.error("the slower kernels go on: numba's could not be compiled")
        return process.returncode == 0


@contextlib.contextmanager
def _being_the_one() -> Iterator[bool]:
    """True for one process of this machine at a time."""
    folder = _folder()
    folder.mkdir(exist_ok=True, parents=True)
    with open(folder / "kernels.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield not are_compiled()
