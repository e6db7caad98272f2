"""What ``make mutants`` mutates, and which unit tests are whose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mutants import Mutant, mutants_of


@dataclass(frozen=True, slots=True)
class Target:
    """A module that is mutated, and the unit tests that are its own.

    Args:
        module: its name.
        only: functions whose names begin so; None for all.
        units: files in ``tests``.
    """

    module: str
    only: str | None
    units: tuple[str, ...]


TARGETS = (
    Target("rpc.references", None, ("rpc/test_references.py",)),
    Target("rpc.calls", None, ("rpc/test_calls.py",)),
    Target("rpc.group", None, ("rpc/test_group.py",)),
    Target("rpc.termination", None, ("rpc/test_termination.py",)),
    Target("rpc.control", "DuplicateFilter", ("rpc/test_control.py",)),
    Target("rpc.retry", "OnceTable", ("rpc/test_retry.py",)),
    Target("rpc.retry", "_Caller", ("rpc/test_retry.py",)),
    Target("rpc.retry", "_Entry", ("rpc/test_retry.py",)),
    Target("rpc.cancellation", None, ("rpc/test_cancellation.py",)),
)


def all_mutants(only: str | None = None) -> Iterator[tuple[Mutant, Target]]:
    """Every mutant, or those of the modules whose names end with ``only``."""
    for target in TARGETS:
        if only is None or target.module.endswith(only):
            for mutant in mutants_of(target.module, target.only):
                yield mutant, target
