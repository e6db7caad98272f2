"""Checks what a user says about backups and about where stages go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remote_module import RemoteModule
from tensorwire.pipeline.backups.places import Owners, at_home, spread
from tensorwire.pipeline.formation import Design
from tensorwire.pipeline.plan import Span
from tensorwire.pipeline.returning import is_there


def require_backups(
    stages: Sequence[Sequence[RemoteModule]],
    backups: int,
    spares: Sequence[str],
    name: str | None,
) -> None:
    """Checks that stages can be backed up as wanted.

    Raises:
        TypeError: an argument is of another type.
        ValueError: they cannot.
    """
    if isinstance(backups, bool) or not isinstance(backups, int):
        raise TypeError(f"backups={backups!r} is a {type(backups).__name__}, not 0 or 1")
    if backups not in (0, 1):
        raise ValueError(f"backups={backups} must be 0 or 1")
    if isinstance(spares, str):
        raise TypeError(f"spares={spares!r} is one name; give a list of names")
    if not backups and (spares or name is not None):
        what = f"spares={list(spares)!r}" if spares else f"name={name!r}"
        raise ValueError(f"{what} needs backups=1")
    if not backups:
        return
    if missing := [each for each in spares if not is_there(each)]:
        raise ValueError(f"spares={list(spares)!r}: no worker {missing[0]!r} is in the group")
    workers = {each.get_module_rref().owner_name() for modules in stages for each in modules}
    if len(workers | set(spares)) < 2:
        raise ValueError(
            f"backups=1 needs a second worker, but all stages are on {workers.pop()!r}; name "
            "others in spares="
        )
    for stage, modules in enumerate(stages):
        for each in modules:
            _require_recipe(stage, each, "backups=1")


def moved(design: Design, owners: Owners, stage: int, worker: str, replica: int) -> Owners:
    """The owners with one stage on another worker.

    Raises:
        ValueError: there is no such stage, replica or worker, or it cannot have the stage.
    """
    if not 0 <= stage < len(owners):
        raise ValueError(f"stage={stage!r}: the stages are 0 to {len(owners) - 1}")
    if not 0 <= replica < len(owners[stage]):
        raise ValueError(f"replica={replica!r}: stage {stage} has {len(owners[stage])}")
    if not is_there(worker):
        raise ValueError(f"worker={worker!r}: no such worker is in the group")
    if worker in owners[stage][:replica] + owners[stage][replica + 1 :]:
        raise ValueError(f"worker={worker!r} has another replica of stage {stage}")
    for number, modules in enumerate(design.stages):
        for each in modules:
            if number == stage:
                _require_recipe(number, each, "move()")
    changed = list(owners[stage])
    changed[replica] = worker
    return (*owners[:stage], tuple(changed), *owners[stage + 1 :])


def rebalanced(
    design: Design, homes: Owners, seconds: Sequence[float], workers: Sequence[str] | None
) -> Owners:
    """The owners such that the slowest worker is as fast as can be.

    Raises:
        ValueError: no such worker is in the group.
    """
    known = workers or dict.fromkeys(each for stage in homes for each in stage)
    living = [each for each in known if is_there(each)]
    if workers and (missing := [each for each in workers if each not in living]):
        raise ValueError(f"workers={list(workers)!r}: no worker {missing[0]!r} is in the group")
    for stage, modules in enumerate(design.stages):
        for each in modules:
            _require_recipe(stage, each, "rebalance()")
    chosen = None if workers else at_home(living, homes)
    return chosen or spread(seconds, living, homes)


def seconds_of(stages: int, spans: Iterable[Span]) -> list[float]:
    """The seconds that each stage took; the same for all if nothing was measured."""
    seconds = [0.0] * stages
    for span in spans:
        seconds[span.action.stage] += (span.ended - span.began) / 1e9
    return seconds if any(seconds) else [1.0] * stages


def _require_recipe(stage: int, module: RemoteModule, what: str) -> None:
    if not module.can_be_made_anew:
        raise ValueError(
            f"{what} needs to make stage {stage} anew on another worker, but its handle was "
            "received or made of a reference; pass the one with which the module was made"
        )
