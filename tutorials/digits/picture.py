"""Draws what was noted of a run. Draws into a file and needs no screen."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from report import History


def draw(history: History, path: Path) -> None:
    """Save the loss curves and the accuracy as a PNG picture at ``path``."""
    figure = Figure(figsize=(11, 4), layout="constrained")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
