"""A schedule as data: the table of actions that each worker of a pipeline carries out.

An action is written as in ``torch.distributed.pipelining``, stage, kind and micro-batch
in one word: ``2F0``, ``0B3``, ``1I2``, ``1W2``. A table prints as comma-separated text with
one line per worker, and is read from such text; idle slots, communication and reduction of
torch's tables say nothing here and are skipped.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorwire.pipeline.errors import ScheduleError


class Kind(enum.Enum):
    """The kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass: gradients of inputs and of weights."""
    INPUT = "I"
    """Only the gradients of the stage's inputs, which others wait for."""
    WEIGHT = "W"
    """Only the gradients of the weights, for which nobody waits."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch.

    Args:
        stage: number of the stage, from 0.
        kind: what it does.
        microbatch: number of the micro-batch, from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action such as ``2F0``.

        Raises:
            ScheduleError: the text is none.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; one is a stage, one of F, B, I, W, and a micro-batch, "
                "such as 2F0"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


_ACTION: Final = re.compile(r"(\d+)([FBIW])(\d+)")
_PASSED_OVER: Final = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_TOGETHER: Final = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Table:
    """The actions of each worker, in order.

    Args:
        rows: one per worker.
    """

    rows: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]]) -> Table:
        """Makes a table of any rows of actions."""
        return cls(tuple(tuple(row) for row in rows))

    @classmethod
    def parse(cls, text: str) -> Table:
        """Reads a table from comma-separated text, one line per worker.

        Raises:
            ScheduleError: a cell is not an action.
        """
        lines = csv.reader(io.StringIO(text))
        return cls.of([action for cell in line for action in _cell(cell)] for line in lines if line)

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """Reads a table from a file of comma-separated text.

        Raises:
            ScheduleError: a cell is not an action.
        """
        return cls.parse(Path(path).read_text())

    def __str__(self) -> str:
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.rows for action in row)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((action.stage for action in self), default=-1)

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return 1 + max((action.microbatch for action in self), default=-1)

    @property
    def trains(self) -> bool:
        """True if the table has backward passes."""
        return any(action.kind is not Kind.FORWARD for action in self)

    def stages_of(self, worker: int) -> list[int]:
        """The stages of one worker, in ascending order."""
        return sorted({action.stage for action in self.rows[worker]})


def _cell(text: str) -> list[Action]:
    text = text.strip()
    if not text or _PASSED_OVER.fullmatch(text):
        return []
    if together := _TOGETHER.fullmatch(text):
        return [Action.parse(each) for each in together[1].split(";")]
    return [Action.parse(text)]
