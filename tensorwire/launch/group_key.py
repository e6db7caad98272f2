"""The key of the workers' group: made for the job, or the one in a file of the user's.

Workers find it through ``RPC_GROUP_KEY_FILE``: a file that only this user can read. It is
never on a command line, in an environment variable, in the store or in a log.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "RPC_GROUP_KEY_FILE"
_BYTES = 32


class GroupKeyError(ValueError):
    """There is no key where one is needed, or others can read it; says what to do."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Where the key is.

    Args:
        path: of the file; empty where there is none.
        is_ours: it was made for this job, and goes with it.
    """

    path: str
    is_ours: bool


def choose_key(file: str | None, is_here_alone: bool, is_insecure: bool) -> GroupKey:
    """The key of a job's group.

    Args:
        file: what ``--group-key-file`` says, or the environment.
        is_here_alone: nothing listens beyond this machine.
        is_insecure: the user accepts a group without a key.

    Raises:
        GroupKeyError: a key is needed, or cannot be used.
    """
    if file:
        return GroupKey(_checked(file), False)
    if is_here_alone:
        return GroupKey(_make(), True)
    if is_insecure:
        return GroupKey("", False)
    raise GroupKeyError(
        "this job listens beyond this machine, where strangers may connect, and it has no group "
        "key. Make one on one machine (head -c 32 /dev/urandom > key; chmod 600 key), copy it to "
        "the others and give each rpcrun --group-key-file key; or give --insecure"
    )


def _checked(file: str) -> str:
    path = Path(file).absolute()
    try:
        mode = path.stat().st_mode
        is_empty = not path.read_bytes()
    except OSError as error:
        raise GroupKeyError(f"--group-key-file={file}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise GroupKeyError(f"--group-key-file={file}: others can read it; chmod 600 {file}")
    if is_empty:
        raise GroupKeyError(f"--group-key-file={file}: the file is empty")
    return str(path)


def _make() -> str:
    # Made with mode 0600; in memory where that is possible, as it goes with the job.
    memory = os.environ.get("XDG_RUNTIME_DIR")
    folder = memory if memory and os.access(memory, os.W_OK) else None
    number, path = tempfile.mkstemp(prefix="rpcrun_key_", dir=folder)
    with os.fdopen(number, "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
    return path
