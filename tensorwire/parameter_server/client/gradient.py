"""The gradient of a table's rows, as torch knows gradients: the ``grad`` of one parameter.

The parameter stands for those rows that were used since the last step. So clipping, scaling and
``zero_grad`` do to rows what they do to any parameter. The rows themselves are on the servers, so
it refuses whatever would compute with them, such as an optimizer of torch's. Rows of several tables
that were fetched together have one gradient, of which each table's is a part.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.exchange import StepGradient
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.opaque import AnyTable, Function, Untyped

_SEEN: Final = frozenset(
    """
    __get__ __set__ __len__ __repr__ __format__ __hash__ __dir__ __reduce_ex__ detach
    requires_grad_ size dim ndimension numel nelement element_size stride storage_offset data_ptr
    is_contiguous is_floating_point is_complex is_pinned is_shared is_inference get_device type
    untyped_storage storage to cpu cuda float double half bfloat16 clone contiguous view reshape
    flatten share_memory_ _is_view _has_compatible_shallow_copy_type
    """.split()  # noqa: SIM905
)
"""Functions that only look at a parameter, or bring it elsewhere."""


class _Function(Protocol):
    """A function of torch."""

    __name__: str

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class StandIn(nn.Parameter):
    """Stands for a table's rows among the parameters of a model; has no elements of its own.

    Args:
        gradient: of the rows; its ``grad`` is that of this parameter.
        requires_grad: whether rows that are looked up get gradients.
    """

    gradient: RowGradient

    def __new__(cls, gradient: RowGradient, requires_grad: bool = True) -> StandIn:
        """Makes a parameter without elements, but with as many columns as the table."""
        made = super().__new__(cls, torch.empty(0, gradient.dim), requires_grad)
        made.gradient = gradient
        return made

    def __init__(self, gradient: RowGradient, requires_grad: bool = True) -> None:
        """Does nothing: ``__new__`` does everything, as for any parameter."""

    @property
    def grad(self) -> Tensor | None:
        """A row for each id that was used since the last step; None if there is none."""
        return self.gradient.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.gradient.replace(value)

    @grad.deleter
    def grad(self) -> None:
        self.gradient.replace(None)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Registers a hook, called with gradients of rows as they come; it may replace them."""
        return _hooked(self.gradient.hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Registers a hook, called with this when a gradient has been added."""
        bound: Callable[[], object] = functools.partial(hook, self)
        return _hooked(self.gradient.later_hooks, bound)

    def why_not_stepped_here(self) -> str | None:
        """Returns why no ``DistributedOptimizer`` can have it; None if these rows are frozen."""
        return (
            self.gradient.only_servers_step("DistributedOptimizer") if self.requires_grad else None
        )

    def __deepcopy__(self, memo: dict[int, object]) -> StandIn:
        """Makes a copy that stands for the same rows, and is frozen by itself."""
        made = memo[id(self)] = StandIn(self.gradient, self.requires_grad)
        return made

    def __reduce_ex__(self, _: object) -> tuple[Function, tuple[object, ...]]:
        is_first = self is self.gradient.parameter
        return _rows_of, (self.gradient.table, is_first, self.requires_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Refuses to compute with rows that are not here."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _SEEN:
                return func(*args, **kwargs)
            given = list(_rows_in((args, kwargs)))
            for each in given:
                if each.grad is not None and not func.__name__.startswith("is"):
                    raise RuntimeError(each.gradient.only_servers_step(func.__name__))
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.grad_fn is not None:
            raise RuntimeError(given[0].gradient.not_here(func.__name__))
        # State that an optimizer makes for these rows is not here either.
        is_state = func.__name__.endswith("_like")
        return StandIn(given[0].gradient, requires_grad=False) if is_state else result


class RowGradient:
    """The gradient of those rows of one table that were used since the last step.

    Args:
        dim: columns of the table.
        table: whose rows these are.

    Attributes:
        parameter: stands for the rows in all modules on this table.
        grad: the gradient, a row for each id; None if there is none.
        ids: of the rows.
        whole: the gradient of several tables that :attr:`part` is a part of; None if of none.
        part: what :attr:`grad` is as long as nobody has put another in its place.
        hooks: called with each gradient that comes.
        later_hooks: called when one has been added.
    """

    def __init__(self, dim: int, table: AnyTable = None) -> None:
        self._no_ids = torch.empty(0, dtype=torch.int64)
        self.dim = dim
        self.table = table
        self.grad: Tensor | None = None
        self.ids = self._no_ids
        self.whole: StepGradient | None = None
        self.part: Tensor | None = None
        self.hooks: dict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.later_hooks: dict[int, Callable[[], object]] = OrderedDict()
        self.parameter = StandIn(self)

    def add(self, ids: Tensor, grad: Tensor) -> None:
        """Adds a gradient to what is there.

        Args:
            ids: of the rows, all different.
            grad: a row for each id.
        """
        if self.grad is not None:
            ids, grad = _sum(self.ids, self.grad, ids, grad)
        self.set(ids, grad, None)

    def set(self, ids: Tensor, grad: Tensor, whole: StepGradient | None) -> None:
        """Puts a gradient in the place of what is there.

        Args:
            ids: of the rows, all different.
            grad: a row for each id.
            whole: what ``grad`` is a part of; None if of nothing.
        """
        self.ids, self.grad = ids, grad
        self.whole, self.part = whole, grad

    def arrived(self, ids: Tensor, grad: Tensor, whole: StepGradient | None) -> None:
        """Takes a gradient that a backward pass has computed, as :meth:`set` and :meth:`add` do."""
        for hook in list(self.hooks.values()):
            changed = hook(grad)
            grad, whole = (grad, whole) if changed is None else (changed, None)
        if self.grad is None:
            self.set(ids, grad, whole)
        else:
            self.add(ids, grad)
        for later in list(self.later_hooks.values()):
            later()

    def replace(self, grad: Tensor | None) -> None:
        """Puts another gradient of the same rows in its place.

        Raises:
            RuntimeError: it is that of other rows.
        """
        wanted = (len(self.ids), self.dim)
        if grad is not None and tuple(grad.shape) != wanted:
            raise RuntimeError(
                f"the gradient of {self._name}'s rows that were used has shape {wanted}, not "
                f"{tuple(grad.shape)}"
            )
        self.grad = grad

    def peek(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient; None if there is none."""
        return None if self.grad is None else (self.ids, self.grad)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient and forgets both; None if there is none."""
        taken = self.peek()
        self.clear()
        return taken

    def clear(self) -> None:
        """Forgets the gradient."""
        self.ids, self.grad = self._no_ids, None
        self.whole, self.part = None, None

    # --- what is refused

    @property
    def _name(self) -> str:
        return f"table {getattr(self.table, 'name', '')!r}"

    def only_servers_step(self, operation: str) -> str:
        """The sentence for programs that step rows here."""
        return (
            f"{operation}: the rows of {self._name} are on its servers, and an optimizer of torch "
            "alone cannot move them; make ps.Optimizer(cluster, model, ...), or move this one with "
            "ps.Optimizer.wrap(optimizer, cluster, model)"
        )

    def not_here(self, operation: str) -> str:
        """The sentence for programs that compute with rows here."""
        return (
            f"{operation}: the rows of {self._name} are on its servers, so nothing can be computed "
            "of the parameter that stands for them; compute penalties of what the module returns, "
            "or give the table's rule a weight_decay; leave the module's `rows` out"
        )


class HasGradient(Protocol):
    """A table, as far as its gradient goes."""

    name: str
    gradient: RowGradient


def watch(gradients: Sequence[RowGradient | None], ids: TableIds, rows: Tensor) -> None:
    """Takes the gradient of some rows over as soon as ``backward`` has computed it.

    Args:
        gradients: of each table; None of those that are frozen.
        ids: of the rows.
        rows: a leaf that requires a gradient, with a row for each id.
    """
    leaf: Untyped = rows
    leaf.register_post_accumulate_grad_hook(functools.partial(_arrive, gradients, ids))


def _arrive(gradients: Sequence[RowGradient | None], ids: TableIds, rows: Tensor) -> None:
    grad, rows.grad = rows.grad, None
    assert grad is not None
    whole = None if None in gradients else StepGradient(ids, grad)
    sizes = ids.sizes
    parts = zip(
        gradients, ids.ids.split_with_sizes(sizes), grad.split_with_sizes(sizes), strict=True
    )
    for gradient, own, part in parts:
        if gradient is not None:
            gradient.arrived(own, part, whole)


def gathered(tables: Iterable[HasGradient]) -> list[StepGradient]:
    """The gradients of tables: those of several that arrived together, and all others."""
    gradients: list[StepGradient] = []
    parts: dict[int, list[HasGradient]] = {}
    for table in tables:
        gradient = table.gradient
        grad = gradient.grad
        if grad is None:
            continue
        if gradient.whole is not None and grad is gradient.part:
            parts.setdefault(id(gradient.whole), []).append(table)
        else:
            gradients.append(_alone(table))
    for some in parts.values():
        whole = some[0].gradient.whole
        assert whole is not None
        gradients += [whole] if len(some) == len(whole.ids.tables) else [_alone(t) for t in some]
    return gradients


def _alone(table: HasGradient) -> StepGradient:
    ids, grad = table.gradient.ids, table.gradient.grad
    assert grad is not None
    return StepGradient(TableIds((table.name,), (len(ids),), ids), grad)


def _rows_of(table: HasGradient, is_first: bool, requires_grad: bool) -> StandIn:
    """Rebuilds a pickled parameter, in another process or later."""
    parameter = table.gradient.parameter
    return parameter if is_first else StandIn(table.gradient, requires_grad)


_Hook = TypeVar("_Hook")


def _hooked(hooks: dict[int, _Hook], hook: _Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _rows_in(value: object) -> Iterator[StandIn]:
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, Mapping):
        yield from _rows_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _rows_in(each)


def _sum(ids: Tensor, grad: Tensor, more: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two gradients: rows of both are added, in this order."""
    union, places = distinct(torch.cat((ids, more)))
    places = places.to(grad.device)
    total = grad.new_zeros(len(union), grad.shape[1])
    total[places[: len(ids)]] = grad
    total.index_add_(0, places[len(ids) :], other.to(grad))
    return union, total
