"""Reads and writes ``SURVIVORS.md``: the mutants that nothing kills, each with a short reason.

A row belongs to the mutant of the same module, function and change. If there is none, as
something was renamed or moved, it belongs to the only mutant of the same shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

FILE = Path(__file__).with_name("SURVIVORS.md")
_HEAD = """# Mutants that nothing kills

Neither the simulator nor the unit tests of its module notice these changes. Written by
`make mutants ARGS=--write`, which keeps the reasons; each row needs one. `shape` finds a row
again after a rename.

| module | function | change | why it may live | shape |
|---|---|---|---|---|
"""


class Changed(Protocol):
    """A mutant, as far as a row tells of it."""

    module: str
    function: str
    change: str
    shape: str


@dataclass(frozen=True, slots=True)
class Row:
    """One survivor."""

    module: str
    function: str
    change: str
    reason: str
    shape: str

    @classmethod
    def of(cls, mutant: Changed, reason: str = "") -> Row:
        """The row of a mutant."""
        module = mutant.module.rsplit(".", 1)[-1]
        return cls(module, mutant.function, mutant.change, reason, mutant.shape)

    @property
    def names(self) -> tuple[str, str, str]:
        """The names of a mutant, which another may have, too."""
        return self.module, self.function, self.change


def read_survivors(file: Path = FILE) -> list[Row]:
    """The rows of the table."""
    lines = file.read_text().splitlines() if file.exists() else []
    cells = [line.split(" | ") for line in lines if line.startswith("| ") and "`" in line]
    return [
        Row(module[2:], function.strip("`"), _plain(change), reason, shape[:-2])
        for module, function, change, reason, shape in cells
    ]


def match(
    rows: Sequence[Row], mutants: Collection[Changed]
) -> Iterator[tuple[Row, Changed | None]]:
    """Each row with its mutant; None if there is none."""
    by_names = {Row.of(mutant).names: mutant for mutant in mutants}
    shapes = Counter(mutant.shape for mutant in mutants)
    by_shape = {mutant.shape: mutant for mutant in mutants if shapes[mutant.shape] == 1}
    for row in rows:
        yield row, by_names.get(row.names) or by_shape.get(row.shape)


def write_survivors(
    survivors: Collection[Changed],
    judged: Collection[Changed],
    mutants: Collection[Changed],
    file: Path = FILE,
) -> list[Row]:
    """Brings the table up to date; reasons stay. Returns its rows.

    Args:
        survivors: of those that were judged now.
        judged: those; the row of another one stays.
        mutants: all there are.
        file: to read and to write.
    """
    kept: dict[tuple[str, str, str], Row] = {}
    reasons: dict[tuple[str, str, str], str] = {}
    was_judged = {Row.of(mutant).names for mutant in judged}
    for row, mutant in match(read_survivors(file), mutants):
        if mutant is not None:
            now = Row.of(mutant, row.reason)
            reasons[now.names] = row.reason
            if now.names not in was_judged:
                kept[now.names] = now
    for mutant in survivors:
        row = Row.of(mutant)
        kept[row.names] = replace(row, reason=reasons.get(row.names, ""))
    order = {Row.of(mutant).names: number for number, mutant in enumerate(mutants)}
    rows = sorted(kept.values(), key=lambda row: order[row.names])
    file.write_text(_HEAD + "".join(map(_line, rows)))
    return rows


def _line(row: Row) -> str:
    change = row.change.replace("|", "\\|")
    return f"| {row.module} | `{row.function}` | {change} | {row.reason} | {row.shape} |\n"


def _plain(change: str) -> str:
    return change.replace("\\|", "|")
