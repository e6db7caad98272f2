"""Events that workers report to the director: lines of JSON, with times all processes share."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass


class What(enum.Enum):
    """The kinds of events."""

    JOINED = "joined"
    STEP = "step"
    ERROR = "error"
    """Training failed; ``name`` is the worker that the error names, if it names one."""
    FAILED = "failed"
    """A call beside it failed, likewise."""
    LOST = "lost"
    """It was told that the worker ``name`` was lost."""
    WRONG = "wrong"
    """Something happened that must not, whoever is killed; ``text`` says what."""
    VITALS = "vitals"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Vitals:
    """The resources that a process holds.

    Args:
        rss: resident memory in bytes.
        threads: all of them, torch's too.
        descriptors: open ones.
        segments: mappings of shared memory.
    """

    rss: int
    threads: int
    descriptors: int
    segments: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker told.

    Args:
        at: seconds, monotonic.
        who: the worker.
        what: see :class:`What`.
        name: of the worker it is about.
        text: for people.
        vitals: with :attr:`What.VITALS`.
    """

    at: float
    who: str
    what: What
    name: str = ""
    text: str = ""
    vitals: Vitals | None = None

    def encode(self) -> str:
        """Returns the event as a line."""
        return json.dumps(asdict(self) | {"what": self.what.value})

    @classmethod
    def decode(cls, line: str) -> Event:
        """Reads a line."""
        fields = json.loads(line)
        fields["what"] = What(fields["what"])
        if fields["vitals"] is not None:
            fields["vitals"] = Vitals(**fields["vitals"])
        return cls(**fields)
