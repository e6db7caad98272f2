"""The choice of what a run tests and how: one value, handed to every process in the environment."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_VARIABLE = "RPC_CONFORMANCE_SETUP"


class Subject(str, enum.Enum):
    """The RPC that the names ``torch.distributed.rpc`` and so on stand for, and over what."""

    TORCH = "torch"
    """torch's own, for comparison."""
    TENSORPIPE = "tensorpipe"
    """Ours, over the backend TENSORPIPE."""
    TENSORWIRE = "tensorwire"
    """Ours, over the backend TENSORWIRE."""

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return "TENSORWIRE" if self is Subject.TENSORWIRE else "TENSORPIPE"

    @property
    def title(self) -> str:
        """For people."""
        return "torch" if self is Subject.TORCH else f"ours, {self.backend}"


class Start(str, enum.Enum):
    """The way a test's workers start."""

    FORK = "fork"
    SPAWN = "spawn"


class Sabotage(str, enum.Enum):
    """The thing that is broken on purpose, to see that the tests notice."""

    NOTHING = "nothing"
    WRONG_RESULTS = "wrong-results"
    GENUINE_CALLS = "genuine-calls"


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    Args:
        subject: see :class:`Subject`.
        start: see :class:`Start`.
        sabotage: see :class:`Sabotage`.
        timeout: seconds a test may take.
    """

    subject: Subject
    start: Start = Start.FORK
    sabotage: Sabotage = Sabotage.NOTHING
    timeout: int = 100

    def environment(self) -> dict[str, str]:
        """The variables of a process that belongs to this run."""
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return {
            **one_thread,
            _VARIABLE: json.dumps(asdict(self)),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(self.timeout),
        }

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Setup:
        """The run that this process belongs to."""
        values = json.loads(environment[_VARIABLE])
        values["subject"] = Subject(values["subject"])
        values["start"] = Start(values["start"])
        values["sabotage"] = Sabotage(values["sabotage"])
        return cls(**values)
