"""The connections between the stages of a pipeline, skip connections among them.

Without further word each stage takes the outputs of the one before. ``inputs={3: [2, 0]}``
gives stage 3 the outputs of stage 2 and then those of stage 0; ``(0, 1)`` in place of ``0``
takes only the second of stage 0's outputs, and ``"mask"`` the keyword argument ``mask`` of the
step itself. Knows nothing of tensors, messages or workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

ALL: Final = -1
"""Stands for all outputs of a stage, each of which becomes one argument."""


@dataclass(frozen=True, slots=True)
class FromStage:
    """Outputs of an earlier stage: the one with this index, or ``ALL``."""

    stage: int
    output: int = ALL


@dataclass(frozen=True, slots=True)
class FromStep:
    """Arguments that ``train_step`` was given.

    Args:
        name: of a keyword argument; digits for one positional argument; "" for all of these.
    """

    name: str = ""


Source: TypeAlias = FromStage | FromStep
SourceName: TypeAlias = int | tuple[int, int] | str
"""A source as a user names it: a stage, a stage and the index of an output, a keyword."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The sources of each stage's arguments, in the order of the arguments.

    Args:
        sources: one tuple per stage.
    """

    sources: tuple[tuple[Source, ...], ...]

    @classmethod
    def chain(cls, stages: int, inputs: Mapping[int, Sequence[SourceName]] | None = None) -> Wiring:
        """Connects each stage with the one before, except where ``inputs`` says otherwise.

        Raises:
            ValueError: a stage does not exist, does not come before, or its output goes nowhere.
        """
        inputs = inputs or {}
        if unknown := sorted(set(inputs) - set(range(stages))):
            raise ValueError(f"inputs={dict(inputs)!r} names stage {unknown[0]} of {stages}")
        wiring = cls(
            tuple(
                tuple(_source(stage, told) for told in inputs[stage])
                if stage in inputs
                else (FromStage(stage - 1) if stage else FromStep(),)
                for stage in range(stages)
            )
        )
        for stage in range(stages - 1):
            if not wiring.consumers(stage):
                raise ValueError(f"inputs={dict(inputs)!r}: nothing takes the output of {stage=}")
        return wiring

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.sources)

    def producers(self, stage: int) -> list[int]:
        """The stages whose outputs a stage takes, in ascending order."""
        return sorted({each.stage for each in self.sources[stage] if isinstance(each, FromStage)})

    def consumers(self, stage: int) -> list[int]:
        """The stages that take outputs of a stage, in ascending order."""
        return [each for each in range(self.stages) if stage in self.producers(each)]

    def keywords(self, stage: int) -> list[str]:
        """The keyword arguments of the step that a stage takes."""
        return [each.name for each in self.sources[stage] if isinstance(each, FromStep)]


def _source(stage: int, told: SourceName) -> Source:
    match told:
        case str():
            return FromStep(told)
        case int():
            source = FromStage(told)
        case (int(), int()):
            source = FromStage(*told)
        case _:
            raise TypeError(
                f"inputs[{stage}] has {told!r}; a source is a stage, a stage and an output's "
                "index, or the name of a keyword argument"
            )
    if not 0 <= source.stage < stage or source.output < ALL:
        raise ValueError(
            f"inputs[{stage}] has {told!r}, which is not an output of an earlier stage"
        )
    return source
