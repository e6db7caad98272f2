"""Every Python block of the README and of the pages in ``docs/`` does what its page says."""

from __future__ import annotations

import multiprocessing.forkserver
import re
from pathlib import Path

import pytest

from tests.docs.blocks import Block, Program, Session, Setting, read_page
from tests.docs.running import run_program, run_session
from tests.docs.test_blocks import PAGES
from tests.processes import ready_made

_ROOT = Path(__file__).parents[2]
_NAMES = {page: str(page.relative_to(_ROOT)) for page in PAGES}
_SESSIONS = [
    pytest.param(session, name, id=f"{name}-{number}")
    for page, name in _NAMES.items()
    for number, session in enumerate(read_page(page.read_text()).sessions)
]
_PROGRAMS = [
    pytest.param(program, id=f"{name}-{program.file}")
    for page, name in _NAMES.items()
    for program in read_page(page.read_text()).programs
]


@pytest.fixture(scope="session", autouse=True)
def _process_server() -> None:
    ready_made()
    multiprocessing.forkserver.ensure_running()


@pytest.mark.slow
@pytest.mark.parametrize(("session", "page"), _SESSIONS)
def test_blocks_run(session: Session, page: str, tmp_path: Path) -> None:
    failure = run_session(session, page, tmp_path)
    assert not failure, failure


@pytest.mark.slow
@pytest.mark.parametrize("program", _PROGRAMS)
def test_a_program_prints_what_its_page_shows(program: Program, tmp_path: Path) -> None:
    failure, printed = run_program(program, tmp_path)
    assert not failure, failure
    in_order = _in_any_order if program.commands[0].startswith("rpcrun ") else _lines
    assert in_order(printed) == in_order(program.output)


def _lines(text: str) -> list[str]:
    """The lines without the times in them."""
    return [line.rstrip() for line in re.sub(r"\d+\.\d s", "N s", text).splitlines()]


def _in_any_order(text: str) -> list[str]:
    """The lines of workers that one command started."""
    return sorted(_lines(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "told"),
    [
        (Block(1, "import rpc\nrpc.no_such_name\n"), "AttributeError"),
        (Block(1, "pass", raises="KeyError"), "raised no KeyError"),
        (Block(1, "import os\nos._exit(0)"), "ended early"),
    ],
    ids=["error", "no-error", "no-end"],
)
def test_a_block_that_fails_is_told_with_its_line(block: Block, told: str, tmp_path: Path) -> None:
    failure = run_session(Session(Setting(), [block]), "page.md", tmp_path)
    assert told in failure
    assert told != "AttributeError" or 'File "page.md", line 2' in failure
