"""What cannot be called is refused in one way, by the name of the argument."""

from __future__ import annotations

import pytest

from rpc.callables import require_callable


def test_what_cannot_be_called_is_named_with_its_argument() -> None:
    with pytest.raises(TypeError, match="handler='x' cannot be called; give a function"):
        require_callable("handler", "x")


@pytest.mark.parametrize("value", [print, int, lambda: None])
def test_what_can_be_called_passes(value: object) -> None:
    require_callable("handler", value)
