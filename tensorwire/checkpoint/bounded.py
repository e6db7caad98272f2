"""Reads files that anybody may have put there: regular ones only, of a size that was agreed on.

A named pipe, a device or a folder in the place of a file is refused without waiting for it, and a
file that is too large, or JSON that is nested too deeply, before it takes memory.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorwire.checkpoint.errors import DamagedCheckpointError

MANIFEST_BYTES: Final = 128 << 20
"""The most bytes of a manifest, which are parsed at once."""
DEPTH: Final = 200
"""The most levels of JSON in each other."""

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Opens a regular file for reading: its descriptor, and its size in bytes.

    Raises:
        DamagedCheckpointError: it is not there, cannot be read, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpointError(f"{path} is no regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def read(path: Path, most: int) -> bytes:
    """The content of a regular file.

    Raises:
        DamagedCheckpointError: it is not there, cannot be read, is no regular file, or has more
            than ``most`` bytes.
    """
    with opened(path) as (descriptor, size):
        if size > most:
            raise DamagedCheckpointError(f"{path} has {size} bytes; at most {most} are read")
        parts = []
        try:
            while size > 0 and (part := os.read(descriptor, size)):
                parts.append(part)
                size -= len(part)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from None
    return b"".join(parts)


def parse(data: bytes, where: str) -> Any:
    """The value that JSON text stands for.

    Raises:
        DamagedCheckpointError: it is not JSON, nested too deeply, or has a name twice.
    """
    if depth(data) > DEPTH:
        raise DamagedCheckpointError(f"{where} has more than {DEPTH} levels in each other")
    try:
        return json.loads(data, object_pairs_hook=_without_twins, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not JSON: {error}") from None


def depth(data: bytes) -> int:
    """The levels of JSON text in each other."""
    marks = np.frombuffer(_STRING.sub(b"", data), np.uint8)
    opening = (marks == ord("[")) | (marks == ord("{"))
    closing = (marks == ord("]")) | (marks == ord("}"))
    marks = marks[opening | closing]
    steps = np.where((marks == ord("[")) | (marks == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twins = sorted({name for name, _ in pairs if sum(name == n for n, _ in pairs) > 1})
        raise ValueError(f"{', '.join(map(repr, twins))[:200]} stands there twice")
    return document


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
