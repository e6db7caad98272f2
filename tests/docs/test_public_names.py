"""Every public name is on a page of the reference and says what it takes and raises."""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import rpc
from tests.loading import load

_ROOT = Path(__file__).parents[2]
_REFERENCE = _ROOT / "docs" / "reference"
public = load(_ROOT / "docs" / "_extensions", "public_names")
_WITHOUT_ARGUMENTS = (
    enum.EnumMeta,
    type(Protocol),
    type(rpc.BackendType),
)  # the classes of enums and protocols
_ELSEWHERE = re.compile(r"[Ss]ee :\w+:|Not to be made|Made by|makes (it|them)\b")
_NAMES = [pytest.param(value, id=name) for name, value in public.public_names()]


def _public_modules() -> Iterator[str]:
    """The packages that people import, and those of ``tensorwire``."""
    yield from ("rpc", "rpc.extend", "rpc.functions", "rpc.testing", "rpc.tracing")
    yield from ("autograd_dist", "optim_dist", "remote_module")
    tensorwire = importlib.import_module("tensorwire")
    for found in pkgutil.walk_packages(tensorwire.__path__, "tensorwire."):
        private = any(part.startswith("_") for part in found.name.split("."))
        depth = found.name.count(".") - found.name.startswith("tensorwire.integrations.")
        if not private and depth == 1 and found.name != "tensorwire.integrations":
            yield found.name


def test_every_public_module_has_a_page() -> None:
    assert sorted(public.documented()) == sorted(_public_modules())


@pytest.mark.parametrize("module", public.documented())
def test_a_page_documents_all_that_its_module_exports(module: str) -> None:
    text = (_REFERENCE / f"{module}.md").read_text()
    bodies = re.findall(rf"```{{public-names}} {re.escape(module)}\n(.*?)```", text, re.DOTALL)
    assert [body for body in bodies if not body.strip()] == [""], "one without names: the rest"


@pytest.mark.interpreted  # compiled classes have none
@pytest.mark.parametrize("module", public.documented())
def test_public_names_have_docstrings(module: str) -> None:
    loaded = importlib.import_module(module)
    silent = [name for name in public.names_of(loaded) if not public.docstring_of(loaded, name)]
    assert silent == []


@pytest.mark.parametrize("value", _NAMES)
def test_a_docstring_says_what_each_argument_is(value: object) -> None:
    told = inspect.getdoc(value) or ""
    missing = [name for name in _parameters(value) if not re.search(rf"\b{name}\b", told)]
    assert missing == [] or _ELSEWHERE.search(told), missing


@pytest.mark.parametrize("value", _NAMES)
def test_a_docstring_says_what_is_raised(value: object) -> None:
    raised = _raised(value)
    assert not raised or "Raises:" in (inspect.getdoc(value) or ""), raised


def _parameters(value: object) -> list[str]:
    if not callable(value) or isinstance(value, _WITHOUT_ARGUMENTS) or _is_error(value):
        return []
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):  # written in C
        return []
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, parameter in parameters.items() if parameter.kind not in packed]
    return [name for name in named if not name.startswith("_") and name != "self"]


def _raised(value: object) -> list[str]:
    """The errors that the body of a function, or of a class's ``__init__``, raises itself."""
    function = value.__init__ if isinstance(value, type) else value
    function = inspect.unwrap(function) if callable(function) else function
    if (
        _is_error(value)
        or isinstance(value, _WITHOUT_ARGUMENTS)
        or not inspect.isfunction(function)
    ):
        return []
    if function.__module__ not in sys.modules or function.__qualname__ == "__create_fn__":
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # a dataclass made it
        return []
    found = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    return [ast.unparse(each) for each in found]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_the_version_is_told_alike_everywhere() -> None:
    assert importlib.metadata.version("tensorwire") == rpc.__version__
