"""Messages of the measuring process to a group's nursery and its members, and what comes back.

A nursery learns from its command line whom to start. To a member one JSON object per line:
commands go to its standard input, one answer for each comes from its standard output.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: a library and how it is set up.

    Args:
        name: heads the column.
        library: ``ours``, ``torch``, or ``raw`` for the machine itself.
        backend: the name of the backend.
        options: keyword arguments for the backend's options.
        environment: variables set for the column's processes.
    """

    name: str
    library: str
    backend: str
    options: dict[str, Any]
    environment: dict[str, str]

    @property
    def raw(self) -> bool:
        """True if this column measures the machine, without any library."""
        return self.library == "raw"


@dataclass(frozen=True, slots=True)
class Place:
    """The process of a group that a member is.

    Args:
        column: what it measures.
        rank: its rank.
        size: how many there are.
        meeting_file: through which they find each other.
        counts: whether the functions it calls are counted.
        modules: imported before it joins, as torch's agent leaves little time to others.
        timeline: whether it records what its threads do when.
    """

    column: Column
    rank: int
    size: int
    meeting_file: str
    counts: bool = False
    modules: tuple[str, ...] = ()
    timeline: bool = False


@dataclass(frozen=True, slots=True)
class Birth:
    """A process to start.

    Args:
        place: which it is.
        commands: descriptor that becomes its standard input.
        answers: descriptor that becomes its standard output.
        log: file that takes its standard error.
    """

    place: Place
    commands: int
    answers: int
    log: str

    def to_json(self) -> str:
        """Return this as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Birth:
        """Rebuild what ``to_json`` wrote."""
        fields = json.loads(text)
        place = fields["place"]
        read = {"column": Column(**place["column"]), "modules": tuple(place["modules"])}
        place = Place(**place | read)
        return cls(**fields | {"place": place})


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which a thread did something.

    Args:
        began: nanoseconds by the clock that all processes of the host share.
        ended: the same.
        thread: the thread's name.
        what: what it did.
    """

    began: int
    ended: int
    thread: str
    what: str

    @property
    def nanoseconds(self) -> int:
        """Its duration."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Command:
    """Ask a member to do something.

    Args:
        verb: ``prepare`` a row, ``measure`` it, ``count`` the functions called or ``record`` the
            spans since this was last said, ``locate`` itself on the host's cores, ``forget`` what
            was prepared, or ``leave``.
        row: the row's key.
        caller: the member's number among those who call, from 0.
        seconds: how long to measure.
        least: how many operations to measure at least.
    """

    verb: str
    row: str = ""
    caller: int = 0
    seconds: float = 0.0
    least: int = 1

    def to_json(self) -> str:
        """Return this as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Command:
        """Rebuild what ``to_json`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's account of what it did.

    Args:
        seconds: how long all of it took.
        nanoseconds: how long each operation took.
        calls: how often each function was called, if that was asked.
        spans: what its threads did when, if that was asked.
        core: on which its busiest thread ran last, if that was asked.
    """

    seconds: float = 0.0
    nanoseconds: tuple[int, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    core: int | None = None

    def to_json(self) -> str:
        """Return this as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Rebuild what ``to_json`` wrote."""
        fields = json.loads(text)
        spans = tuple(Span(**span) for span in fields["spans"])
        read = {"nanoseconds": tuple(fields["nanoseconds"]), "spans": spans}
        return cls(**fields | read)
