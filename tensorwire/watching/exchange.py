"""Brings the agents of a job together: each writes one value, which the others read.

The value holds what an agent sees of its workers, what it asks of others, and its answers. The
job's values are signed, so what strangers put there is not seen; a number in each only rises, and
what an agent wrote earlier is passed over. An agent through which somebody looks at the job calls
the others, in one value more, which is all that they read while nobody does.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

_LARGEST: Final = 8 << 20
_CALL: Final = "watch/call"


class KeyValues(Protocol):
    """A place that all agents of a job read and write."""

    def set(self, key: str, value: bytes) -> object:
        """Writes a value."""

    def get(self, key: str) -> bytes | None:
        """The value, None if there is none; does not wait."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The value that one agent writes.

    Args:
        number: rises with each value, also where another agent takes this one's place.
        workers: what it sees of its workers, as data of ``WorkerView``.
        questions: by number, each with the agent that is asked.
        answers: by ``"AGENT:NUMBER"`` of the question.
        alarms: standstills that this agent has found.
    """

    number: int
    workers: tuple[Mapping[str, Any], ...] = ()
    questions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()


class Exchange:
    """One agent's part.

    Args:
        values: where the values lie.
        node: this agent's number.
    """

    def __init__(self, values: KeyValues, node: int) -> None:
        self._values, self._node = values, node
        self._latest: dict[int, AgentReport] = {}
        self._number = 0
        self._heard_call: bytes | None = None

    def call(self) -> None:
        """Asks all agents to write what they see, and to read what others do."""
        self._number = _later(self._number)
        self._heard_call = f"{self._node}:{self._number}".encode()
        self._values.set(_CALL, self._heard_call)

    def is_called(self) -> bool:
        """True if another agent has called since this was asked before."""
        before, self._heard_call = self._heard_call, self._values.get(_CALL)
        return self._heard_call != before

    def write(self, make: Callable[[int], AgentReport]) -> None:
        """Writes this agent's value, made with the next number."""
        self._number = _later(self._number)
        told = make(self._number)
        fields = {name: getattr(told, name) for name in AgentReport.__dataclass_fields__}
        packed = zlib.compress(json.dumps(fields, default=str).encode(), 1)
        self._values.set(_name(self._node), packed)

    def read(self, nodes: Iterable[int]) -> dict[int, AgentReport]:
        """The latest value of each of these agents that has written one."""
        for node in nodes:
            entry = self._values.get(_name(node))
            told = None if entry is None else _opened(entry)
            known = self._latest.get(node)
            if told is not None and (known is None or told.number > known.number):
                self._latest[node] = told
        return {node: self._latest[node] for node in nodes if node in self._latest}


def _later(number: int) -> int:
    return max(number + 1, time.time_ns())


def _opened(packed: bytes) -> AgentReport | None:
    """The content of a value; None if no agent has written it."""
    try:
        fields = json.loads(zlib.decompressobj().decompress(packed, _LARGEST))
        return AgentReport(
            int(fields["number"]),
            tuple(fields["workers"]),
            dict(fields["questions"]),
            dict(fields["answers"]),
            tuple(map(str, fields["alarms"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error):
        return None


def _name(node: int) -> str:
    return f"watch/{node}"
