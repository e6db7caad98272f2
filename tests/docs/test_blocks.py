"""Blocks are found wherever they stand on a page, and run as the page wishes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import Block, Mode, Page, Program, Session, Setting, read_page, read_wish

_ROOT = Path(__file__).parents[2]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]


def test_blocks_that_are_to_run_alike_share_a_session() -> None:
    text = (
        "<!-- blocks run: on a, beside b c -->\n```python\nx = 1\n```\n\n"
        "- in a list\n  ```python\n  y = x\n  ```\n"
        "<!-- run: alone; raises KeyError -->\n\n```python\n{}[1]\n```\n"
    )
    assert read_page(text) == Page(
        [
            Session(
                Setting(Mode.ON_ONE, ("a", "b", "c")), [Block(3, "x = 1\n"), Block(8, "y = x\n")]
            ),
            Session(Setting(), [Block(13, "{}[1]\n", "KeyError")]),
        ],
        [],
    )


def test_a_program_knows_how_it_is_started_and_what_it_prints() -> None:
    text = (
        "Save as `two.py`:\n\n```python\nrun()\n```\n\nThen:\n\n"
        "```console\n$ export A=1\n$ python two.py a & python two.py b\nhello\n```\n"
    )
    started = ("python two.py a", "python two.py b")
    assert read_page(text) == Page([], [Program("two.py", "run()\n", started, "hello")])


def test_a_program_that_nobody_starts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no console block starts lonely"):
        read_page("Save as `lonely.py`:\n\n```python\n```\n")


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("alone", Setting()),
        ("on each of a b", Setting(Mode.ON_EACH, ("a", "b"))),
        ("started on each of a", Setting(Mode.STARTED_ON_EACH, ("a",))),
    ],
)
def test_a_wish_is_read(wish: str, expected: Setting) -> None:
    assert read_wish(wish) == (expected, None)


def test_a_wish_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="'skip' is no way to run a block"):
        read_wish("skip")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_no_python_hides_from_the_tests(page: Path) -> None:
    text = page.read_text()
    languages = set(re.findall(r"^ *(?:```+|~~~+|:::+)(?=\S)([^\n]*)$", text, re.MULTILINE))
    hidden = [each for each in languages if "py" in each and each != "python"]
    assert hidden == []
    assert len(re.findall(r"^ *```+python", text, re.MULTILINE)) == _number(read_page(text))


def _number(page: Page) -> int:
    return len(page.programs) + sum(len(session.blocks) for session in page.sessions)


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((_ROOT / "README.md").read_bytes()) <= 9000


def test_the_glossary_is_short_enough_to_be_learnt() -> None:
    terms = re.findall(r"^: ", (_ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(terms) <= 40
