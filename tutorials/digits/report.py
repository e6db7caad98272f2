"""The notes on a run, and the progress bar a person sees while it lasts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass(slots=True)
class History:
    """The loss of every step, per trainer, and the test accuracy after every epoch."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    accuracies: dict[int, float] = field(default_factory=dict)

    def add_loss(self, trainer: str, loss: float) -> None:
        """Append the loss of a trainer's latest step."""
        self.losses.setdefault(trainer, []).append(loss)

    def add_accuracy(self, epoch: int, accuracy: float) -> None:
        """Note the accuracy, 0 to 1, that was measured after ``epoch``, counted from 1."""
        self.accuracies[epoch] = accuracy


class Progress:
    """A bar that shows samples, samples per second and a smoothed loss.

    Where the output is not a terminal the bar stays away, and only notes appear.
    """

    def __init__(self, samples: int) -> None:
        self._bar = tqdm(total=samples, unit=" samples", unit_scale=True, disable=None)
        self._loss: float | None = None

    def advance(self, samples: int, loss: float) -> None:
        """Move the bar by ``samples`` and show ``loss`` beside it."""
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        self._bar.set_postfix(loss=f"{self._loss:.3f}", refresh=False)
        self._bar.update(samples)

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._bar.close()
