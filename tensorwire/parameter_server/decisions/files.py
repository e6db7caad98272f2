"""The parts of files that pushes train, and how far files are trained.

Where the data are files, a file takes the place of a batch in the account of samples (``samples``):
its number is that of the file in all epochs. It is trained in several pushes, each of which says
from where to where: *to* is a position, which means something to the program that reads the file
alone; *from* is where the push before it ended, for which the number of pushes up to there stands,
with a checksum of the position: a trainer that was told of an older state, and reads a part again
with other boundaries, may have made as many pushes and be elsewhere. A push whose part does not
begin there is not taken, so none counts twice and none is left out, whatever boundaries the next
trainer of the file chooses.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorwire.parameter_server.opaque import Json


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a file that a push trains.

    Args:
        file: its number.
        pushes: that trained the parts before.
        position: where it ends, as the program's own bytes; None if the file ends there.
        begins: the :func:`checksum` of the position where it begins; None if that is not known.
    """

    file: int
    pushes: int
    position: bytes | None
    begins: int | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A file of which a part is trained, and not all.

    Args:
        file: its number.
        pushes: that trained it.
        position: how far.
    """

    file: int
    pushes: int
    position: bytes

    def encode(self) -> list[object]:
        """Encodes it as a value of JSON."""
        return [self.file, self.pushes, base64.b64encode(self.position).decode()]

    @classmethod
    def decode(cls, value: Sequence[Json]) -> Begun:
        """The inverse of :meth:`encode`."""
        file, pushes, position = value
        return cls(int(file), int(pushes), base64.b64decode(position, validate=True))


def checksum(position: bytes | None) -> int:
    """A number that stands for a position; 0 at the beginning of a file."""
    return 0 if position is None else zlib.crc32(position) + 1


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts of one push, in which those of one file that follow on each other are one."""
    return tuple({each.file: each for each in parts}.values())


def finished(parts: Iterable[Part]) -> tuple[int, ...]:
    """The files that end with these parts."""
    return tuple(each.file for each in parts if each.position is None)


def follows(begun: Iterable[Begun], part: Part) -> bool:
    """True if a part begins where its file is trained up to, if that is not trained as a whole."""
    known = next((each for each in begun if each.file == part.file), None)
    pushes, position = (0, None) if known is None else (known.pushes, known.position)
    return part.pushes == pushes and part.begins in (None, checksum(position))


def advanced(begun: tuple[Begun, ...], parts: Iterable[Part]) -> tuple[Begun, ...]:
    """The files that are begun once these parts are trained."""
    by_file = {each.file: each for each in begun}
    for part in parts:
        by_file.pop(part.file, None)
        if part.position is not None:
            by_file[part.file] = Begun(part.file, part.pushes + 1, part.position)
    return tuple(sorted(by_file.values(), key=lambda each: each.file))
