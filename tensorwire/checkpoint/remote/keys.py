"""The reader key: derived from the group's key, it lets somebody read versions and nothing else."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from rpc.extend import KEY_FILE, read_group_key

_SALT: Final = b"tensorwire"
_INFO: Final = b"reader key of published versions"


def reader_key(group_key: bytes) -> bytes:
    """Derives the key with which others may read versions from the key of the group.

    It is HKDF-SHA256 (RFC 5869) of the group's key. The group's key cannot be computed from it, so
    who has only this can neither join the group nor use its store.

    Args:
        group_key: the group's.

    Returns:
        64 hexadecimal digits, as they stand in a key file.

    Raises:
        ValueError: ``group_key`` is empty.
    """
    if not group_key:
        raise ValueError("reader_key: the group has no key to derive one from")
    extracted = hmac.digest(_SALT, group_key, hashlib.sha256)
    return hmac.digest(extracted, _INFO + b"\x01", hashlib.sha256).hex().encode()


def read_reader_key(path: str | os.PathLike[str]) -> bytes:
    """Reads a reader key from a file that only its owner may read.

    Raises:
        ValueError: it cannot be read, others may read it, or it holds no key.
    """
    return read_group_key({KEY_FILE: os.fspath(path)})


def write_reader_key(path: str | os.PathLike[str], key: bytes) -> None:
    """Writes a reader key into a new file that only this user can read; replaces an older file.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(key + b"\n")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
