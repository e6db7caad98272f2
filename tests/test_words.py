"""Docstrings open with what a thing does or is, so that nobody has to read them twice."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FOLDERS = (
    *("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire"),
    *("benchmarks", "chaos", "tutorials", "tests"),
)
_OPENING = re.compile(
    r'^ *[rf]?"""(?:What|Who|Whose|Whoever|Whatever|Whether|Which|How|Why|When|Where|As|If)\b.*',
    re.MULTILINE,
)


def _sources() -> list[Path]:
    return sorted(path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))


def test_no_docstring_opens_with_a_question_or_a_comparison() -> None:
    found = [
        f"{path.relative_to(_ROOT)}: {opening.strip()}"
        for path in _sources()
        for opening in _OPENING.findall(path.read_text())
    ]
    assert not found, "begin with what it does or is:\n" + "\n".join(found)
