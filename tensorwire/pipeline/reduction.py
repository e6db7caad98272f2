"""The way in which losses of micro-batches make the loss of a batch: a mean over rows, or a sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, get_args

import torch

from tensorwire.pipeline.plan import Loss
from tensorwire.pipeline.trees import map_tensors, tensors_of

Reduction = Literal["mean", "sum"]
_CLOSE: Final = 1e-4
"""The share of a loss by which sums in another order may differ from it."""
_FAR: Final = 0.1


class BatchLoss:
    """A loss that is one number for each micro-batch, with the way of putting these together.

    Args:
        loss: of the last stage's output and the target of a micro-batch.
        reduction: how it reduces rows; None: as the loss says itself, or else by their mean.

    Raises:
        TypeError: the loss cannot be called.
        ValueError: there is no such reduction, or the loss reduces otherwise.

    Attributes:
        reduction: how it reduces rows.
    """

    def __init__(self, loss: Loss, reduction: Reduction | None) -> None:
        if not callable(loss):
            raise TypeError(f"loss={loss!r} is a {type(loss).__name__}, not a function")
        if reduction not in (None, *get_args(Reduction)):
            raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum'")
        told = _told_by(loss)
        if told == "none":
            raise ValueError(
                f"loss={loss!r} has reduction='none'; a pipeline needs one number: 'mean' or 'sum'"
            )
        if told is not None and reduction is not None and told != reduction:
            raise ValueError(f"reduction={reduction!r}, but loss={loss!r} has {told!r}")
        self._loss = loss
        self._is_checked = told is not None or reduction is not None
        self.reduction: Reduction = reduction or told or "mean"

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a micro-batch.

        Raises:
            TypeError: it is no tensor.
            ValueError: it is not one number; or nothing was said of its reduction, and it is seen
                to add rows up.
        """
        value = self._loss(output, target)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"loss={self._loss!r} returned a {type(value).__name__}, not a tensor")
        if value.numel() != 1:
            raise ValueError(
                f"loss={self._loss!r} returned shape {tuple(value.shape)}, not one number; reduce "
                "it by a mean or a sum"
            )
        if not self._is_checked:
            self._is_checked = True
            self._require_mean(output, target, value)
        return value

    def weights(self, rows: Sequence[int]) -> tuple[float, ...]:
        """The factor of each micro-batch's loss in that of the batch.

        Args:
            rows: how many each micro-batch has.
        """
        if self.reduction == "sum":
            return (1.0,) * len(rows)
        return tuple(each / sum(rows) for each in rows)

    def _require_mean(self, output: Any, target: Any, whole: torch.Tensor) -> None:
        """Looks at the losses of two halves: of a mean, they lie about the whole one."""
        try:
            with torch.no_grad():
                halves = [(output, target) for output, target in _halves(output, target)]
                first, second = (float(self._loss(*half)) for half in halves)
        except Exception:  # it takes whole micro-batches only, and says nothing about halves
            return
        total = float(whole.detach())
        adds_up = abs(first + second - total) <= _CLOSE * abs(total)
        if adds_up and abs((first + second) / 2 - total) > _FAR * abs(total):
            raise ValueError(
                f"loss={self._loss!r} adds up the losses of rows, and the pipeline would take the "
                "mean of its micro-batches: say reduction='sum', or have the loss take the mean"
            )


def _told_by(loss: Any) -> Any:
    """The reduction that a loss of ``torch.nn``, or a partial function, says it has."""
    if isinstance(loss, partial):
        told = loss.keywords.get("reduction", _told_by(loss.func))
    else:
        told = getattr(loss, "reduction", None)
    return told if told in ("mean", "sum", "none") else None


def _halves(output: Any, target: Any) -> list[tuple[Any, Any]]:
    """The first and the second half of the rows.

    Raises:
        ValueError: there are no two rows, or tensors have different numbers of them.
    """
    rows = {len(each) for each in tensors_of((output, target))}
    if len(rows) != 1 or (count := rows.pop()) % 2:
        raise ValueError("there are no two halves")
    halves = slice(count // 2), slice(count // 2, count)
    return [map_tensors((output, target), partial(_rows, half)) for half in halves]


def _rows(which: slice, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[which]
