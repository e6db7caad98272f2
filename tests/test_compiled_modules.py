"""The modules that a compiled build compiles hold the rules by which they can be.

``CONTRIBUTING.md`` gives the rules, "What can be compiled". A compiled build, which takes minutes,
finds more.
"""

from __future__ import annotations

import ast
import functools
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire")
_COMPILED: list[str] = runpy.run_path(str(_ROOT / "setup.py"), run_name="setup")["COMPILED"]
_BASES = {"NamedTuple", "Protocol", "enum.Enum", "enum.IntEnum", "Exception"}
"""Bases that compiled classes may have besides each other."""
_LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((_ROOT / path).read_text())


def _classes(path: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef))


def _bases(of: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0] for base in of.bases]


def _leaving(node: ast.AST, guarded: bool, loop_is_guarded: bool) -> Iterator[int]:
    """The lines that leave or continue a loop through the end of a ``finally`` or ``with``.

    Args:
        node: of a function.
        guarded: it is in such a block.
        loop_is_guarded: the innermost loop around it began in the innermost such block.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Break | ast.Continue) and guarded and not loop_is_guarded:
            yield child.lineno
        elif isinstance(child, _FUNCTIONS):
            yield from _leaving(child, False, False)
        elif isinstance(child, _LOOPS):
            yield from _leaving(child, guarded, guarded)
        elif isinstance(child, ast.With) or (isinstance(child, ast.Try) and child.finalbody):
            yield from _leaving(child, True, False)
        else:
            yield from _leaving(child, guarded, loop_is_guarded)


@functools.cache
def _names_of_compiled_classes() -> dict[str, set[str]]:
    modules = {path.removesuffix(".py").replace("/", "."): path for path in _COMPILED}
    return {module: {each.name for each in _classes(path)} for module, path in modules.items()}


def _imported_compiled_classes(tree: ast.Module) -> set[str]:
    compiled = _names_of_compiled_classes()
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in compiled.get(node.module or "", ())
    }


def _may_import(source: str) -> bool:
    return any(f"from {module} import" in source for module in _names_of_compiled_classes())


def test_the_list_names_each_module_once() -> None:
    assert [path for path in _COMPILED if not (_ROOT / path).is_file()] == []
    assert len(_COMPILED) == len({*_COMPILED})


def test_no_loop_is_left_through_a_finally_or_with() -> None:
    found = {path: [*_leaving(_tree(path), False, False)] for path in _COMPILED}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_compiled_classes_inherit_from_compiled_ones_or_plain_bases() -> None:
    strange = [
        f"{path}: {each.name}({base})"
        for path in _COMPILED
        if (ours := _imported_compiled_classes(_tree(path)) | {c.name for c in _classes(path)})
        for each in _classes(path)
        for base in _bases(each)
        if base not in _BASES | ours
    ]
    assert strange == []


def test_no_other_class_inherits_from_a_compiled_one() -> None:
    others = [
        str(path.relative_to(_ROOT))
        for package in _PACKAGES
        for path in (_ROOT / package).rglob("*.py")
        if str(path.relative_to(_ROOT)) not in _COMPILED and _may_import(path.read_text())
    ]
    heirs = [
        f"{path}: {each.name}"
        for path in others
        for each in _classes(path)
        if _imported_compiled_classes(_tree(path)) & {*_bases(each)}
    ]
    assert heirs == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("while x:\n  with y:\n    break", [3]),
        ("for x in y:\n  try:\n    continue\n  finally:\n    z()", [3]),
        ("while x:\n  try:\n    break\n  except E:\n    continue", []),
        ("with y:\n  while x:\n    break", []),
        ("with y:\n  while x:\n    with z:\n      break", [4]),
        ("while x:\n  with y:\n    def f():\n      while z:\n        break", []),
    ],
)
def test_what_leaves_a_loop_is_found(source: str, lines: list[int]) -> None:
    assert [*_leaving(ast.parse(source), False, False)] == lines
