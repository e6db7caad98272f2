"""An order of ``length`` positions of which any can be computed alone, in constant memory.

A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", 1988) permutes the numbers below the next power of two, whose bits it divides in two
parts, of which one is changed by a function of the other in each round. What comes out too large is
put in again until it is not ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002), which happens less than once on average.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tensorwire.parameter_server.kernels.arrays import Ints

_Values: TypeAlias = NDArray[np.uint64]

_ROUNDS: Final = 6
_ODD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_DOWN: Final = np.uint64(32)


class Permutation:
    """One order of the numbers below ``length``.

    Args:
        length: 1 or more.
        seed: determines the order, together with ``epoch``.
        epoch: see ``seed``.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        bits = max(1, (length - 1).bit_length())
        self._length = np.uint64(length)
        self._low_bits = np.uint64(bits // 2)
        self._low = np.uint64((1 << (bits // 2)) - 1)
        self._high = np.uint64((1 << (bits - bits // 2)) - 1)
        state = _mixed(_mixed(seed) + epoch)
        self._keys = [np.uint64(_mixed(state + (n + 1) * _ODD)) for n in range(_ROUNDS)]

    def __call__(self, positions: Ints) -> Ints:
        """The numbers at these positions.

        Args:
            positions: ``(n,)``, of whole numbers from 0 to below ``length``.

        Returns:
            ``(n,)``, int64.
        """
        image = self._once(positions.astype(np.uint64))
        beyond = np.flatnonzero(image >= self._length)
        while len(beyond):
            image[beyond] = self._once(image[beyond])
            beyond = beyond[image[beyond] >= self._length]
        return image.astype(np.int64)

    def _once(self, values: _Values) -> _Values:
        high, low = values >> self._low_bits, values & self._low
        for place, key in enumerate(self._keys):
            if place % 2:
                low = low ^ (_hashed(high, key) & self._low)
            else:
                high = high ^ (_hashed(low, key) & self._high)
        joined: _Values = (high << self._low_bits) | low
        return joined


def _hashed(values: _Values, key: np.uint64) -> _Values:
    mixed = (values ^ key) * _FIRST
    mixed = (mixed ^ (mixed >> _DOWN)) * _SECOND
    hashed: _Values = mixed >> _DOWN
    return hashed


def _mixed(value: int) -> int:
    """64 bits that depend on all bits of a number (the finaliser of SplitMix64)."""
    value = (value + _ODD) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
