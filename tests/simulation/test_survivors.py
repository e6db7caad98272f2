"""The table of surviving mutants keeps its reasons, also when something was renamed."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loading import load

_HERE = Path(__file__).parent
survivors, mutants = load(_HERE, "survivors"), load(_HERE, "mutants")


def mutant(function: str, change: str, shape: str) -> Any:
    return SimpleNamespace(module="rpc.a", function=function, change=change, shape=shape)


ONE, TWO = mutant("f", "one", "1-0"), mutant("g", "`x | y` for `x`", "2-0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "SURVIVORS.md"
    survivors.write_survivors([ONE, TWO], [ONE, TWO], [ONE, TWO], path)
    text = path.read_text()
    for number in range(2):
        text = text.replace("|  |", f"| reason {number} |", 1)
    path.write_text(text)
    return path


def reasons(file: Path) -> dict[str, str]:
    return {row.function: row.reason for row in survivors.read_survivors(file)}


def test_what_was_written_is_read_again(file: Path) -> None:
    assert [row.names for row in survivors.read_survivors(file)] == [
        ("a", "f", "one"),
        ("a", "g", "`x | y` for `x`"),
    ]
    assert reasons(file) == {"f": "reason 0", "g": "reason 1"}


def test_those_that_died_go_and_what_was_not_judged_stays(file: Path) -> None:
    survivors.write_survivors([], [ONE], [ONE, TWO], file)
    assert reasons(file) == {"g": "reason 1"}


def test_a_reason_follows_its_mutant_to_another_name(file: Path) -> None:
    renamed = mutant("h", "uno", "1-0")
    survivors.write_survivors([renamed], [renamed], [renamed, TWO], file)
    assert reasons(file) == {"h": "reason 0", "g": "reason 1"}


def test_one_that_does_not_exist_any_more_goes_and_a_new_one_has_no_reason(file: Path) -> None:
    new = mutant("new", "three", "3-0")
    survivors.write_survivors([new], [new], [new, ONE], file)
    assert reasons(file) == {"new": "", "f": "reason 0"}


def test_the_shape_of_a_function_is_in_no_name_or_text_of_it() -> None:
    def shape(code: str) -> str:
        (function,) = ast.parse(code).body
        return str(mutants.shape_of(function))

    one = shape("def f(a: int) -> int:\n    'Says.'\n    return a.b + len('x')")
    assert one == shape("def g(c):\n    return c.d + size('y')")
    assert one != shape("def f(a):\n    return a.b - len('x')")
