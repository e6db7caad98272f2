"""Bytes that somebody made up: random ones, and right ones that were changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

_EDGES = (0, 1, 0x7F, 0x80, 0xFF)


def changed(draw: random.Random, samples: Sequence[bytes]) -> bytes:
    """Returns bytes that are none of ``samples``, mostly one of them with a few changes."""
    if draw.random() < 0.1:
        made = draw.randbytes(draw.randrange(600))
    else:
        made = draw.choice(samples)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            made = draw.choice(_CHANGES)(draw, made)
    return made if made not in samples else made + b"\0"


def pieces(draw: random.Random, data: bytes) -> Iterator[bytes]:
    """Cuts bytes as a network might."""
    at = 0
    while at < len(data):
        size = draw.choice((1, 7, 64, 5000, len(data)))
        yield data[at : at + size]
        at += size


def _flip(draw: random.Random, data: bytes) -> bytes:
    return _put(draw, data, lambda old: old ^ 1 << draw.randrange(8))


def _edge(draw: random.Random, data: bytes) -> bytes:
    return _put(draw, data, lambda _: draw.choice(_EDGES))


def _put(draw: random.Random, data: bytes, new: Callable[[int], int]) -> bytes:
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([new(data[at])]) + data[at + 1 :]


def _number(draw: random.Random, data: bytes) -> bytes:
    """Puts a number that is often a limit over some of the bytes."""
    width = draw.choice((2, 4, 8))
    value = draw.choice((0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1, draw.getrandbits(16)))
    at = draw.randrange(len(data) + 1)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _insert(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randrange(1, 20)) + data[at:]


def _remove(draw: random.Random, data: bytes) -> bytes:
    first, second = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[second:]


def _repeat(draw: random.Random, data: bytes) -> bytes:
    first, second = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:second] + data[first:]


_CHANGES = (_flip, _flip, _edge, _number, _number, _cut, _insert, _remove, _repeat)
