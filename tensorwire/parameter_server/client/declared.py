"""The tables and dense groups that one worker has declared.

All who declare one must say the same of it; the coordinator keeps what the first has said.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from weakref import WeakValueDictionary

from torch import Tensor

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.exchange import Gradients, PullRequest
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.messaging.settings import consistency_of
from tensorwire.parameter_server.snapshots.fit import require_fit
from tensorwire.parameter_server.snapshots.kept import Keeping


class Declared:
    """The tables and dense groups of one worker. Has no lock: one thread declares.

    Args:
        session: of the worker in the cluster.

    Attributes:
        tables: by name.
        dense: by name, the groups whose model still exists.
    """

    def __init__(self, session: Session) -> None:
        self.tables: dict[str, Table] = {}
        self.dense: WeakValueDictionary[str, DenseGroup] = WeakValueDictionary()
        self._session = session
        self._parameters: dict[str, list[weakref.ref[Tensor]]] = {}
        """The owner of each dense group's values; tells two models of one name apart."""

    def announce(self, spec: TableSpec | DenseSpec) -> None:
        """Tells the coordinator of a table or dense group.

        Raises:
            DeclarationError: there is one of that name that is another.
            UnreachableError: no server answered in time, as after a long resize.
        """
        name = spec.name
        keeping = Keeping.decode(self._session.view.declared.get(name, ""))
        if keeping is not None:
            require_fit(name, keeping, spec)
        announced = orders.Announce(name, specs.encode(spec))
        agreed = specs.decode(self._session.servers.declare(announced))
        differences = spec.differences(agreed)
        if isinstance(spec, DenseSpec) and not differences and self._steps_together:
            differences = spec.other_steps(agreed)
        if differences:
            raise errors.DeclarationError(
                f"{name!r} was declared otherwise before: {'; '.join(differences)}"
            )
        self._session.knows(name, spec)

    @property
    def _steps_together(self) -> bool:
        """True if servers make one step of the pushes of several trainers."""
        several = self._session.view.settings["trainers"] != 1  # 0 for as many as there are
        return isinstance(consistency_of(self._session.view.settings), BSP) and bool(several)

    def require_free(self, name: str, parameters: Sequence[Tensor]) -> None:
        """Refuses to have two models of this trainer share the values of one.

        Args:
            name: of a dense group to be.
            parameters: its parameters.

        Raises:
            DeclarationError: that is the name of other parameters, which are in use.
        """
        wanted = {id(each) for each in parameters}

        def others() -> bool:
            known = [each() for each in self._parameters.get(name, ())]
            return any(each is not None and id(each) not in wanted for each in known)

        if others():
            gc.collect()  # a model that was let go of may be in a cycle
            if others():
                raise errors.DeclarationError(
                    f"{name!r} names the dense parameters of another model of this trainer; give "
                    "each model a name of its own, ps.Optimizer(..., name=...), or let go of the "
                    f"other with cluster.release({name!r})"
                )

    def hold(self, group: DenseGroup) -> None:
        """Keeps a dense group for as long as somebody else does; its name is taken from now on."""
        self.dense[group.name] = group
        self._parameters[group.name] = [weakref.ref(each) for each in group.parameters]

    def release(self, name: str) -> None:
        """Frees the name of a dense group; nothing happens if there is none."""
        self._parameters.pop(name, None)

    def require(self, what: Gradients | PullRequest | None) -> None:
        """Refuses what is to be pushed or pulled of tables or dense groups that are not declared.

        Raises:
            ParameterServerError: one was not declared here.
            TypeError: ids or gradients are of a wrong kind.
            ValueError: their shapes do not fit.
        """
        for name, given in what.tables.items() if what is not None else ():
            if name in self.tables:
                _check_rows(self.tables[name], given)
            else:
                raise errors.ParameterServerError(
                    f"there is no table {name!r} here; declare it with cluster.table({name!r}, ...)"
                )
        for name in what.dense if what is not None else ():
            if name not in self.dense:
                raise errors.ParameterServerError(
                    f"there is no dense group {name!r} here; declare it with "
                    f"cluster.dense({name!r}, optimizer)"
                )


def _check_rows(table: Table, given: Tensor | tuple[Tensor, Tensor]) -> None:
    """Refuses ids, or ids and gradients, that are none of a table's."""
    if isinstance(given, Tensor):
        table.check_ids(given)
        ids = given
    else:
        table.check(*given)
        ids = given[0]
    if ids.dim() != 1:
        raise ValueError(f"table {table.name!r}: ids have shape {tuple(ids.shape)}, not (n,)")
