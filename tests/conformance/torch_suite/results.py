"""The outcome of each test, and the file that keeps it."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


class Outcome(str, enum.Enum):
    """The way a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNSTEADY = "unsteady"
    EXEMPT = "exempt"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """One test.

    Args:
        test: ``Class.test``.
        outcome: see :class:`Outcome`; EXEMPT is a failure for which there is a reason,
            UNSTEADY one that passed when it ran again, alone.
        seconds: how long it took.
        reason: why it did not pass, in one line.
    """

    test: str
    outcome: Outcome
    seconds: float
    reason: str = ""

    @property
    def suite(self) -> str:
        """The name of the test's class."""
        return self.test.partition(".")[0]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The reverse of :meth:`to_json`."""
        values = json.loads(line)
        values["outcome"] = Outcome(values["outcome"])
        return cls(**values)


def merge(path: Path, results: Iterable[Result]) -> None:
    """Puts results in place of earlier ones of the same tests, and keeps the others."""
    kept = {result.test: result for result in read(path)}
    kept.update((result.test, result) for result in results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{kept[test].to_json()}\n" for test in sorted(kept)))


def read(path: Path) -> list[Result]:
    """The results of a run; none if there was none."""
    if not path.exists():
        return []
    return [Result.from_json(line) for line in path.read_text().splitlines()]


def last_line(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _names_an_error(line)]
    return (errors or lines or ["unknown"])[-1][:300]


def _names_an_error(line: str) -> bool:
    name, colon, text = line.partition(":")
    return bool(colon and text) and name.endswith(("Error", "Exception")) and " " not in name
