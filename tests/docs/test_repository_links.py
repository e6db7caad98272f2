"""Links are written as they work in the repository, and work on the built pages, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loading import load

_ROOT = Path(__file__).parents[2]
links = load(_ROOT / "docs" / "_extensions", "repository_links")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The root of one, with a page that shows a file outside of ``docs/``."""
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "changes.md").write_text("<!-- shows: ../CHANGES.md -->\n")
    (tmp_path / "docs" / "guides" / "start.md").write_text("# Start\n")
    (tmp_path / "CHANGES.md").write_text("# Changes\n")
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "README.md").write_text("# Lessons\n")
    (tmp_path / "code.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../CHANGES.md#new)", "[a](../changes.md#new)"),
        ("[a](../../code.py)", "[a](../../code.py)"),
        ("[a](../../lessons/)", "[a](path:../../lessons/README.md)"),
        ("[a](start.md#top)", "[a](start.md#top)"),
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("[a](#here)", "[a](#here)"),
        ("```text\n[a](nowhere.md)\n```", "```text\n[a](nowhere.md)\n```"),
    ],
)
def test_a_link_works_on_the_page_that_shows_it(repository: Path, link: str, expected: str) -> None:
    page = repository / "docs" / "guides" / "start.md"
    assert links.rewrite_links(link, page, page, repository / "docs") == expected


def test_links_of_a_shown_file_start_where_it_lies(repository: Path) -> None:
    text = "[a](docs/guides/start.md) [b](code.py)"
    page = repository / "docs" / "changes.md"
    found = links.rewrite_links(text, repository / "CHANGES.md", page, repository / "docs")
    assert found == "[a](guides/start.md) [b](../code.py)"


def test_a_link_to_nothing_is_an_error(repository: Path) -> None:
    page = repository / "docs" / "guides" / "start.md"
    with pytest.raises(FileNotFoundError, match=r"a link to .*/gone\.md, which does not exist"):
        links.rewrite_links("[a](../gone.md)", page, page, repository / "docs")
