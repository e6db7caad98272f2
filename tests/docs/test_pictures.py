"""The pictures of the documentation are what their script draws; every tutorial has a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.draw_pictures import PICTURES, Picture

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda each: each.name)
def test_a_picture_is_what_its_script_draws(picture: Picture) -> None:
    assert (_ROOT / "docs/_static" / picture.name).read_text() == picture.svg()


def test_every_tutorial_has_a_page_in_the_menu() -> None:
    menu = (_ROOT / "docs/index.md").read_text()
    folders = [readme.parent.name for readme in (_ROOT / "tutorials").glob("*/README.md")]
    pages = {folder: folder.replace("_", "-") for folder in folders}
    missing = [
        folder
        for folder, page in pages.items()
        if not (_ROOT / f"docs/tutorials/{page}.md").exists() or f"tutorials/{page}\n" not in menu
    ]
    assert missing == []
