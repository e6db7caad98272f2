"""The deterministic simulator of whole groups: decision modules on a virtual clock.

:func:`simulate` plays groups without threads, in a network in which everything goes wrong that
transports do not exclude; each seed is one run, the same for ever. :func:`simulate_silence` plays
workers that watch each other for signs of life, :func:`simulate_group` one large group.

``steps`` are all that can happen in a run, ``world`` carries them out, ``worker`` is one
simulated worker, ``ledger`` compares what is decided with what is true, ``generator`` draws
runs, ``runs`` plays and replays them, ``front`` plays seeds and makes a failing run short.
"""

from tests.simulation.group.front import (
    SimulationError,
    SimulationReport,
    simulate,
    simulate_silence,
)
from tests.simulation.group.generator import Scenario
from tests.simulation.group.large import GroupReport, simulate_group
from tests.simulation.group.rules import Rule, RuleBrokenError
from tests.simulation.group.worker import Machines

__all__ = [
    "GroupReport",
    "Machines",
    "Rule",
    "RuleBrokenError",
    "Scenario",
    "SimulationError",
    "SimulationReport",
    "simulate",
    "simulate_group",
    "simulate_silence",
]
