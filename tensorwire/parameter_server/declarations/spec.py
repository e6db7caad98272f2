"""The description of a table: all that servers and trainers must agree about."""

from __future__ import annotations

import base64
import enum
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Final, cast

import cloudpickle

from tensorwire.parameter_server.declarations.arguments import instance, whole
from tensorwire.parameter_server.declarations.initialisers import Initialiser
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.rules import Per, Rule
from tensorwire.parameter_server.declarations.wire import Wire
from tensorwire.parameter_server.opaque import Unpickled

_INDEX_BYTES: Final = 32


class Precision(enum.Enum):
    """The formats of the numbers of a table's rows. State is float32 always.

    ``INT8`` is for versions that are published for readers only: whole numbers, with a scale for
    each row, so that each reads within a 254th of its row's largest magnitude of what it was.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


@dataclass(frozen=True)
class TableSpec:
    """One table.

    Args:
        name: unique in the cluster.
        dim: columns of a row.
        rule: how rows move.
        init: how they begin.
        admit: which ids get a row; None for all.
        evict: when rows go; None for never.
        precision: of the rows.
        wire: how rows are packed on their way.
    """

    name: str
    dim: int
    rule: Rule
    init: Initialiser
    admit: MinCount | None = None
    evict: UnusedFor | None = None
    precision: Precision = Precision.FLOAT32
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        instance(where, "name", self.name, str, "a text")
        if not self.name:
            raise ValueError("a table needs a name, not ''")
        whole(where, "dim", self.dim)
        instance(where, "optimizer", self.rule, Rule, "a rule such as ps.SGD(lr=0.1)")
        if _is_unfinished(type(self.rule)):
            raise TypeError(
                f"{where}: optimizer={self.rule!r} must be a frozen dataclass that defines update()"
            )
        instance(where, "init", self.init, Initialiser, "an initialiser such as ps.Uniform(0.01)")
        instance(where, "admit", self.admit, (MinCount, type(None)), "ps.MinCount or None")
        instance(where, "evict", self.evict, (UnusedFor, type(None)), "ps.UnusedFor or None")
        instance(where, "precision", self.precision, Precision, "a ps.Precision")
        if self.precision is Precision.INT8:
            raise ValueError(
                f"{where}: precision={self.precision} is for rows that are published, with "
                "cluster.publish; rows that are trained have FLOAT32, BFLOAT16 or FLOAT16"
            )

    def encode(self) -> str:
        """Encodes it as text, for the cluster's view."""
        return encode(self)

    def differences(self, other: object) -> list[str]:
        """The points in which another declaration of this table differs."""
        if not isinstance(other, TableSpec):
            return [f"it is a {type(other).__name__}, not a table"]
        return [
            f"{each.name}={getattr(other, each.name)!r}, not {getattr(self, each.name)!r}"
            for each in fields(self)
            if repr(getattr(self, each.name)) != repr(getattr(other, each.name))
        ]


def row_bytes(spec: TableSpec) -> int:
    """The bytes that one more row takes at a server, with its place in the index."""
    item = 4 if spec.precision is Precision.FLOAT32 else 2
    state = sum(4 * (spec.dim if per is Per.COLUMN else 1) for per in spec.rule.state.values())
    touched = 8 if spec.evict else 0
    return 8 + item * spec.dim + state + touched + _INDEX_BYTES


def _is_unfinished(rule: type[Rule]) -> bool:
    return rule.update is Rule.update or not is_dataclass(rule)


def encode(spec: object) -> str:
    """Encodes any declaration as text; classes of the user's program go by value."""
    return base64.b64encode(cast(bytes, cloudpickle.dumps(spec))).decode()


def decode(text: str) -> Unpickled:
    """The inverse of :func:`encode`."""
    return cloudpickle.loads(base64.b64decode(text))
