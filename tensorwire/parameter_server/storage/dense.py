"""One shard's share of an optimizer: pieces of parameters, their state, and a torch optimizer.

Values lie next to each other in one tensor for each dtype, so that a pull is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.declarations.dense_spec import (
    DenseSpec,
    PieceData,
    Spread,
    copied,
    hyper_of,
    optimizer_of,
)
from tensorwire.parameter_server.kernels.sharing import MOST_SHARES, share_out, shares_of


@dataclass(frozen=True)
class DensePart:
    """The push of one trainer to a shard's pieces.

    Args:
        grads: by dtype, in the order of the pieces, those that have a gradient after each other.
        absent: parameters that have none in this step.
        hyper: the hyper-parameters of each group.
    """

    grads: Mapping[torch.dtype, Tensor]
    absent: frozenset[int]
    hyper: Sequence[Mapping[str, object]]


class DenseShard:
    """The pieces of one optimizer on one shard.

    Args:
        spec: what the group is.
        slots: the map from slots to shards.
        shard: this shard.
    """

    def __init__(self, spec: DenseSpec, slots: Sequence[int], shard: int) -> None:
        self.spec = spec
        self.steps = 0
        self.is_loaded = False
        self.loader = -1
        self.shard = shard
        count = MOST_SHARES if spec.spread is Spread.ELEMENTS else 1
        self._optimizers = [optimizer_of(spec) for _ in range(count)]
        self._state = self._optimizers[0].state
        for each in self._optimizers:
            each.state = self._state
        self._parameters: dict[int, nn.Parameter] = {}
        self._flat: dict[torch.dtype, Tensor] = {}
        self.pieces: list[int] = []
        kept = spec.kept_by(slots, shard)
        zeros = {p: PieceData(torch.zeros(len(spec.pieces[p]), dtype=self._dtype(p))) for p in kept}
        self._arrange(zeros)

    def _dtype(self, place: int) -> torch.dtype:
        return self.spec.dtypes[self.spec.pieces[place].parameter]

    @property
    def bytes(self) -> int:
        """The bytes that values and state take."""
        state = sum(
            value.nbytes
            for each in self._state.values()
            for value in each.values()
            if isinstance(value, Tensor)
        )
        return state + sum(flat.nbytes for flat in self._flat.values())

    def _arrange(self, data: Mapping[int, PieceData]) -> None:
        """Lays out exactly these pieces, with this content."""
        self.pieces = sorted(data)
        self._flat, self._parameters = {}, {}
        for dtype in dict.fromkeys(self._dtype(place) for place in self.pieces):
            same = [place for place in self.pieces if self._dtype(place) == dtype]
            self._flat[dtype] = torch.cat([data[place].value.reshape(-1) for place in same])
            begin = 0
            for place in same:
                size = len(self.spec.pieces[place])
                self._parameters[place] = self._parameter(place, self._flat[dtype], begin, size)
                begin += size
        self._state.clear()
        for place in self.pieces:
            if data[place].state:
                self._state[self._parameters[place]] = dict(data[place].state)
        count = len(self._optimizers)
        for share, optimizer in enumerate(self._optimizers):
            begin, end = (len(self.pieces) * n // count for n in (share, share + 1))
            for number, group in enumerate(optimizer.param_groups):
                mine = [p for p in self.pieces[begin:end] if self.spec.pieces[p].group == number]
                group["params"] = [self._parameters[place] for place in mine]

    def _parameter(self, place: int, flat: Tensor, begin: int, size: int) -> nn.Parameter:
        values = flat[begin : begin + size]
        if self.spec.spread is not Spread.ELEMENTS:
            values = values.view(self.spec.shapes[self.spec.pieces[place].parameter])
        return nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())

    # --- reading

    @property
    def groups(self) -> tuple[Mapping[str, object], ...]:
        """The hyper-parameters of each group as they are now."""
        return tuple(hyper_of(group) for group in self._optimizers[0].param_groups)

    def values(self) -> Mapping[torch.dtype, Tensor]:
        """All elements, by dtype, in the order of the pieces; they change with the next step."""
        return self._flat

    def data(self, places: Sequence[int]) -> dict[int, PieceData]:
        """A copy of some pieces with their state."""
        pieces = {}
        for place in places:
            parameter = self._parameters[place]
            state = self._state.get(parameter, {})
            kept = {key: copied(value) for key, value in state.items()}
            pieces[place] = PieceData(parameter.detach().clone(), kept)
        return pieces

    # --- changing

    def apply(self, parts: Sequence[DensePart], share: float | None) -> None:
        """Makes one step with the sum of the parts' gradients, divided by ``share``.

        The hyper-parameters are those of the first part. The parts stay as they are.
        """
        self.steps += 1
        for optimizer in self._optimizers:
            for group, hyper in zip(optimizer.param_groups, parts[0].hyper, strict=True):
                group.update(hyper)
        for parameter in self._parameters.values():
            parameter.grad = None
        for part in parts:
            self._add_grads(part)
        if share is not None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / share
        self._step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _step(self) -> None:
        """Has each optimizer move its pieces, on several cores unless torch itself uses those."""
        works = [each.step for each in self._optimizers]
        size = sum(flat.nbytes for flat in self._flat.values())
        if torch.get_num_threads() == 1 and shares_of(size) > 1:
            share_out(works)
            return
        for work in works:
            work()

    def _add_grads(self, part: DensePart) -> None:
        pieces = self.spec.pieces
        present = [p for p in self.pieces if pieces[p].parameter not in part.absent]
        for dtype, flat in part.grads.items():
            same = [place for place in present if self._dtype(place) == dtype]
            grads = torch.split(flat, [len(pieces[place]) for place in same])
            for place, grad in zip(same, grads, strict=True):
                parameter = self._parameters[place]
                if self.spec.spread is not Spread.ELEMENTS:
                    grad = grad.view(parameter.shape)
                before = parameter.grad
                parameter.grad = grad if before is None else before + grad

    def load(self, data: Mapping[int, PieceData], loader: int, keeps_state: bool = False) -> None:
        """Sets pieces, all of them or some, as ``loader`` says they are.

        Args:
            data: the pieces.
            loader: the trainer that says so.
            keeps_state: whether their state stays as it is.
        """
        old = self.data(self.pieces)
        new = {place: each for place, each in data.items() if place in old}
        if keeps_state:
            new = {place: PieceData(each.value, old[place].state) for place, each in new.items()}
        self._arrange({**old, **new})
        self.is_loaded = True
        self.loader = loader

    def leave(self, slots: Sequence[int]) -> dict[int, PieceData]:
        """Lets pieces go that another map gives to other shards; returns them."""
        staying = set(self.spec.kept_by(slots, self.shard))
        going = [place for place in self.pieces if place not in staying]
        left = self.data(going)
        self._arrange(self.data([place for place in self.pieces if place in staying]))
        return left

    def enter(self, data: Mapping[int, PieceData], steps: int) -> None:
        """Takes pieces in that were another shard's."""
        self.steps = max(self.steps, steps)
        self._arrange({**self.data(self.pieces), **data})
