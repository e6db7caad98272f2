"""Tells whether tensors were changed, whoever did it: a number of all their bytes.

torch counts changes, but not those through ``.data``, NumPy or a view that was taken before. A
digest differs after each change of a single word, and after others but for one in 2**64 or so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.sharing import WORTH, divide

_BLOCK: Final = 1 << 22
_MASK: Final = 2**64 - 1
_OF_WORDS: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

Words: TypeAlias = NDArray[np.uint32]
_NO_WORDS: Final[Words] = np.zeros(0, np.uint32)


class Digests:
    """The digests of some tensors.

    Args:
        tensors: whichever values they have by then.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._known: list[tuple[int, Words]] = [(0, _NO_WORDS)] * len(tensors)

    def now(self, places: Sequence[int]) -> dict[int, int]:
        """The digests of the tensors in these places, by place."""
        kernel, digests, elsewhere = kernels().digest, {}, []
        for place in places:
            tensor = self._tensors[place]
            if tensor.is_cpu:
                digests[place] = _digest(self._words(place, tensor), kernel)
            else:
                elsewhere.append(place)
        if elsewhere:
            others = torch.stack([_elsewhere(self._tensors[place]) for place in elsewhere])
            digests.update(zip(elsewhere, others.tolist(), strict=True))  # waits for devices once
        return digests

    def _words(self, place: int, tensor: Tensor) -> Words:
        """The bytes of a tensor of this host, as words; in its own memory if they fit."""
        address, words = self._known[place]
        if address and address == tensor.data_ptr() and len(words) == _words_in(tensor):
            return words
        data = tensor.detach()
        if data.dtype in _OF_WORDS and data.is_contiguous():
            words = data.view(-1).numpy().view(np.uint32)
            self._known[place] = data.data_ptr(), words
            return words
        octets = _bytes(data).numpy()
        filled = np.zeros(-(-len(octets) // 4) * 4, np.uint8)
        filled[: len(octets)] = octets
        return filled.view(np.uint32)


def _words_in(tensor: Tensor) -> int:
    return tensor.nbytes // 4 if tensor.is_contiguous() else -1


def _digest(words: Words, kernel: Callable[[Words, int], int]) -> int:
    if words.nbytes < WORTH:
        return int(kernel(words, 0))
    parts: list[int] = []

    def work(begin: int, end: int) -> None:
        parts.append(int(kernel(words[begin:end], begin)))

    divide(len(words), words.nbytes, work)
    return sum(parts) & _MASK


def _bytes(data: Tensor) -> Tensor:
    return data.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _elsewhere(tensor: Tensor) -> Tensor:
    """The number of a tensor on another device, computed there; not the same as on the host."""
    data = _bytes(tensor.detach())
    words = data.view(torch.int32) if len(data) % 4 == 0 else data
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK].to(torch.int64)
        places = torch.arange(begin, begin + len(block), device=tensor.device)
        total += (block * ((places * 0x9E3779B1 & 0xFFFFFFFF) | 1)).sum()
    return total
