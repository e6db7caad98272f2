"""The dense parameters of one optimizer, as a client sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tensorwire.parameter_server.dense_spec import (
    DenseSpec,
    hyper_of,
    joined_state,
    parameters_of,
    state_of_piece,
)
from tensorwire.parameter_server.server.state import Values
from tensorwire.parameter_server.storage.dense import PieceData

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

__all__ = ["DenseGroup", "joined_state"]


class DenseGroup:
    """One optimizer's parameters, which servers keep and move. Made by ``Cluster.dense``.

    Attributes:
        name: unique in the cluster.
        spec: what it is.
        optimizer: the local one, whose ``param_groups`` say the hyper-parameters.
        parameters: all of them, in the order of the groups.
    """

    def __init__(self, cluster: Cluster, spec: DenseSpec, optimizer: Optimizer) -> None:
        self.cluster = cluster
        self.spec = spec
        self.name = spec.name
        self.optimizer = optimizer
        self.parameters = parameters_of(optimizer)

    def __repr__(self) -> str:
        count = sum(each.numel() for each in self.parameters)
        return f"DenseGroup({self.name!r}, {self.spec.optimizer.__name__}, {count} elements)"

    def gradients(self) -> list[Tensor | None]:
        """The gradients of all parameters as they are now."""
        return [parameter.grad for parameter in self.parameters]

    def hyper(self) -> tuple[Mapping[str, Any], ...]:
        """The hyper-parameters of each group as they are now."""
        return tuple(hyper_of(group) for group in self.optimizer.param_groups)

    @torch.no_grad()
    def accept(self, values: Sequence[Tensor]) -> None:
        """Sets the parameters to what came from the servers."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value.view(parameter.shape))

    def values(self) -> Values:
        """What the servers begin with: the parameters as they are here, and their state."""
        data = {}
        for place, piece in enumerate(self.spec.pieces):
            parameter = self.parameters[piece.parameter]
            flat = parameter.detach().to("cpu").reshape(-1)
            state = self.optimizer.state.get(parameter, {})
            shape = self.spec.shapes[piece.parameter]
            data[place] = PieceData(
                flat[piece.start : piece.stop].clone(), state_of_piece(state, piece, shape)
            )
        return Values(self.name, self.cluster.number, data)
