"""The folder in which this user's running jobs can be found, and their sockets.

The folder is this user's alone, mode 0700; a folder that is somebody else's, or that others may
enter, is refused. Files that a killed agent left there are passed over and deleted.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SOCKET: Final = "sock"
_LONGEST_PARENT: Final = 60
"""A Unix socket's path has at most 107 bytes."""


class JobNotFoundError(RuntimeError):
    """There is no such job of this user on this machine, or there are several."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job of this user that has an agent on this machine.

    Args:
        job: its id.
        pid: of the agent.
        path: of the agent's socket.
    """

    job: str
    pid: int
    path: str


def home() -> Path:
    """The folder, made if it is not there.

    Raises:
        PermissionError: it is somebody else's, or others may enter it.
    """
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
    parent = next(each for each in places if os.path.isdir(each) and len(each) < _LONGEST_PARENT)
    folder = Path(parent) / f"tensorwire-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user's of mode 0700, as whoever writes there is "
            "taken for a job of his; delete it, or set XDG_RUNTIME_DIR"
        )
    return folder


def socket_path(job: str) -> str:
    """A path for the socket of this process's agent; its folder is made.

    Raises:
        PermissionError: see :func:`home`.
    """
    folder = home() / f"{os.getpid()}-{zlib.crc32(job.encode()):08x}"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "job").write_text(job)
    return str(folder / _SOCKET)


def forget(path: str) -> None:
    """Deletes the folder of a socket."""
    folder = Path(path).parent
    with contextlib.suppress(OSError):
        for each in list(folder.iterdir()):
            each.unlink()
        folder.rmdir()


def running_jobs() -> list[RunningJob]:
    """The jobs of this user with an agent on this machine, the oldest first."""
    jobs: list[RunningJob] = []
    for folder in sorted(home().iterdir(), key=lambda each: each.stat().st_mtime):
        pid, _, _ = folder.name.partition("-")
        path = folder / _SOCKET
        if not pid.isdecimal() or not path.exists():
            continue
        if not os.path.exists(f"/proc/{pid}"):
            forget(str(path))
            continue
        jobs.append(RunningJob((folder / "job").read_text(), int(pid), str(path)))
    return jobs


def find_job(wanted: str | None) -> RunningJob:
    """The job with that id, or the only one.

    Args:
        wanted: the id, or the beginning of one; None for the only job there is.

    Raises:
        JobNotFoundError: there is none, or there are several; lists them.
    """
    jobs = running_jobs()
    fitting = [job for job in jobs if wanted is None or job.job.startswith(wanted)]
    if len(fitting) == 1 or (fitting and len({job.job for job in fitting}) == 1):
        return fitting[-1]
    listed = ", ".join(f"{job.job} (process {job.pid})" for job in jobs) or "none"
    if not fitting:
        what = "no job of this user runs" if wanted is None else f"no job {wanted!r} of this user"
        raise JobNotFoundError(f"{what} on this machine; there are: {listed}")
    raise JobNotFoundError(f"several jobs run here, name one: {listed}")
