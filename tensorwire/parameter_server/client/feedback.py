"""Keeps what a lossy kind of packing leaves out of gradients, and adds it to the next ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.wire import Kind
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Floats
from tensorwire.parameter_server.rows.index import Index
from tensorwire.parameter_server.rows.memory import Column


class Feedback:
    """The remainders that were left out of the gradients of one table, at one trainer.

    So what a row is pushed adds up to all its gradients, but for the last remainder. Takes
    memory for each id that this trainer has pushed.

    Args:
        kind: how gradients are packed.
        dim: columns of the table.
    """

    def __init__(self, kind: Kind, dim: int) -> None:
        self._kind = kind
        self._dim = dim
        self._index = Index(kernels())
        self._left = Column(np.float32, dim)

    @property
    def bytes(self) -> int:
        """The bytes that the remainders take."""
        return self._index.bytes + 4 * self._dim * self._index.count

    def corrected(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Returns what is to be packed: a gradient, and what was left out before.

        Args:
            ids: of the rows, all different.
            grad: a row for each id. Rows that are infinite or not numbers leave nothing behind.
        """
        rows = self._index.upsert(ids.numpy())
        self._left.reserve(self._index.count)
        left: Floats = np.empty((len(rows), self._dim), np.float32)
        kernels().gather(self._left.rows, rows, left)
        total = grad + torch.from_numpy(left)
        rest = total - self._kind.unpack(self._kind.pack(total), self._dim)
        kernels().scatter(rest.nan_to_num_(0.0, 0.0, 0.0).numpy(), rows, self._left.rows)
        return total

    def clear(self) -> None:
        """Forgets all remainders, as after a roll-back."""
        self._index = Index(kernels())
        self._left = Column(np.float32, self._dim)
