"""A ``torch.optim.Optimizer`` whose parameters, state and tables servers keep and move."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client import scaling, stand_ins, table_groups
from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.contexts import require_gradients_here
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.embedding import tables_of
from tensorwire.parameter_server.client.exchange import (
    Answer,
    Exchanging,
    KnownRows,
    Step,
    StepGradient,
)
from tensorwire.parameter_server.client.gradient import StandIn, gathered
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.opaque import OptimizerMaker, OptimizerValue, Untyped, UserValue
from tensorwire.parameter_server.rows.device_memory import to_host


class Pushing(enum.Enum):
    """The times at which gradients of dense parameters leave for the servers."""

    STEP = "at each step"
    """All gradients leave together, in ``step``. Before, they may be clipped, scaled and
    accumulated."""
    BACKWARD = "during backward"
    """Each gradient leaves as soon as it is computed, and is freed, so that gradients take the
    memory of one parameter. Each push counts as a step of the cluster's clock."""


class Optimizer(torch.optim.Optimizer):
    """Steps the dense parameters and the tables of a model at the servers.

    Its ``param_groups`` are those of the dense optimizer, and one for each table with the rows
    that were used since the last step: schedulers, clipping of gradients and ``GradScaler``
    work on them as on any other. A step is one message to each server: its gradients, and
    what the next step needs. Under ``ps.SSP`` and ``ps.Async`` a step that needs nothing, as it
    moves tables only, does not wait for the servers; an error of its push is raised by the next.

    Parameters that are set here, as by ``model.load_state_dict`` or through ``.data``, are set at
    the servers with the next step.

    Args:
        cluster: where the parameters are.
        model: its dense parameters are moved, and the tables that its modules use.
        dense: class of the optimizer of dense parameters. Default none: they stay as they are.
        tables: further tables.
        name: of the dense parameters in the cluster; models of one cluster need different ones.
        pushing: when gradients of dense parameters leave. Default at each step.
        hyper: arguments of ``dense``.

    Raises:
        DeclarationError: another model, here or at another trainer, has this name.
        ValueError: there is nothing to optimize, or a table is of another cluster.
        TypeError: an argument is of a wrong kind, or ``dense`` does not take these arguments.

    Example::

        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam, lr=1e-3)
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells ``GradScaler`` that :meth:`step` takes its scale out of gradients.

        Raises:
            ValueError: gradients leave before a scale could be taken out of them.
        """
        if self._pushing is Pushing.BACKWARD:
            raise ValueError(scaling.NOT_WITH_BACKWARD)
        return True

    def __init__(
        self,
        cluster: Cluster,
        model: nn.Module | None = None,
        dense: OptimizerMaker | None = None,
        *,
        tables: Iterable[Table] = (),
        name: str = "model",
        pushing: Pushing = Pushing.STEP,
        **hyper: OptimizerValue,
    ) -> None:
        instance("ps.Optimizer", "model", model, (nn.Module, type(None)), "a module or None")
        if dense is not None and not callable(dense):
            raise TypeError(
                f"ps.Optimizer: dense={dense!r} is a {type(dense).__name__}, not a class such as "
                "torch.optim.Adam; ps.Optimizer.wrap takes optimizers that are there already"
            )
        if dense is None and hyper:
            raise TypeError(f"ps.Optimizer: {', '.join(hyper)} needs dense=, whose argument it is")
        remote = [*_tables_of(model), *tables]
        _check(cluster, remote)
        everything = [] if model is None else model.parameters()
        parameters = [p for p in everything if p.requires_grad and not isinstance(p, StandIn)]
        local = dense(parameters, **hyper) if dense is not None and parameters else None
        self._begin(cluster, local, remote, name, pushing)

    @classmethod
    def wrap(
        cls,
        optimizer: torch.optim.Optimizer,
        cluster: Cluster,
        model: nn.Module | None = None,
        *,
        tables: Iterable[Table] = (),
        name: str = "model",
        pushing: Pushing = Pushing.STEP,
    ) -> Optimizer:
        """Moves a constructed optimizer to the servers, with its state.

        Works with any optimizer whose step needs no closure. The parameter groups stay the same
        objects, so that schedulers made for ``optimizer`` go on working.

        Args:
            optimizer: the optimizer; not to be used itself any more. If it was given the
                parameters of modules on tables, these are moved, too, by the tables' own rules.
            cluster: where its parameters and its state go.
            model: tables that its modules use are moved too. Default none.
            tables: further tables.
            name: of the dense parameters in the cluster.
            pushing: when gradients of dense parameters leave. Default at each step.

        Returns:
            What takes its place.

        Raises:
            DeclarationError: another optimizer, here or at another trainer, has this name.
            TypeError: it is no optimizer.
            ValueError: it needs a closure; a table is of another cluster; or a parameter group is
                for a table alone, and contradicts the table's rule.

        Example::

            optimizer = ps.Optimizer.wrap(torch.optim.AdamW(model.parameters()), cluster)
        """
        instance("wrap", "optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
        made = cls.__new__(cls)
        made._begin(cluster, optimizer, [*_tables_of(model), *tables], name, pushing)
        return made

    def _begin(
        self,
        cluster: Cluster,
        local: torch.optim.Optimizer | None,
        tables: Iterable[Table],
        name: str,
        pushing: Pushing,
    ) -> None:
        instance("ps.Optimizer", "pushing", pushing, Pushing, "a ps.Pushing")
        instance("ps.Optimizer", "name", name, str, "a text")
        tables = list(tables)
        if local is not None:
            tables += stand_ins.tables_of(local)
        _check(cluster, tables)
        self.cluster = cluster
        self.tables = list(dict.fromkeys(tables))
        self.group: DenseGroup | None = None
        if local is None and not self.tables:
            raise ValueError("ps.Optimizer: the model has no tables, and no optimizer for others")
        if local is not None:
            stand_ins.remove(local)
        has_dense = local is not None and any(group["params"] for group in local.param_groups)
        self.local = local if has_dense else None
        defaults = table_groups.defaults(self.tables) if local is None else dict(local.defaults)
        super().__init__([{"params": []}], defaults)
        spec = None if self.local is None else cluster.declare_dense(name, self.local)
        cluster.join()
        if self.local is not None and spec is not None:
            self.group = cluster.load_dense(spec, self.local)
            self.local.state.clear()
        self._table_names = [table.name for table in self.tables]
        self._table_groups = [table_groups.group_of(table, self.defaults) for table in self.tables]
        self._rules = [
            table_groups.GroupRule(table, group)
            for table, group in zip(self.tables, self._table_groups, strict=True)
        ]
        self._show_groups()
        self._pushing = pushing
        self._under_way: Exchanging[Answer | None] | None = None
        if pushing is Pushing.BACKWARD and self.group is not None:
            watch = scaling.Watch()
            for place, parameter in enumerate(self.group.parameters):
                _on_gradient(parameter, partial(self._push_one, place, watch))

    def _show_groups(self) -> None:
        dense = [] if self.local is None else self.local.param_groups
        self.param_groups: list[dict[str, OptimizerValue]] = [*dense, *self._table_groups]

    def __repr__(self) -> str:
        kind = "no dense parameters" if self.local is None else type(self.local).__name__
        return f"ps.Optimizer({kind}, tables={[table.name for table in self.tables]})"

    def __getstate__(self) -> dict[str, OptimizerValue]:
        """Refuses copies and pickles.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a ps.Optimizer is its trainer's connection to the servers, and cannot be copied or "
            "pickled; save its state_dict(), or everything with cluster.snapshot()"
        )

    def add_param_group(self, param_group: dict[str, OptimizerValue]) -> None:
        """Refuses: servers must know all parameters from the beginning.

        Args:
            param_group: as in torch.

        Raises:
            ValueError: always, after construction.
        """
        if hasattr(self, "_pushing"):
            raise ValueError(
                "ps.Optimizer: parameters cannot be added; make another one, with another name"
            )
        super().add_param_group(param_group)

    # --- steps

    def step(self, closure: Callable[[], float] | None = None) -> UserValue:
        """Pushes the gradients, and gets what the next step needs.

        Args:
            closure: computes the loss and its gradients, once. Default none.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            GradientError: gradients are not finite; see ``NanPolicy``.
            RolledBack: see there; :meth:`reload` gets the parameters of that snapshot.
            RuntimeError: gradients are in a context of ``autograd_dist``, and not in ``grad``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._upload_changes()
        self._exchange(None if self._is_skipped() else self._gradients())
        return loss

    def skip(self) -> None:
        """Makes a step without gradients, so that nobody waits for this trainer's."""
        self._exchange(None)

    def _exchange(self, push: Step | None) -> None:
        coming = self.cluster.rows.announced(self._table_names)
        dense = () if self.group is None else (self.group.name,)
        is_step = self._pushing is Pushing.STEP or bool(self.tables)
        wanted = [each.missing for each in coming]
        known = [each.known for each in coming if each.known is not None]
        try:
            sent = self._exchanged(push if is_step else None, wanted, dense, is_step, known)
        finally:
            for table in self.tables:
                table.gradient.clear()
        if sent is not None:
            self._accept(sent.wait())
            self.cluster.rows.promised(coming, sent)

    def _exchanged(
        self,
        push: Step | None,
        wanted: Sequence[TableIds],
        dense: tuple[str, ...],
        is_step: bool,
        known: Sequence[KnownRows],
    ) -> Exchanging[Answer | None] | None:
        """Waits for what it pulls; a push alone is waited for at the next step, if it may be."""
        before, self._under_way = self._under_way, None
        if before is not None:
            before.wait()
        sent = self.cluster.stepper.send(push, wanted, dense, is_step, known)
        self.cluster.use_the_wait()
        if not wanted and not dense and self.cluster.is_stale:
            self._under_way = sent
            return None
        sent.wait()
        return sent

    def reload(self) -> None:
        """Gets the dense parameters as the servers have them, after ``RolledBack``."""
        if self.group is not None:
            self._accept(self.cluster.stepper.send(None, dense=(self.group.name,)).wait())

    def upload(self) -> None:
        """Sets the dense parameters at the servers to those here; :meth:`step` does so itself
        if they were changed.
        """
        if self.group is not None:
            self.group.upload()

    def _upload_changes(self, place: int | None = None) -> None:
        if self.group is not None and self.group.is_changed(place):
            self.group.upload()

    def _is_skipped(self) -> bool:
        """True if ``GradScaler`` has found gradients that are not finite; else unscales them."""
        found = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            return True
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return False

    def _gradients(self) -> Step:
        for rule in self._rules:
            if not rule.follow():
                rule.table.gradient.clear()
        rows = [
            StepGradient(each.ids, to_host(each.grad.to(torch.float32)).contiguous())
            for each in gathered(self.tables)
        ]
        rows = self.cluster.rows.as_pulled(rows)
        dense: dict[str, list[Tensor | None]] = {}
        if self.group is not None and self._pushing is Pushing.STEP:
            require_gradients_here(self.group.name, self.group.parameters)
            dense[self.group.name] = self.group.gradients()
        return Step(rows, dense)

    def _push_one(self, place: int, watch: scaling.Watch, parameter: Tensor) -> None:
        """Pushes the gradient of one parameter, and frees it."""
        assert self.group is not None
        watch.require_plain()
        self.cluster.given.require_whole_steps()
        self._upload_changes(place)
        grads: list[Tensor | None] = [None] * len(self.group.parameters)
        grads[place], parameter.grad = parameter.grad, None
        self.cluster.stepper.send(Step([], {self.group.name: grads})).wait()

    def _accept(self, answer: Answer | None) -> None:
        if self.group is not None and answer is not None:
            values = answer.dense[self.group.name]
            if values is not None:
                self.group.accept(values)

    # --- state

    @contextmanager
    def _state_here(self) -> Iterator[torch.optim.Optimizer | None]:
        """The local optimizer, for a while with the state that servers have."""
        local, group = self.local, self.group
        if local is None or group is None:
            yield None
            return
        try:
            for place, state in group.state().items():
                local.state[group.parameters[place]] = state
            yield local
        finally:
            local.state.clear()

    def state_dict(self) -> dict[str, OptimizerValue]:
        """The state as that of the local optimizer would be, fetched from the servers.

        Rows of tables and their state are not part of it (``Cluster.snapshot``), only the
        hyper-parameters of tables, under ``"tables"``.
        """
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        self._upload_changes()
        with self._state_here() as local:
            state = {"state": {}, "param_groups": []} if local is None else local.state_dict()
        if self.tables:
            hyper = [{k: v for k, v in g.items() if k != "params"} for g in self._table_groups]
            state["tables"] = hyper
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, OptimizerValue]) -> None:
        """Sets state and hyper-parameters here and at the servers, and the parameters as here.

        Args:
            state_dict: of this optimizer, or of a local one of the same class.

        Raises:
            TypeError: it is no dict.
            ValueError: it is that of another model.
        """
        instance("load_state_dict", "state_dict", state_dict, Mapping, "a dict of state")
        given = dict(state_dict)
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            given = dict(before(self, given) or given)
        self._load(given)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def _load(self, given: dict[str, OptimizerValue]) -> None:
        for saved in given.pop("tables", []):
            for group in self._table_groups:
                if group["table"] == saved["table"]:
                    group.update(saved)
        if self.local is None or self.group is None:
            return
        self.local.load_state_dict(given)
        self._show_groups()
        self.group.upload(keeps_state=False)
        self.local.state.clear()


