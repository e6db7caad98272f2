"""The words for objects whose classes may raise."""

from __future__ import annotations

import pytest

from rpc.runtime.text import class_name, repr_of, text_of


class Silent(type):
    """Does not tell its classes' names."""

    def __getattribute__(cls, name: str) -> object:
        if name in ("__module__", "__qualname__", "__name__"):
            raise RuntimeError(f"{name} is secret")
        return super().__getattribute__(name)


class Secret(metaclass=Silent):
    def __repr__(self) -> str:
        raise SecretError


class SecretError(Exception, metaclass=Silent):
    pass


class Nowhere:
    __module__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (int, "int"),
        (Silent, f"{__name__}.Silent"),
        (Secret, f"{__name__}.Secret"),
        (Nowhere, "Nowhere"),
    ],
    ids=["builtin", "ours", "secret", "nowhere"],
)
def test_a_class_has_a_name_whatever_its_own_class_does(kind: type, name: str) -> None:
    assert class_name(kind) == name


@pytest.mark.parametrize("render", [text_of, repr_of])
def test_an_object_that_raises_is_described(render: object) -> None:
    assert render(3) == "3"  # type: ignore[operator]
    told = render(Secret())  # type: ignore[operator]
    assert told == f"<{__name__}.Secret whose text raises SecretError>"
