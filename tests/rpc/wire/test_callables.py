"""Things not to be called, or called with, are refused in one way, by the name of the argument."""

from __future__ import annotations

import re
from collections import UserDict, deque
from typing import Any

import pytest
import torch

from rpc.wire.callables import require_arguments, require_call, require_callable


def test_what_cannot_be_called_is_named_with_its_argument() -> None:
    with pytest.raises(TypeError, match="handler='x' cannot be called; give a function"):
        require_callable("handler", "x")


@pytest.mark.parametrize("value", [print, int, lambda: None])
def test_what_can_be_called_passes(value: object) -> None:
    require_callable("handler", value)


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (5, "args=5 is a int"),
        ("worker", "args='worker' is a str"),
        (b"ab", "args=b'ab' is a bytes"),
        (torch.zeros(1), "args=tensor([0.]) is a Tensor"),
        (torch.zeros(1).numpy(), "is a ndarray"),
        ({"x": 1}, "args={'x': 1} is a dict"),
        (torch.nn.ModuleList(), "args=ModuleList() is a ModuleList"),
    ],
)
def test_one_argument_without_its_tuple_is_refused_by_name(args: Any, shown: str) -> None:
    advice = ", not a tuple or list of arguments; a single one is args=(value,)"
    with pytest.raises(TypeError, match=re.escape(shown) + ".*" + re.escape(advice)):
        require_call(print, args, None)


def test_a_large_tensor_in_the_place_of_the_arguments_is_shown_in_one_short_line() -> None:
    with pytest.raises(TypeError) as caught:
        require_arguments(torch.zeros(100, 100), None)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        (5, "kwargs=5 is a int, not a dict of arguments by name"),
        ([("x", 1)], "kwargs=[('x', 1)] is a list, not a dict of arguments by name"),
        (torch.ones(2), "is a Tensor, not a dict of arguments by name"),
        ({1: 2}, "kwargs={1: 2} has the key 1, which is a int, not the name of an argument"),
        (UserDict({1: 2}), "has the key 1, which is a int, not the name of an argument"),
    ],
)
def test_what_gives_no_arguments_by_name_is_refused(kwargs: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=re.escape(shown)):
        require_call(print, (), kwargs)


@pytest.mark.parametrize("args", [None, (), [], (1, 2), [3], deque([1]), iter([1]), range(2)])
def test_whatever_holds_arguments_passes(args: Any) -> None:
    require_call(print, args, None)


@pytest.mark.parametrize("kwargs", [None, {}, {"sep": ""}, UserDict({"sep": ""}), (), []])
def test_whatever_gives_arguments_by_name_passes(kwargs: Any) -> None:
    require_call(print, None, kwargs)
