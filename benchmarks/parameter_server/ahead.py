"""A click model's step with one and with more batches ahead, where each message takes its time.

The trainer and its server are in networks of their own, between which a relay delays packets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import rpc
from benchmarks.parameter_server.many import Many, Way, training
from benchmarks.parameter_server.relay import Relay, relayed
from benchmarks.stepping import Step, SteppingGroup

_BATCHES = 12
"""Steps before anything is measured: all batches were trained on by then."""


@dataclass(slots=True)
class _Found:
    """The report of one trainer.

    Args:
        milliseconds: a step, of each round.
        counts: a step's messages, rows and bytes, of each round.
    """

    milliseconds: list[float] = field(default_factory=list)
    counts: list[list[float]] = field(default_factory=list)


def compare(
    case: Many, delays: Sequence[float], known: Sequence[int], megabits: float, rounds: int,
    steps: int,
) -> str:  # fmt: skip
    """A table with a line for each delay and number of batches ahead.

    Args:
        case: what is trained.
        delays: milliseconds of each packet, one way.
        known: batches ahead.
        megabits: a second in each direction; 0 for no bound.
        rounds: how often each is measured.
        steps: of a round.
    """
    found = {(delay, ahead): _Found() for delay in delays for ahead in known}
    with ExitStack() as stack:
        groups = {}
        for delay, ahead in found:
            relay = stack.enter_context(relayed(delay / 1e3, megabits))
            begin = partial(_process, case, ahead, relay)
            group = SteppingGroup(begin, 2, case.threads, _BATCHES)
            stack.callback(group.close)
            groups[delay, ahead] = group, relay
        for _ in range(rounds):
            for place, (group, relay) in groups.items():
                _measure(group, relay, steps, found[place])
    return "\n".join([_HEAD, *(_line(*place, each) for place, each in found.items())])


def _process(case: Many, ahead: int, relay: Relay, rank: int, meeting: str) -> Step | None:
    """One process, in its network; a step returns messages and rows so far."""
    options = rpc.TensorWireRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=0, bind_address=relay.enter(rank),
        local_paths=False, liveness_timeout=0, group_key=bytes(range(32)),
    )  # fmt: skip
    names = ("trainer", "server")
    rpc.init_rpc(names[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        return None
    cluster, step = training(Way.COLLECTION, ahead, case)

    def counted() -> list[int]:
        step()
        return [cluster.session.pulls, *cluster.account.rows.values()]

    return counted


def _measure(group: SteppingGroup, relay: Relay, steps: int, found: _Found) -> None:
    """One round."""
    before = [*(group.told or group.first[-1])[0], *relay.passed.tolist()]
    found.milliseconds.append(1e3 * group.measure(steps))
    after = [*group.told[0], *relay.passed.tolist()]
    made = steps + 1  # with the one that gets it going
    found.counts.append([(b - a) / made for a, b in zip(before, after, strict=True)])


_HEAD = (
    f"{'delay':<8}{'ahead':<7}{'ms a step':<26}{'messages':>9}{'rows waited for':>17}"
    f"{'rows beside':>13}{'kB to server':>14}{'kB to trainer':>15}"
)


def _line(delay: float, ahead: int, found: _Found) -> str:
    low, middle, high = statistics.quantiles(found.milliseconds, n=4)
    counts: list[Any] = [statistics.median(each) for each in zip(*found.counts, strict=True)]
    messages, waited, beside, up, down = counts
    time = f"{middle:.1f} ({low:.1f} to {high:.1f})"
    return (
        f"{f'{delay:g} ms':<8}{ahead:<7}{time:<26}{messages:>9.1f}{waited:>17.0f}{beside:>13.0f}"
        f"{up / 1e3:>14.0f}{down / 1e3:>15.0f}"
    )