class TrainerOptimizer(Optimizer):
    """:class:`Optimizer`, made as other programs make optimizers: with parameters first.

    Args:
        params: parameters or groups of them.
        inner: class of the optimizer.
        cluster: where the parameters are.
        name: of the parameters in the cluster.
        pushing: when gradients leave. Default at each step.
        hyper: arguments of ``inner``.

    Example::

        Trainer(..., optimizer_cls_and_kwargs=(
            ps.TrainerOptimizer, {"inner": torch.optim.AdamW, "cluster": cluster, "lr": 1e-3}))
    """

    def __init__(
        self,
        params: Untyped,
        *,
        inner: OptimizerMaker,
        cluster: Cluster,
        name: str = "model",
        pushing: Pushing = Pushing.STEP,
        **hyper: OptimizerValue,
    ) -> None:
        self._begin(cluster, inner(params, **hyper), [], name, pushing)


def _on_gradient(parameter: Untyped, then: Callable[[Tensor], None]) -> None:
    parameter.register_post_accumulate_grad_hook(then)


def _tables_of(model: nn.Module | None) -> list[Table]:
    mine = [] if model is None else tables_of(model)
    return [table for table in mine if isinstance(table, Table)]


def _check(cluster: Cluster, tables: Iterable[Table]) -> None:
    instance("ps.Optimizer", "cluster", cluster, Cluster, "a cluster of ps.connect()")
    for table in tables:
        instance("ps.Optimizer", "tables", table, Table, "a table of cluster.table()")
        if table.cluster is not cluster:
            raise ValueError(
                f"ps.Optimizer: table {table.name!r} is of {table.cluster!r}, not of {cluster!r}; "
                "each cluster needs an optimizer of its own, for its tables alone (tables=)"
            )
