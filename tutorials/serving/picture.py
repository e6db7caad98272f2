"""Draws how good the answers of the web service were while the model was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tutorials.pictures import figure, save

if TYPE_CHECKING:
    from tutorials.serving.train import Served


def draw(found: Sequence[Served], best: float, path: Path) -> None:
    """Writes the picture.

    Args:
        found: the answers, in order.
        best: the area that the true chances have.
        path: of the picture.
    """
    drawn = figure(9, 3.4)
    area, behind = drawn.subplots(1, 2)
    steps = [each.step for each in found]
    area.plot(steps, [each.area for each in found], marker="o", markersize=3)
    area.axhline(best, linestyle="--", color="gray")
    area.grid(alpha=0.3)
    area.set(title="AUC served; dashed: the best there is", xlabel="step of training")
    behind.plot(steps, [each.step - each.served for each in found], marker="o", markersize=3)
    behind.grid(alpha=0.3)
    behind.set(title="steps behind training", xlabel="step of training", ylim=(0, None))
    save(drawn, path)
