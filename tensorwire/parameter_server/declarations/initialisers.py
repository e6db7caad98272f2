"""The first values of rows: functions of seed, id and column only.

So a pull needs no row to be there, any number of servers gives the same model, and a row that
was evicted comes back as it began.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire.parameter_server.declarations.arguments import number, whole
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Floats, Ints


class Initialiser:
    """Base of all initialisers. One of your own must give the same rows for the same ids."""

    def fill(self, out: Floats, places: Ints, ids: Ints) -> None:
        """Writes the initial row of each id into a row of ``out``.

        Args:
            out: ``(n, dim)``, float32.
            places: which rows of it.
            ids: one for each place.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill()")


@dataclass(frozen=True)
class Constant(Initialiser):
    """Every number is ``value``; default 0."""

    value: float = 0.0

    def __post_init__(self) -> None:
        number("Constant", "value", self.value, least=-3.4e38)

    def fill(self, out: Floats, places: Ints, ids: Ints) -> None:
        """See :class:`Initialiser`."""
        out[places] = self.value


@dataclass(frozen=True)
class Uniform(Initialiser):
    """Numbers from ``-scale`` to ``scale``.

    Args:
        scale: how far from zero.
        seed: of everything random.
    """

    scale: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        number("Uniform", "scale", self.scale)
        whole("Uniform", "seed", self.seed, least=0, below=1 << 63)

    def fill(self, out: Floats, places: Ints, ids: Ints) -> None:
        """See :class:`Initialiser`."""
        kernels().uniform(out, places, ids, self.seed, -self.scale, self.scale)


@dataclass(frozen=True)
class Normal(Initialiser):
    """Normally distributed numbers, cut off at six deviations.

    Args:
        std: standard deviation.
        mean: their mean. Default 0.
        seed: of everything random.
    """

    std: float = 0.01
    mean: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        number("Normal", "std", self.std)
        number("Normal", "mean", self.mean, least=-3.4e38)
        whole("Normal", "seed", self.seed, least=0, below=1 << 63)

    def fill(self, out: Floats, places: Ints, ids: Ints) -> None:
        """See :class:`Initialiser`."""
        kernels().normal(out, places, ids, self.seed, self.mean, self.std)
