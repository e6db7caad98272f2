"""The dense parameters of one optimizer, as a client sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from tensorwire.parameter_server.decisions.records import Assign
from tensorwire.parameter_server.declarations.dense_spec import (
    DenseSpec,
    Piece,
    PieceData,
    hyper_of,
    parameters_of,
    split_state,
    whole_state,
)
from tensorwire.parameter_server.kernels.copying import copied
from tensorwire.parameter_server.kernels.digests import Digests
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.messages import Values

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_LONGEST_PAUSE: Final = 0.05


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
        self._all = range(len(self.parameters))
        self._digests = Digests(self.parameters)
        self._remember()

    def __repr__(self) -> str:
        count = sum(each.numel() for each in self.parameters)
        return f"DenseGroup({self.name!r}, {self.spec.optimizer.__name__}, {count} elements)"

    def gradients(self) -> list[Tensor | None]:
        """The gradients of all parameters as they are now."""
        return [parameter.grad for parameter in self.parameters]

    def hyper(self) -> tuple[Mapping[str, object], ...]:
        """The hyper-parameters of each group as they are now."""
        return tuple(hyper_of(group) for group in self.optimizer.param_groups)

    @torch.no_grad()
    def accept(self, values: Sequence[Tensor]) -> None:
        """Sets the parameters to what came from the servers."""
        for parameter, value in zip(self.parameters, values, strict=True):
            copied(value, parameter)
        self._remember()

    # --- what servers have, and what is set here

    def is_changed(self, place: int | None = None) -> bool:
        """True if a parameter was written to here since the last values came from servers.

        Args:
            place: of the one to look at. Default all.

        Raises:
            ValueError: one has another shape or dtype than the servers know.
        """
        places = self._all if place is None else (place,)
        for each in places:
            self._require_kept(each)
        if any(self._seen[each] != self._counted(each) for each in places):
            return True
        digests = self._digests.now(places)
        return any(digests[each] != self._digested[each] for each in places)

    def _require_kept(self, place: int) -> None:
        parameter = self.parameters[place]
        shape, dtype = self.spec.shapes[place], self.spec.dtypes[place]
        if tuple(parameter.shape) != shape or parameter.dtype != dtype:
            raise ValueError(
                f"parameter {place} of {self.name!r} became {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}; servers keep {dtype} of shape {shape}: convert a model "
                "before its optimizer is made"
            )

    def _counted(self, place: int) -> tuple[int, int]:
        """Changes that torch has counted, and where the values are."""
        parameter = self.parameters[place]
        return parameter._version, parameter.data_ptr()

    def _remember(self) -> None:
        self._seen = [self._counted(place) for place in self._all]
        self._digested = self._digests.now(self._all)

    def values(self, keeps_state: bool = False) -> Values:
        """The parameters as they are here, and their state.

        Args:
            keeps_state: leaves the state out; that of the servers stays as it is.
        """
        data = {}
        for place, piece in enumerate(self.spec.pieces):
            parameter = self.parameters[piece.parameter]
            flat = parameter.detach().to("cpu").reshape(-1)
            value = flat[piece.start : piece.stop].clone()
            data[place] = PieceData(value, {} if keeps_state else self._state_of(piece))
        return Values(self.name, self.cluster.number, data, keeps_state)

    def _state_of(self, piece: Piece) -> dict[str, object]:
        state = self.optimizer.state.get(self.parameters[piece.parameter], {})
        cut = split_state(self.spec, piece, state)
        return {key: v.to("cpu") if isinstance(v, Tensor) else v for key, v in cut.items()}

    def upload(self, keeps_state: bool = True) -> None:
        """Sets the servers' values to those here.

        Args:
            keeps_state: whether the servers' state of the optimizer stays, too; otherwise it
                becomes that of the local optimizer.
        """
        values = self.values(keeps_state)
        self.cluster.session.servers.ask_heads(
            lambda shard: messages.Setting(shard, Assign(values))
        )
        self._remember()

    def state(self) -> dict[int, dict[str, object]]:
        """The servers' state of the optimizer, by the number of the parameter."""
        answers = self.cluster.session.servers.ask_heads(
            lambda shard: messages.Getting(shard, self.name)
        )
        by_place: dict[int, PieceData] = {}
        for each in answers:
            by_place.update(each)
        pieces: dict[int, list[tuple[Piece, Mapping[str, object]]]] = {}
        for place, piece in enumerate(self.spec.pieces):
            pieces.setdefault(piece.parameter, []).append((piece, by_place[place].state))
        return {
            parameter: whole_state(self.spec, parameter, mine)
            for parameter, mine in pieces.items()
            if mine[0][1]
        }
