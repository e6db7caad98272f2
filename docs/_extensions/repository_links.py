"""Pages that show a file from elsewhere in the repository, and links out of the docs folder.

A page whose first line is ``<!-- shows: ../ARCHITECTURE.md -->`` shows that file, so that it
stands at the root, where people look for it, and in the built pages as well. Links are
written as they work in the repository. Here a link to a shown file is led to the page that
shows it, and a link to any other Markdown file outside of ``docs/`` becomes a download.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

_SHOWS = re.compile(r"<!-- shows: (\S+) -->")
_FENCE = re.compile(r"^( *)(```+|~~~+|:::+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?P<target>(?!\w+:)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def shown_files(docs: Path) -> dict[Path, Path]:
    """Maps each file that a page shows to that page."""
    found = {}
    for page in docs.rglob("*.md"):
        if shows := _SHOWS.match(page.read_text()):
            found[(page.parent / shows[1]).resolve()] = page
    return found


def rewrite_links(text: str, origin: Path, page: Path, docs: Path) -> str:
    """Returns ``text`` from the file ``origin`` with links that work on ``page``.

    Raises:
        FileNotFoundError: a link leads to a file that does not exist.
    """
    fences = [range(*fence.span()) for fence in _FENCE.finditer(text)]
    shown = shown_files(docs)

    def replace(link: re.Match[str]) -> str:
        if any(link.start() in fence for fence in fences):
            return link[0]
        file = _existing((origin.parent / link["target"]).resolve(), origin)
        target = shown.get(file, file)
        relative = os.path.relpath(target, page.parent)
        if target.suffix == ".md" and docs not in target.parents:
            return f"path:{relative}"
        return relative + (link["anchor"] or "")

    return _LINK.sub(replace, text)


def _existing(file: Path, origin: Path) -> Path:
    if file.is_dir():
        file = file / "README.md"
    if not file.exists():
        raise FileNotFoundError(f"{origin} has a link to {file}, which does not exist")
    return file


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces what a page says by what it shows, and leads its links right."""
    page = Path(app.env.doc2path(name))
    origin = page
    if shows := _SHOWS.match(source[0]):
        origin = (page.parent / shows[1]).resolve()
        source[0] = origin.read_text()
        app.env.note_dependency(origin)
    source[0] = rewrite_links(source[0], origin, page, Path(app.srcdir))


def setup(app: Sphinx) -> ExtensionMetadata:
    """Registers the step between reading a page and parsing it."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
