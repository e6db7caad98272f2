"""The state of a job as whoever watches it sees it: plain data, and how it becomes JSON.

Facts that workers tell stay mappings, as each package tells others; everything that the launcher
says is a dataclass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_LARGEST: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process as the kernel sees it.

    Args:
        pid: its number on its machine.
        state: the kernel's letter: R runs, S sleeps, D waits in the kernel, T is stopped, Z is
            dead; empty if there is no such process.
        cpu_seconds: processor time that it has taken.
        resident_bytes: memory that it holds.
        threads: how many it has.
    """

    pid: int
    state: str = ""
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker of a job.

    Args:
        name: such as ``"trainer:3"``.
        role: its role.
        id: its id in the group.
        life: how often it was started.
        state: ``waits``, ``runs``, ``stopped``, ``done`` or ``failed``.
        node: number of the machine that runs it; -1 for none.
        host: of that machine.
        why: how its last life ended, or why it waits; empty if there is nothing to say.
        process: as the kernel sees it; None if none runs.
        facts: what it told last; None if it has told nothing.
        silent_for: seconds since it last answered.
    """

    name: str
    role: str
    id: int
    life: int
    state: str
    node: int = -1
    host: str = ""
    why: str = ""
    process: ProcessView | None = None
    facts: Mapping[str, Any] | None = None
    silent_for: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> WorkerView:
        """The inverse of ``dataclasses.asdict``."""
        process = data.get("process")
        return cls(**{**data, "process": ProcessView(**process) if process else None})


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine of a job.

    Args:
        number: its group rank.
        host: its name.
        heard: seconds since it last told something.
    """

    number: int
    host: str
    heard: float = 0.0


@dataclass(frozen=True, slots=True)
class JobView:
    """A job.

    Args:
        job: its id.
        phase: ``running``, ``succeeded`` or ``failed``.
        now: when this was put together, in seconds since 1970.
        nodes: its machines.
        workers: its workers.
        alarms: who stands still and why, in one sentence each.
        news: the last events, oldest first: restarts and losses.
    """

    job: str
    phase: str
    now: float
    nodes: tuple[NodeView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    alarms: tuple[str, ...] = ()
    news: tuple[str, ...] = field(default=())

    def plain(self) -> dict[str, object]:
        """The view as viewers are told it: as JSON has it, without the threads' stacks."""
        return {
            **_fields(self),
            "nodes": [_fields(node) for node in self.nodes],
            "workers": [_plain(worker) for worker in self.workers],
        }

    def encode(self) -> bytes:
        """The view as JSON."""
        return json.dumps(self.plain(), default=str).encode()

    @classmethod
    def decode(cls, data: bytes) -> JobView:
        """The inverse of :meth:`encode`.

        Raises:
            ValueError: it is no view.
        """
        if len(data) > _LARGEST:
            raise ValueError(f"a view of {len(data)} bytes is larger than {_LARGEST}")
        try:
            read = json.loads(data)
            return cls(
                job=str(read["job"]),
                phase=str(read["phase"]),
                now=float(read["now"]),
                nodes=tuple(NodeView(**each) for each in read["nodes"]),
                workers=tuple(WorkerView.of(each) for each in read["workers"]),
                alarms=tuple(map(str, read["alarms"])),
                news=tuple(map(str, read["news"])),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"this is no view of a job: {error!r}") from error


def _plain(worker: WorkerView) -> dict[str, object]:
    facts = None if worker.facts is None else dict(worker.facts)
    if facts is not None:
        facts.pop("threads", None)
    process = worker.process and _fields(worker.process)
    return {**_fields(worker), "process": process, "facts": facts}


def _fields(record: JobView | NodeView | WorkerView | ProcessView) -> dict[str, object]:
    """The fields, like ``dataclasses.asdict``, but without copies of all that workers told."""
    return {name: getattr(record, name) for name in record.__slots__}
