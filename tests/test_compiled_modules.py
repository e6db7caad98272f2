"""The modules that a compiled build compiles hold the rules by which they can be.

``CONTRIBUTING.md`` gives the rules, "What can be compiled". A compiled build, which takes minutes,
finds more.
"""

from __future__ import annotations

import ast
import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire")
_SETUP = runpy.run_path(str(_ROOT / "setup.py"), run_name="setup")
_COMPILED: list[str] = _SETUP["COMPILED"]
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


def _cycles(tree: ast.AST) -> Iterator[int]:
    """The lines of functions inside a function that refer to one of these, maybe themselves."""
    for outer in (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)):
        inner = [n for n in ast.walk(outer) if isinstance(n, _FUNCTIONS) and n is not outer]
        names = {each.name for each in inner if not isinstance(each, ast.Lambda)}
        for each in inner:
            used = {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
            if names & used:
                yield each.lineno


def _losing_causes(tree: ast.AST) -> Iterator[int]:
    """The lines of ``raise ... from`` whose error has not got the cause before."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.cause is not None:
            given = f", {ast.unparse(node.cause)})"
            raised = ast.unparse(node.exc) if node.exc is not None else ""
            if not (raised.startswith("caused(") and raised.endswith(given)):
                yield node.lineno


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


def test_no_functions_inside_one_refer_to_each_other() -> None:
    found = {path: [*_cycles(_tree(path))] for path in _COMPILED}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_what_is_raised_has_its_cause() -> None:
    found = {path: [*_losing_causes(_tree(path))] for path in _COMPILED}
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


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n  def g(): pass\n  def h(): g()\n  return h", [3]),
        ("def f():\n  def g(): pass\n  return lambda: g", [3]),
        ("def f():\n  def g(): return g\n  return g", [2]),
        ("def f():\n  def g(): pass\n  def h(): pass\n  return g, h", []),
    ],
)
def test_functions_that_refer_to_each_other_are_found(source: str, lines: list[int]) -> None:
    assert [*_cycles(ast.parse(source))] == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("raise E(x) from error", [1]),
        ("raise E(x) from None", [1]),
        ("raise caused(E(x), None) from error", [1]),
        ("raise caused(E(x), None) from None", []),
        ("raise caused(E(x), error) from error", []),
        ("raise E(x)\nraise", []),
    ],
)
def test_a_cause_that_gets_lost_is_found(source: str, lines: list[int]) -> None:
    assert [*_losing_causes(ast.parse(source))] == lines


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Asks for a compiled build by a command of setuptools."""
    pytest.importorskip("setuptools")
    monkeypatch.setenv("TENSORWIRE_COMPILE", "1")

    def ask(command: str) -> None:
        monkeypatch.setattr(sys, "argv", ["setup.py", command])
        _SETUP["main"]()

    return ask


def test_a_compiled_build_beside_the_sources_is_refused(build: Callable[[str], None]) -> None:
    with pytest.raises(SystemExit, match="no editable install: compiled modules beside the sour"):
        build("editable_wheel")


def test_a_build_without_a_compiler_says_so(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(SystemExit, match="needs a C compiler, and 'no-such-compiler' is not there"):
        build("bdist_wheel")


def test_a_build_without_mypyc_says_which_mypy_it_needs(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", sys.executable)  # it is only looked for
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "mypyc.build", None)
    with pytest.raises(SystemExit, match=r"needs mypy>=2\.4,<2\.5, which cannot be imported"):
        build("bdist_wheel")


def test_a_build_without_pythons_headers_says_which_file_is_missing(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"needs the headers of this Python, and .*Python\.h"):
        build("bdist_wheel")


def test_results_of_earlier_builds_that_nobody_wants_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    built = tmp_path / "build" / "lib.linux-x86_64-cpython-311"
    library = Path(_COMPILED[0]).with_suffix(".cpython-311-x86_64-linux-gnu.so")
    kept = {Path("rpc/ids.py"), library, Path("tensorwire__mypyc.cpython-311.so")}
    for path in [*kept, Path("rpc/gone.py"), Path("rpc/ids.cpython-311.so")]:
        (built / path).parent.mkdir(parents=True, exist_ok=True)
        (built / path).touch()
    (tmp_path / "rpc").mkdir()
    (tmp_path / "rpc" / "ids.py").touch()
    _SETUP["_remove_what_was_built_of_other_modules"]()
    assert {path.relative_to(built) for path in built.rglob("*") if path.is_file()} == kept
