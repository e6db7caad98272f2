"""The Python blocks of a page, and how each is to be run.

A reader sees only the code; how it runs stands in an HTML comment before it::

    <!-- run: on trainer, beside server -->

=================================  ============================================================
``alone``                          in one process; the default
``on trainer, beside ps:0 ps:1``   by ``trainer``, in a group in which the others only serve
``on each of ps:0 ps:1 trainer``   by every worker of a group
``started on each of a b``         the same, but the code calls ``init_rpc`` and ``shutdown``
=================================  ============================================================

The code finds the worker that runs it in the variable ``name``. Blocks that follow each other
on a page and are to be run alike share their variables, in one process per worker. Followed
by ``; raises WorkerLostError``, a wish says that the block ends in that error.

The comment ``<!-- blocks run: ... -->`` sets the default of its page.

A block after the words "Save as `name.py`:" is a program. The next console block says how it
is started, one process for each command on its last line that begins with ``$``, and what
these print, in the order of the commands.
"""

from __future__ import annotations

import enum
import re
import textwrap
from dataclasses import dataclass, field


class Mode(enum.Enum):
    """The workers that run a block, and whether they are in a group already."""

    ALONE = "alone"
    ON_ONE = "on one"
    ON_EACH = "on each"
    STARTED_ON_EACH = "started on each"


@dataclass(frozen=True, slots=True)
class Setting:
    """The workers that a block needs. The first one runs it, or each does."""

    mode: Mode = Mode.ALONE
    workers: tuple[str, ...] = ("main",)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of Python."""

    line: int
    code: str
    raises: str | None = None

    def padded(self) -> str:
        """The code, moved to its line on the page, which tracebacks then show."""
        return "\n" * (self.line - 1) + self.code


@dataclass(frozen=True, slots=True)
class Session:
    """Blocks that share their variables."""

    setting: Setting
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Program:
    """A block that is saved as a file, how it is started, and what it prints."""

    file: str
    code: str
    commands: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that can be run on one page."""

    sessions: list[Session]
    programs: list[Program]


_BLOCK = re.compile(
    r"(?:<!-- run: (?P<wish>[^>]*?) -->\s*)?"
    r"^(?P<indent> *)(?P<fence>```+)python[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_DEFAULT = re.compile(r"<!-- blocks run: ([^>]*?) -->")
_SAVE_AS = re.compile(r"Save as `(\w+\.py)`[^\n]*:\s*\Z")
_CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
_WISH = re.compile(
    r"(?P<alone>alone)"
    r"|on (?P<one>\S+), beside (?P<others>[^;]+)"
    r"|(?P<started>started )?on each of (?P<each>[^;]+)"
)


def read_page(text: str) -> Page:
    """Reads the blocks of a page.

    Raises:
        ValueError: a wish cannot be read, or the page does not start one of its programs.
    """
    default = _DEFAULT.search(text)
    page = Page([], [])
    for found in _BLOCK.finditer(text):
        code = textwrap.dedent(found["code"])
        if save_as := _SAVE_AS.search(text[: found.start()]):
            page.programs.append(_program(save_as[1], code, text[found.end() :]))
            continue
        wish = found["wish"] or (default[1] if default else "alone")
        setting, raises = read_wish(wish)
        if not page.sessions or page.sessions[-1].setting != setting:
            page.sessions.append(Session(setting))
        line = text.count("\n", 0, found.start("code")) + 1
        page.sessions[-1].blocks.append(Block(line, code, raises))
    return page


def read_wish(wish: str) -> tuple[Setting, str | None]:
    """Returns the setting that a wish names, and the error that it expects.

    Raises:
        ValueError: it is none of those that this module lists.
    """
    where, _, raises = wish.partition("; raises ")
    found = _WISH.fullmatch(where.strip())
    if found is None:
        raise ValueError(f"{wish!r} is no way to run a block; tests/docs/blocks.py lists them")
    return _setting(found), raises.strip() or None


def _setting(found: re.Match[str]) -> Setting:
    if found["alone"]:
        return Setting()
    if found["one"]:
        return Setting(Mode.ON_ONE, (found["one"], *found["others"].split()))
    mode = Mode.STARTED_ON_EACH if found["started"] else Mode.ON_EACH
    return Setting(mode, tuple(found["each"].split()))


def _program(file: str, code: str, rest: str) -> Program:
    console = _CONSOLE.search(rest)
    if console is None or file not in console[1]:
        raise ValueError(f"no console block starts {file}")
    lines = console[1].splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("$ "))
    commands = tuple(lines[last].removeprefix("$ ").split(" & "))
    return Program(file, code, commands, "\n".join(lines[last + 1 :]))
