"""Sources of samples are told from each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorwire.parameter_server.client.sources import digest_of, pickles_of, require_distinct


def _digest(sources: list[Any]) -> str:
    return digest_of(pickles_of(sources))


def test_equal_files_have_one_digest_and_others_another() -> None:
    part = "".join(["p", "art"])
    one = [("part", part), Path("/data/x"), 3]
    assert _digest(one) == _digest([("part", "part"), Path("/data") / "x", 3])
    others = [["part", "part"], [("part", "part"), Path("/data/y"), 3], [*reversed(one)]]
    assert len({_digest(each) for each in (*others, one)}) == 4
    assert _digest(["ab", "c"]) != _digest(["a", "bc"])


def test_a_source_that_cannot_be_pickled_is_named() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for source in (lambda: 0, cyclic):
        with pytest.raises(TypeError, match=r"files\[1\]=.* cannot be pickled"):
            pickles_of(["a", source])


_SAME = [
    ("a", "a"), ("a", "./a"), ("a", Path("a")), ("a", "x/../a"), ("x/a", "x//a"), ("x", "x/"),
    ("a", "FOLDER/a"), ("linked/a", "x/a"), (("a", 0), ("a", 0)), ("s3://x/a", "s3://x/a"),
    (range(3), range(3)), ("a\0", "a\0"),
]  # fmt: skip
_OTHER = [
    ("a", "A"), ("a", "x/a"), ("away/../a", "a"), (("a", 0), ("a", 1)), ("s3://a", "s3:///a"),
    ("s3://x/a", "s3://x/./a"), (1, "1"), ("a", b"a"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a folder in it, a link to that, and one to a folder elsewhere."""
    here = tmp_path / "here"
    (here / "x").mkdir(parents=True)
    (here / "linked").symlink_to(here / "x")
    (here / "away").symlink_to(tmp_path)
    monkeypatch.chdir(here)
    return here


def _require(sources: list[Any]) -> None:
    require_distinct(sources, pickles_of(sources))


@pytest.mark.parametrize(("one", "other"), _SAME, ids=str)
def test_one_source_is_not_there_twice_by_whatever_spelling(
    folder: Path, one: Any, other: Any
) -> None:
    if isinstance(other, str):
        other = other.replace("FOLDER", str(folder))
    with pytest.raises(ValueError, match=r"files\[2\]=.* is files\[1\]=.* once more; give each"):
        _require(["first", one, other])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("one", "other"), _OTHER, ids=str)
def test_sources_that_look_alike_are_several(one: Any, other: Any) -> None:
    _require([one, other])
