"""Draws how training went: the loss, the area under the curve, the time of steps."""

from __future__ import annotations

from pathlib import Path
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
    loss.set(title="loss of trainer 0", xlabel="step")
    area.plot(list(history.areas), list(history.areas.values()), marker="o")
    area.axhline(history.best, linestyle="--", color="gray")
    area.set(title="AUC; dashed: the best there is", xlabel="step")
    time.plot(history.milliseconds, linewidth=0.6)
    time.set(title="milliseconds a step", xlabel="step", yscale="log")
    save(drawn, path)


def _smooth(values: list[float], over: int = 20) -> list[float]:
    windows = (values[max(0, end - over) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
