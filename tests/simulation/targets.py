"""The targets of ``make mutants``: modules to mutate, what plays them, and their unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, mutants_of

from tests.loading import load
from tests.seeded_games import Play, breaks
from tests.simulation.group.faults import draw_plan
from tests.simulation.group.generator import Scenario
from tests.simulation.group.runs import draw
from tests.simulation.group.watchers import WatcherGroup
from tests.simulation.group.worker import Machines

# The tests of autograd are a simulator of their own, and so are those of retries and of membership.
_TESTS = Path(__file__).parents[1]
_AUTOGRAD, _RPC = _TESTS / "autograd_dist", _TESTS / "rpc"


def play_group(seed: int) -> None:
    """A whole group; see ``simulate``."""
    if (broken := draw(seed, Scenario(), Machines()).broken) is not None:
        raise broken


def play_silence(seed: int) -> None:
    """Every fourth seed: workers that fall silent; see ``simulate_silence``."""
    if seed % 4:
        return
    if (broken := WatcherGroup(draw_plan(seed // 4), Machines()).run()) is not None:
        raise broken


def play_pass(seed: int) -> None:
    """A backward pass without tensors; every fourth seed, one through a random graph."""
    decisions, graphs = load(_AUTOGRAD, "test_passes"), load(_AUTOGRAD, "test_random_graphs")
    decisions.check_pass(seed)
    decisions.check_pass_with_loss(seed)
    decisions.check_pass_that_is_abandoned(seed)
    if seed % 4 == 0:
        graphs.check_seed(seed // 4)


def play_passes(seed: int) -> None:
    """Passes of one root one after the other; and one that something interrupts."""
    passes = load(_AUTOGRAD, "test_backward_passes")
    if seed % 4 == 0:
        passes.check_passes(seed // 4)
    passes.check_interrupted(seed)


def play_attempts(seed: int) -> None:
    """One call that is tried again."""
    load(_RPC / "protocol", "test_retry").check_attempts(seed)


def play_store(seed: int) -> None:
    """A member of a group whose others come and go, as the store says."""
    load(_RPC / "group", "test_membership").check_look(seed)


@dataclass(frozen=True, slots=True)
class Target:
    """A module that is mutated, and the unit tests that are its own.

    Args:
        module: its name.
        only: functions whose names begin so; None for all.
        units: files in ``tests``.
        plays: what may find a mutant.
    """

    module: str
    only: str | None
    units: tuple[str, ...]
    plays: tuple[Play, ...] = (play_group,)

    def breaks(self, seed: int) -> bool:
        """True if a rule is broken in the runs of a seed."""
        return any(breaks(play, seed) for play in self.plays)


_REFERENCES = ("rpc/protocol/test_references.py", "rpc/protocol/test_references_lost.py")

TARGETS = (
    Target("rpc.protocol.references", None, _REFERENCES),
    Target("rpc.protocol.owned_values", None, _REFERENCES),
    Target("rpc.protocol.user_handles", None, _REFERENCES),
    Target("rpc.protocol.reference_lives", None, _REFERENCES),
    Target("rpc.protocol.reference_state", None, _REFERENCES),
    Target("rpc.protocol.calls", None, ("rpc/protocol/test_calls.py",)),
    Target("rpc.group.members", None, ("rpc/group/test_members.py",), (play_group, play_silence)),
    Target("rpc.protocol.termination", None, ("rpc/protocol/test_termination.py",)),
    Target("rpc.wire.control", "DuplicateFilter", ("rpc/wire/test_control.py",)),
    Target("rpc.protocol.retry", "IdempotencyTable", ("rpc/protocol/test_retry.py",)),
    Target("rpc.protocol.retry", "_Caller", ("rpc/protocol/test_retry.py",)),
    Target("rpc.protocol.retry", "_IdempotentCall", ("rpc/protocol/test_retry.py",)),
    Target("rpc.protocol.retry", "Attempts", ("rpc/protocol/test_retry.py",), (play_attempts,)),
    Target("rpc.protocol.cancellation", None, ("rpc/protocol/test_cancellation.py",)),
    Target("rpc.protocol.resumption", None, ("rpc/protocol/test_resumption.py",), ()),
    Target("rpc.protocol.liveness", None, ("rpc/protocol/test_liveness.py",), (play_silence,)),
    Target("rpc.group.watch", None, ("rpc/group/test_watch.py",), (play_silence,)),
    Target("rpc.group.loss_reports", None, ("rpc/group/test_loss_reports.py",), (play_silence,)),
    Target(
        "rpc.group.membership", "Membership._look", ("rpc/group/test_membership.py",), (play_store,)
    ),
    Target(
        "rpc.group.membership",
        "Membership.remove",
        ("rpc/group/test_membership.py",),
        (play_store,),
    ),
    Target(
        "rpc.group.membership",
        "Membership._remove_lost",
        ("rpc/group/test_membership.py",),
        (play_store,),
    ),
    Target("autograd_dist.passes", "Participant", ("autograd_dist/test_passes.py",), (play_pass,)),
    *(
        Target(
            "autograd_dist.backward_passes",
            decides,
            ("autograd_dist/test_backward_passes.py",),
            (play_passes,),
        )
        for decides in (
            "_OfContext",
            "BackwardPasses._oldest",
            "BackwardPasses._driver_for",
            "BackwardPasses.drop",
            "BackwardPasses.root_lost",
        )
    ),
)


def all_mutants(only: str | None = None) -> Iterator[tuple[Mutant, Target]]:
    """Every mutant, or those of the modules called ``only``."""
    for target in TARGETS:
        if only is None or target.module.rsplit(".", 1)[-1] == only:
            for mutant in mutants_of(target.module, target.only):
                yield mutant, target
