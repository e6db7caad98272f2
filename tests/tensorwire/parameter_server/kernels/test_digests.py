"""A digest tells of every change, in every dtype and layout, here and on another device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels import digests
from tensorwire.parameter_server.kernels.digests import Digests

_MAKERS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(33, 3),
    "large": lambda: torch.randn(1 << 20),
    "float64": lambda: torch.randn(7, dtype=torch.float64),
    "odd bytes": lambda: torch.randn(5, dtype=torch.bfloat16),
    "bytes": lambda: torch.arange(7, dtype=torch.uint8),
    "transposed": lambda: torch.randn(4, 6).t(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "scalar": lambda: torch.randn(()),
    "nothing": lambda: torch.randn(0, 4),
}


@pytest.mark.parametrize("kind", _MAKERS)
@pytest.mark.parametrize("here", [True, False], ids=["here", "as on another device"])
def test_a_change_of_any_element_changes_the_digest(kind: str, here: bool) -> None:
    tensor = _MAKERS[kind]()
    found = Digests([tensor])

    def now() -> int:
        return found.now([0])[0] if here else int(digests._elsewhere(tensor))

    seen = [now()]
    assert now() == seen[0]
    for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
        flat = tensor.data.view(-1) if tensor.is_contiguous() else tensor.data.t().view(-1)
        flat[place] += 1
        seen.append(now())
    assert len(set(seen)) == len(seen)


def test_a_tensor_that_lies_elsewhere_now_is_looked_at_there() -> None:
    tensor = torch.zeros(8)
    found = Digests([tensor])
    before = found.now([0])
    tensor.data = torch.ones(8)
    assert found.now([0]) != before
    tensor.data = torch.zeros(8)
    assert found.now([0]) == before
