"""The key of the workers' group: made for the job, or the one in a file of the user's.

Workers find it through ``RPC_GROUP_KEY_FILE``: a file that only this user can read. It is
never on a command line, in the value of a variable, in the store or in a log.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rpc.extend import KEY_FILE, read_group_key

_BYTES = 32


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
    """A file of mode 0600, made by the first agent of a job that looks for it."""
    memory = os.environ.get("XDG_RUNTIME_DIR")
    is_usable = memory is not None and os.access(memory, os.W_OK)
    folder = memory if memory and is_usable else tempfile.gettempdir()
    digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:16]
    path = os.path.join(folder, f"rpcrun_key_{digest}")
    made, whole = tempfile.mkstemp(prefix="rpcrun_key_", dir=folder)
    try:
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(_BYTES))
        os.link(whole, path)  # fails if another agent was faster
    except FileExistsError:
        key = GroupKey(path, False)
        key.read()  # which refuses one that is not this user's own
        return key
    finally:
        os.unlink(whole)
    return GroupKey(path, True)
