"""Checksums of bytes, as text that names its algorithm: ``"xxh3_128:9f2a..."``.

XXH3 (https://xxhash.com) takes a few percent of the time that writing takes; it finds damage, not
forgery. Where the library xxhash is missing, BLAKE2b of Python's own ``hashlib`` is written. A
reader takes either, if it has the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from tensorwire.checkpoint.errors import CheckpointError, DamagedCheckpointError

_XXH3: Final = "xxh3_128"
_BLAKE2: Final = "blake2b"


class Hash(Protocol):
    """A checksum that is being made, such as those of ``hashlib``."""

    def update(self, data: Any, /) -> object:
        """Takes more bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, as text."""


class Checksum:
    """Makes a checksum of bytes that come one after the other.

    Args:
        kind: the algorithm; default the fastest that is there.

    Raises:
        CheckpointError: the library for that algorithm is not installed.
        DamagedCheckpointError: there is no such algorithm.
    """

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind or (_XXH3 if _xxhash() is not None else _BLAKE2)
        self._hash: Hash = _new(self._kind)()

    def update(self, data: memoryview) -> None:
        """Takes more bytes."""
        self._hash.update(data)

    @property
    def text(self) -> str:
        """The checksum of all bytes so far."""
        return f"{self._kind}:{self._hash.hexdigest()}"


def checksum_of(data: memoryview, kind: str | None = None) -> str:
    """The checksum of these bytes.

    Args:
        data: the bytes.
        kind: the algorithm; default the fastest that is there.

    Raises:
        CheckpointError: the library for that algorithm is not installed.
        DamagedCheckpointError: there is no such algorithm.
    """
    made = Checksum(kind)
    made.update(data)
    return made.text


def fits(text: str, data: memoryview) -> bool:
    """Says whether a checksum is that of these bytes.

    Raises:
        CheckpointError: the library for its algorithm is not installed.
        DamagedCheckpointError: it is of no known algorithm.
    """
    return checksum_of(data, text.partition(":")[0] or "none") == text


def _new(kind: str) -> Callable[[], Hash]:
    if kind == _BLAKE2:
        return lambda: hashlib.blake2b(digest_size=16)
    if kind != _XXH3:
        raise DamagedCheckpointError(f"there are no checksums of the kind {kind[:40]!r}")
    library = _xxhash()
    if library is None:
        raise CheckpointError(
            f"the checksums are of the kind {kind}, for which the library xxhash is needed: "
            "pip install 'tensorwire[checkpoint]'"
        )
    made: Callable[[], Hash] = library.xxh3_128
    return made


def _xxhash() -> Any:
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash
