"""What a run tests and how: one value, handed to every process through the environment."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_VARIABLE = "RPC_CONFORMANCE_SETUP"


class Target(str, enum.Enum):
    """Whose RPC the names ``torch.distributed.rpc`` and so on stand for."""

    OURS = "ours"
    TORCH = "torch"


class Start(str, enum.Enum):
    """How a test's workers start."""

    FORK = "fork"
    SPAWN = "spawn"


class Sabotage(str, enum.Enum):
    """What is broken on purpose, to see that the tests notice."""

    NOTHING = "nothing"
    WRONG_RESULTS = "wrong-results"
    GENUINE_CALLS = "genuine-calls"


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    Args:
        target: see :class:`Target`.
        backend: ``TENSORPIPE`` or ``TENSORWIRE``.
        start: see :class:`Start`.
        sabotage: see :class:`Sabotage`.
        timeout: seconds a test may take.
    """

    target: Target = Target.OURS
    backend: str = "TENSORPIPE"
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
        values["target"] = Target(values["target"])
        values["start"] = Start(values["start"])
        values["sabotage"] = Sabotage(values["sabotage"])
        return cls(**values)
