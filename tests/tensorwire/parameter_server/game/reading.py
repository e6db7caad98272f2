"""Files in a game: what a push trains of them, and the records that an account says are trained."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorwire.parameter_server.decisions.files import Begun, Part, checksum, finished
from tensorwire.parameter_server.decisions.samples import Account, Batches

SAMPLER = "samples"

Record = tuple[int, int]
"""The number of a file, and that of a record in it."""


@dataclass(frozen=True)
class Work:
    """The work that one push brings.

    Args:
        batches: as servers are told.
        units: the batches or records of which rows tell how often each was trained.
    """

    batches: Batches
    units: tuple[object, ...]


def length_of(file: int) -> int:
    """Records of a file."""
    return file * 7 % 5


def whole_batches(deal: int, numbers: Sequence[int]) -> Work:
    """A push of some batches."""
    return Work(Batches(SAMPLER, deal, tuple(numbers)), tuple(numbers))


def parts_of_files(
    deal: int, files: Sequence[int], begun: Iterable[Begun], end: int, dice: random.Random
) -> Work:
    """A push of some records of files, from where each is; the end of a file may come later."""
    known, parts, records = {each.file: each for each in begun}, [], list[Record]()
    for file in files:
        before = known.get(file, Begun(file, 0, b"0"))
        first = int(before.position)
        behind = min(length_of(file), first + dice.randint(1, 3))
        records += [(file, number) for number in range(first, behind)]
        is_over = first == behind or (behind == length_of(file) and dice.random() < 0.5)
        begins = checksum(before.position if before.pushes else None)
        to = None if is_over else str(behind).encode()
        parts.append(Part(file, before.pushes, to, begins))
    batches = Batches(SAMPLER, deal, finished(parts), tuple(parts), (0, end))
    return Work(batches, tuple(records))


def units_done(account: Account, of_files: bool) -> set[object]:
    """The batches, or records, that an account says are trained."""
    done = [number for each in account.done for number in range(*each)]
    if not of_files:
        return set(done)
    reached = {each.file: int(each.position) for each in account.begun}
    reached |= {file: length_of(file) for file in done}
    return {(file, number) for file, behind in reached.items() for number in range(behind)}


def has(account: Account, batches: Batches) -> bool:
    """True if an account has the batches of a push, or parts of files."""
    if any(True for _ in account.untrained(batches.numbers)):
        return False
    pushes: Mapping[int, int] = {each.file: each.pushes for each in account.begun}
    left = [each for each in batches.parts if pushes.get(each.file, 0) <= each.pushes]
    return not any(True for _ in account.untrained([each.file for each in left]))
