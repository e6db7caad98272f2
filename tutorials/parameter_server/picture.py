"""Draws how training went: the loss, the area under the curve, the time of steps."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tutorials.pictures import figure, save

if TYPE_CHECKING:
    from tutorials.parameter_server.train import History


def draw(history: History, path: Path) -> None:
    """Writes the picture.

    Args:
        history: what was noted.
        path: of the picture.
    """
    drawn = figure(11, 3.4)
    loss, area, time = drawn.subplots(1, 3)
    loss.plot(_smooth(history.losses))
    loss.grid(alpha=0.3)
    loss.set(title="loss of trainer 0", xlabel="step")
    area.plot(list(history.areas), list(history.areas.values()), marker="o")
    area.axhline(history.best, linestyle="--", color="gray")
    area.grid(alpha=0.3)
    area.set(title="AUC; dashed: the best there is", xlabel="step")
    stages = [_middle(taken) for taken in history.milliseconds.values()]
    time.stackplot(range(1, len(stages[0]) + 1), stages, labels=list(history.milliseconds))
    time.set(title="milliseconds a step, by stage", xlabel="step", ylim=(0, None))
    time.legend(loc="upper right")
    save(drawn, path)


def _smooth(values: list[float], over: int = 20) -> list[float]:
    windows = (values[max(0, end - over) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _middle(values: list[float], over: int = 20) -> list[float]:
    """The medians of windows, which one long step does not move, nor the first one."""
    ends = range(1, len(values) + 1)
    windows = (values[max(0, end - over) : max(end, over)] for end in ends)
    return [median(window) for window in windows]
