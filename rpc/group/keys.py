"""The group's secret: where a worker reads it, and where it must not stand.

A secret on a command line or in an environment variable can be read by other users, by
crash reports and by every child process. So the environment says only *where* it is: a
file that nobody else may read, or a descriptor that the launcher left open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

KEY_FILE = "RPC_GROUP_KEY_FILE"
"""Names the variable with the path of a file that holds the key."""
KEY_DESCRIPTOR = "RPC_GROUP_KEY_FD"
"""Names the variable with the number of an inherited descriptor of such a file."""

_FEWEST_BYTES = 16
_MOST_BYTES = 4096
_LINE_ENDS = b"\r\n"


def read_group_key(variables: Mapping[str, str]) -> bytes:
    """Reads the group's key from where the environment says it is.

    Args:
        variables: the process's environment. ``RPC_GROUP_KEY_FD`` goes before
            ``RPC_GROUP_KEY_FILE``.

    Returns:
        The key; empty if neither variable is set.

    Raises:
        ValueError: the file cannot be read, others may read it, or it holds no key.
    """
    descriptor, path = variables.get(KEY_DESCRIPTOR), variables.get(KEY_FILE)
    if descriptor:
        return _read_inherited(descriptor)
    return read_key_file(path) if path else b""


def read_key_file(path: str) -> bytes:
    """Reads a key from a file that only its owner may read.

    A line end at the end of the file is no part of the key.

    Raises:
        ValueError: the file cannot be read, others may read it, or it holds no key.
    """
    what = f"the key file {path!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}") from None
    try:
        _check_mode(what, os.fstat(descriptor))
        return _checked(what, _read(descriptor).rstrip(_LINE_ENDS))
    finally:
        os.close(descriptor)


def share_group_key(group_key: bytes) -> int:
    """Puts a key into a nameless file, for child processes to inherit.

    Args:
        group_key: the key.

    Returns:
        Its descriptor, which the caller closes. Pass it to a child under the same number,
        with ``RPC_GROUP_KEY_FD`` set to that.
    """
    descriptor = os.memfd_create("group-key", os.MFD_CLOEXEC)
    os.fchmod(descriptor, stat.S_IRUSR)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(group_key)
    return descriptor


def _read_inherited(number: str) -> bytes:
    what = f"{KEY_DESCRIPTOR}={number!r}"
    try:
        descriptor = int(number)
        _check_kind(what, os.fstat(descriptor))
        os.set_inheritable(descriptor, False)  # programs that this one starts need it not
    except (ValueError, OverflowError):
        raise ValueError(f"{what} is not the number of a file descriptor") from None
    except OSError as error:
        raise ValueError(f"{what} is no descriptor of a file: {error.strerror}") from None
    return _checked(what, _read(descriptor))


def _check_kind(what: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file")


def _check_mode(what: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{what} belongs to user {status.st_uid}; it must be yours")
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{what} has mode {mode:04o}, so that others may read it; chmod 600 it")


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _MOST_BYTES + len(_LINE_ENDS) + 1, 0)


def _checked(what: str, key: bytes) -> bytes:
    if not _FEWEST_BYTES <= len(key) <= _MOST_BYTES:
        raise ValueError(
            f"{what} holds {len(key)} bytes; a key has {_FEWEST_BYTES} to {_MOST_BYTES}, such as "
            "those of `head -c 32 /dev/urandom | base64`"
        )
    return key
