"""Docstrings open with what a thing does or is, and docstrings and pages name what exists."""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FLOORS = ("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire")
_FOLDERS = (*_FLOORS, "benchmarks", "chaos", "tutorials", "tests")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_OPENING = re.compile(
    r'^ *[rf]?"""(?:What|Who|Whose|Whoever|Whatever|Whether|Which|How|Why|When|Where|As|If)\b.*',
    re.MULTILINE,
)
_OF_OTHERS = {
    *("LocalElasticAgent", "Makefile", "SummaryWriter", "ZeroTensor", "bad_alloc", "wandb", "rich"),
    *("prometheus_client", "sched_getattr", "sched_setattr"),
}
"""Names of other libraries, of which none of our code has any."""


@functools.cache
def _texts() -> dict[str, str]:
    paths = (path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(_ROOT)): path.read_text() for path in paths}


@functools.cache
def _known() -> frozenset[str]:
    """Every word of the code, docstrings left out, and every part of a file's name."""
    words = set(re.findall(r"\w+", " ".join(_DOCSTRING.sub("", t) for t in _texts().values())))
    return frozenset(words.union(*(re.split(r"[/.]", name) for name in _texts())))


def _is_known(name: str) -> bool:
    """True of what names nothing of ours, and of what is there."""
    name = name.removesuffix("()")
    if name in _OF_OTHERS or keyword.iskeyword(name):
        return True
    if re.fullmatch(r"[\w/]+\.py", name):
        return any(path.endswith(name) for path in _texts())
    is_path = name.startswith(tuple(f"{floor}." for floor in _FLOORS))
    is_name = is_path or re.fullmatch(r"_?[A-Z]\w*[a-z]\w*|[a-z_]{4,}", name)
    return not is_name or _known().issuperset(re.findall(r"\w+", name))


def _quoted() -> Iterator[tuple[str, str]]:
    """The names that docstrings of the library and the pages quote, each with its file."""
    for path, text in _texts().items():
        if path.startswith(_FLOORS):
            for docstring in _DOCSTRING.findall(text):
                for name in re.findall(r"``([^`\s]+)``|:\w+:`~?([^`<>\s]+)`", docstring):
                    yield path, "".join(name)
    for page in (_ROOT / "ARCHITECTURE.md", _ROOT / "SECURITY.md", *(_ROOT / "docs").rglob("*.md")):
        for name in re.findall(
            r"(?<!`)`((?:rpc|[a-z]+_dist|remote_module|tensorwire)\.[\w.]+)`", page.read_text()
        ):
            yield str(page.relative_to(_ROOT)), name


def test_no_docstring_opens_with_a_question_or_a_comparison() -> None:
    openings = [
        f"{path}: {line.strip()}" for path, t in _texts().items() for line in _OPENING.findall(t)
    ]
    assert not openings, "begin with what it does or is:\n" + "\n".join(openings)


def test_modules_classes_and_files_that_texts_name_exist() -> None:
    stale = [f"{path}: {name}" for path, name in _quoted() if not _is_known(name)]
    assert not stale, "nothing is called that:\n" + "\n".join(stale)
