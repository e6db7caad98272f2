"""Gives ids to whatever is known by a name: the same in every process, and for good."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def hashed(names: Iterable[str | bytes], salt: str = "") -> Tensor:
    """Gives each name an id: 64 bits of its BLAKE2b hash.

    Two of a million names get the same id once in forty million times.

    Args:
        names: texts, which are hashed as UTF-8, or bytes.
        salt: names with another salt get other ids, so that several features can share a table;
            at most 16 bytes.

    Returns:
        int64, one for each name.

    Raises:
        TypeError: a name is neither text nor bytes, or ``names`` is a single one.
        ValueError: the salt is too long.

    Example::

        rows = table.pull(ps.hashed(["paris", "london"], salt="city"))
    """
    if isinstance(names, (str, bytes)):
        raise TypeError(f"hashed: names={names!r} is one name, not several; give [{names!r}]")
    key = salt.encode()
    if len(key) > hashlib.blake2b.SALT_SIZE:
        raise ValueError(f"hashed: salt={salt!r} has more than 16 bytes")
    digests = b"".join(
        hashlib.blake2b(_bytes(name), digest_size=8, salt=key).digest() for name in names
    )
    if not digests:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64)


def _bytes(name: object) -> bytes:
    if isinstance(name, str):
        return name.encode()
    if isinstance(name, bytes):
        return name
    raise TypeError(f"hashed: {name!r} is a {type(name).__name__}, neither text nor bytes")
