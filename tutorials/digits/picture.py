"""Draws the notes of a run."""

from __future__ import annotations

from pathlib import Path

from tutorials import pictures
from tutorials.digits.report import History


def draw(history: History, path: Path) -> None:
    """Save the loss curves and the accuracy as a PNG picture at ``path``."""
    figure = pictures.figure(11, 4)
    losses, accuracies = figure.subplots(1, 2)
    for trainer, values in sorted(history.losses.items()):
        losses.plot(values, label=trainer, linewidth=0.8)
    losses.set(xlabel="step", ylabel="training loss", yscale="log")
    losses.legend()
    accuracies.plot(
        list(history.accuracies), [100 * value for value in history.accuracies.values()], "o-"
    )
    accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
    accuracies.xaxis.get_major_locator().set_params(integer=True)
    accuracies.grid(visible=True, alpha=0.3)
    pictures.save(figure, path)
