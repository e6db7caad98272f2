"""Draws the pictures of the documentation: ``python docs/draw_pictures.py`` writes them all.

Each picture is boxes and arrows on a grid, written as SVG. A test compares the files with what
this draws, so that they are changed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "_static"
_COLOURS: Final = {
    "trainer": ("#e3efff", "#2f6db3"),
    "server": ("#e6f5e6", "#3a8a3f"),
    "launcher": ("#fff3da", "#b07a12"),
    "plain": ("#f4f4f4", "#777777"),
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with lines of text, the first of them bold.

    Args:
        x: of its left edge, in pixels.
        y: of its upper edge.
        width: in pixels.
        height: in pixels.
        kind: names its colours.
        lines: the text.
    """

    x: int
    y: int
    width: int
    height: int
    kind: str
    lines: tuple[str, ...]

    def drawn(self) -> Iterable[str]:
        """The elements of the box."""
        fill, stroke = _COLOURS[self.kind]
        yield (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" '
            f'rx="6" fill="{fill}" stroke="{stroke}"/>'
        )
        first = self.y + self.height / 2 - (len(self.lines) - 1) * 8 + 4
        for number, line in enumerate(self.lines):
            weight = ' font-weight="bold"' if number == 0 else ""
            yield (
                f'<text x="{self.x + self.width / 2:g}" y="{first + 16 * number:g}" '
                f'text-anchor="middle"{weight}>{escape(line)}</text>'
            )


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line with a head and a text beside its middle.

    Args:
        start: its first point.
        end: the point it leads to.
        text: what goes along it.
        shift: how far the text is moved from the middle, right and down.
    """

    start: tuple[int, int]
    end: tuple[int, int]
    text: str = ""
    shift: tuple[int, int] = (0, -6)

    def drawn(self) -> Iterable[str]:
        """The elements of the arrow."""
        (x1, y1), (x2, y2) = self.start, self.end
        yield (
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555555" '
            'marker-end="url(#head)"/>'
        )
        if self.text:
            x, y = (x1 + x2) / 2 + self.shift[0], (y1 + y2) / 2 + self.shift[1]
            yield (
                f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="#333333" '
                f'font-size="12">{escape(self.text)}</text>'
            )


@dataclass(frozen=True, slots=True)
class Picture:
    """One file.

    Args:
        name: of the file.
        title: read out instead of the picture.
        width: in pixels.
        height: in pixels.
        parts: all that is on it, in the order in which it is drawn.
    """

    name: str
    title: str
    width: int
    height: int
    parts: tuple[Box | Arrow, ...] = field(default=())

    def svg(self) -> str:
        """The text of the file."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif" '
            'font-size="13" role="img">',
            f"<title>{escape(self.title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
            'fill="#555555"/></marker></defs>',
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>',
            *(line for part in self.parts for line in part.drawn()),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


JOB: Final = Picture(
    "job.svg",
    "A job: rpcrun starts trainers and servers; trainers push gradients and pull rows.",
    720,
    300,
    (
        Box(
            20,
            20,
            680,
            50,
            "launcher",
            ("rpcrun", "starts the workers, and starts again what dies"),
        ),
        Box(20, 120, 180, 60, "trainer", ("trainer:0", "your program")),
        Box(20, 220, 180, 60, "trainer", ("trainer:1", "your program")),
        Box(520, 120, 180, 60, "server", ("ps:0", "rows, dense parameters")),
        Box(520, 220, 180, 60, "server", ("ps:1", "rows, dense parameters")),
        Arrow((110, 70), (110, 118)),
        Arrow((610, 70), (610, 118)),
        Arrow((202, 140), (518, 140), "gradients of this step and ids of the next"),
        Arrow((518, 162), (202, 162), "rows and dense parameters", (0, 16)),
        Arrow((202, 172), (518, 236)),
        Arrow((202, 248), (518, 172)),
        Arrow((202, 262), (518, 262), "the same to each server", (0, 16)),
        Arrow((596, 182), (596, 218), "backups=1", (-42, 4)),
        Arrow((624, 218), (624, 182)),
    ),
)

STEP: Final = Picture(
    "step.svg",
    "The way of the data in one training step with a parameter server.",
    760,
    400,
    (
        Box(20, 20, 210, 50, "trainer", ("ids of the batch", "ps.prefetch")),
        Box(
            20,
            110,
            210,
            50,
            "trainer",
            ("distinct ids, by shard", "client.lookup, client.splitting"),
        ),
        Box(20, 200, 210, 50, "trainer", ("forward", "rows are leaf tensors")),
        Box(20, 260, 210, 50, "trainer", ("backward", "a gradient for each row")),
        Box(20, 330, 210, 50, "trainer", ("ps.Optimizer.step()", "one message for each server")),
        Box(530, 110, 210, 50, "server", ("pull", "decisions.reads: when to answer")),
        Box(530, 200, 210, 50, "server", ("rows", "storage.table, rows.index")),
        Box(530, 330, 210, 50, "server", ("push", "decisions.clock: in which order")),
        Box(530, 265, 210, 50, "server", ("update", "storage.updates, a rule's kernel")),
        Arrow((125, 70), (125, 108)),
        Arrow((232, 135), (528, 135), "ids, with the push of the step before"),
        Arrow((635, 160), (635, 198)),
        Arrow((528, 225), (232, 225), "rows"),
        Arrow((125, 250), (125, 258)),
        Arrow((125, 310), (125, 328)),
        Arrow((232, 355), (528, 355), "gradients, number of the push"),
        Arrow((635, 328), (635, 317)),
        Arrow((635, 263), (635, 252)),
    ),
)

PICTURES: Final = (JOB, STEP)


def main() -> None:
    """Writes all pictures."""
    for picture in PICTURES:
        (_FOLDER / picture.name).write_text(picture.svg())


if __name__ == "__main__":
    main()
