"""The key of the workers' group: made for the job, or the one in a file of the user's.

Workers find it through ``RPC_GROUP_KEY_FILE``: a file that only this user can read. It is
never on a command line, in the value of a variable, in the store or in a log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rpc.extend import KEY_FILE, read_group_key

_BYTES = 32
_MOST_NAMES = 100


class GroupKeyError(ValueError):
    """There is no key where one is needed, or it cannot be used; says what to do."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key of a job's group.

    Args:
        path: of the file that holds it; empty where there is none.
        is_ours: it was made for this job, and goes with it.
    """

    path: str
    is_ours: bool

    def read(self) -> bytes:
        """The key; empty where there is none."""
        return read_group_key({KEY_FILE: self.path})


def choose_key(file: str | None, job: str, is_here_alone: bool, is_insecure: bool) -> GroupKey:
    """Decides which key the group has.

    Args:
        file: what ``--group-key-file`` says, or the environment.
        job: names the job among those of this machine: agents of one job share a key.
        is_here_alone: nothing listens beyond this machine.
        is_insecure: the user accepts a group without a key.

    Raises:
        GroupKeyError: a key is needed, or cannot be used.
    """
    if file:
        key = GroupKey(str(Path(file).absolute()), False)
        try:
            key.read()
        except ValueError as error:
            raise GroupKeyError(f"--group-key-file={file}: {error}") from error
        return key
    if is_here_alone:
        return _key_of_machine(job)
    if is_insecure:
        return GroupKey("", False)
    raise GroupKeyError(
        "this job listens beyond this machine, where strangers may connect, and its group has no "
        "key. Make one on one machine (head -c 32 /dev/urandom | base64 > key; chmod 600 key), "
        "copy it to the others and give each rpcrun --group-key-file key; or give --insecure"
    )


def _key_of_machine(job: str) -> GroupKey:
    """A file of mode 0600, made by the first agent of a job that looks for it.

    Where everybody may make files, somebody else may have made one of that name: such a one is
    passed over, by all agents alike.
    """
    digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:16]
    folder = _own_folder() or tempfile.gettempdir()
    made, whole = tempfile.mkstemp(prefix="rpcrun_key_", dir=folder)
    try:
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(_BYTES))
        for number in range(_MOST_NAMES):
            path = os.path.join(folder, f"rpcrun_key_{digest}" + (f"_{number}" if number else ""))
            try:
                os.link(whole, path)  # fails if another agent was faster
                return GroupKey(path, True)
            except FileExistsError:
                if _is_own(path):
                    key = GroupKey(path, False)
                    key.read()
                    return key
    finally:
        os.unlink(whole)
    raise GroupKeyError(
        f"{_MOST_NAMES} files in {folder} have the names that the job's key would have, and are "
        "another user's. Set XDG_RUNTIME_DIR to a folder of your own, or give --group-key-file"
    )


def _own_folder() -> str | None:
    """A folder in which only this user can make files."""
    memory, home = os.environ.get("XDG_RUNTIME_DIR"), os.path.expanduser("~")
    for parent, name in ((memory, ""), (home if os.path.isabs(home) else None, ".cache")):
        if not parent:
            continue
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path)
            is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid == os.geteuid() and not is_shared and os.access(path, os.W_OK):
                return path
    return None


def _is_own(path: str) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:  # its job has just ended; the next name will do
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
