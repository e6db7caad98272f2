"""The list of surviving mutants is brought up to date without losing what was not judged."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "survivors", Path(__file__).with_name("survivors.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
survivors = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(survivors)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "SURVIVORS.md"
    killed_by_units = {"a.f: one": True, "a.g: `two`": False, "b.f: one": False}
    survivors.write_survivors(killed_by_units, set(), path)
    text = path.read_text()
    for number, key in enumerate(killed_by_units):
        text = text.replace("):\n", f"): argument {number}\n", 1)
        assert key in text
    path.write_text(text)
    return path


def test_arguments_stay_and_those_that_died_go(file: Path) -> None:
    before = survivors.read_survivors(file)
    survivors.write_survivors({"a.g: `two`": True, "b.f: one": False}, set(), file)
    after = survivors.read_survivors(file)
    assert after == {key: before[key] for key in ("a.g: `two`", "b.f: one")}
    assert "- `` a.g: `two` `` (unit tests kill it): argument" in file.read_text()


def test_what_was_not_judged_stays_as_it_is(file: Path) -> None:
    before = file.read_text().splitlines()
    survivors.write_survivors({"b.g: new": True}, {"a.f: one", "a.g: `two`"}, file)
    after = file.read_text().splitlines()
    assert [line for line in after if "a." in line] == [line for line in before if "a." in line]
    assert survivors.read_survivors(file).keys() == {"a.f: one", "a.g: `two`", "b.g: new"}


def test_one_that_does_not_exist_any_more_goes(file: Path) -> None:
    survivors.write_survivors({}, {"a.f: one"}, file)
    assert [*survivors.read_survivors(file)] == ["a.f: one"]
    assert "## b" not in file.read_text()


def test_writing_what_is_there_changes_nothing(file: Path) -> None:
    before = file.read_text()
    survivors.write_survivors({}, survivors.read_survivors(file).keys(), file)
    assert file.read_text() == before
