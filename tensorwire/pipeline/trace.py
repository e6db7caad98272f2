"""The actions of each stage in a step, on one clock: as numbers, Chrome trace and picture."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.plan import Span
from tensorwire.pipeline.timing import Timeline, play
from tensorwire.pipeline.wiring import Wiring

_NAMES: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, inputs",
    Kind.WEIGHT: "backward, weights",
}
_COLOURS: Final = {
    Kind.FORWARD: "tab:blue",
    Kind.BACKWARD: "tab:orange",
    Kind.INPUT: "tab:orange",
    Kind.WEIGHT: "tab:green",
}
_WAITING: Final = "0.88"  # a light grey
_MICROSECOND: Final = 1e3  # in nanoseconds
_MILLISECOND: Final = 1e6


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of a pipeline.

    Args:
        spans: what each worker did, in nanoseconds of the driver's clock.
        wiring: how the stages are connected.
    """

    spans: Mapping[str, Sequence[Span]]
    wiring: Wiring

    @property
    def length(self) -> float:
        """From the beginning of the first action until the end of the last, in seconds."""
        return (self._end - self._begin) / 1e9

    @property
    def bubble(self) -> float:
        """The share of all workers' time, 0 to 1, in which they did nothing."""
        busy = sum(span.ended - span.began for spans in self.spans.values() for span in spans)
        return 1.0 - busy / ((self._end - self._begin) * len(self.spans))

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step, 0 to 1, in which each worker did something."""
        length = self._end - self._begin
        return {
            worker: sum(span.ended - span.began for span in spans) / length
            for worker, spans in self.spans.items()
        }

    def theory(self) -> Timeline:
        """The same actions on a virtual clock, where every action takes its stage's mean time.

        Its ``idle`` is the bubble of the schedule itself; what a step has beyond that comes from
        transfers, from waiting for processors and from times that vary.
        """
        times: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        for span in self._all():
            times[span.action.stage, span.action.kind].append(span.ended - span.began)

        def cost(action: Action) -> float:
            measured = times[action.stage, action.kind]
            return sum(measured) / len(measured) / 1e9

        table = Table.of([span.action for span in spans] for spans in self.spans.values())
        return play(table, self.wiring, cost)

    def save_chrome(self, path: str | Path) -> None:
        """Writes a file for ``chrome://tracing`` or https://ui.perfetto.dev."""
        Path(path).write_text(json.dumps({"traceEvents": self._events()}))

    def save_png(self, path: str | Path, title: str = "") -> None:
        """Draws who did what when.

        Args:
            path: of the picture.
            title: above it; the bubble is added.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure((12, 1.2 + 0.6 * len(self.spans)), layout="constrained")
        self.draw(figure.subplots(), title)
        figure.savefig(path, dpi=120)

    def draw(self, axes: Any, title: str = "") -> None:
        """Draws into axes of matplotlib's; see :meth:`save_png`."""
        for row, spans in enumerate(self.spans.values()):
            place = (row - 0.4, 0.8)
            since = [max(span.waited, self._begin) for span in spans]
            waits = [
                (self._at(waited), (span.began - waited) / _MILLISECOND)
                for waited, span in zip(since, spans, strict=True)
            ]
            axes.broken_barh(waits, place, facecolors=_WAITING)
            for kind, colour in _COLOURS.items():
                mine = [span for span in spans if span.action.kind is kind]
                bars = [(self._at(s.began), (s.ended - s.began) / _MILLISECOND) for s in mine]
                axes.broken_barh(bars, place, facecolors=colour, edgecolors="white", linewidth=0.5)
            for span in spans:
                middle = self._at((span.began + span.ended) // 2)
                axes.text(middle, row, str(span.action.microbatch), ha="center", va="center",
                          fontsize=6, color="white", clip_on=True)  # fmt: skip
        axes.set_yticks(range(len(self.spans)), list(self.spans))
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(f"{title}{': ' if title else ''}{self}", fontsize=9)

    def __str__(self) -> str:
        return (
            f"{self.length * 1e3:.1f} ms, idle {self.bubble:.0%} "
            f"(the schedule alone {self.theory().idle:.0%})"
        )

    @property
    def _begin(self) -> int:
        return min(span.began for span in self._all())

    @property
    def _end(self) -> int:
        return max(span.ended for span in self._all())

    def _all(self) -> list[Span]:
        return [span for spans in self.spans.values() for span in spans]

    def _at(self, moment: int) -> float:
        return (moment - self._begin) / _MILLISECOND

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for process, (worker, spans) in enumerate(self.spans.items()):
            events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0,
                           "args": {"name": worker}})  # fmt: skip
            for span in spans:
                done = {"stage": span.action.stage, "micro-batch": span.action.microbatch}
                name, kind = str(span.action), _NAMES[span.action.kind]
                events += [
                    self._event("waiting", "wait", process, (span.waited, span.began), done),
                    self._event(name, kind, process, (span.began, span.ended), done),
                ]
        return events

    def _event(
        self, name: str, kind: str, process: int, time: tuple[int, int], about: dict[str, int]
    ) -> dict[str, Any]:
        begin, end = time
        return {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": process,
            "tid": 0,
            "ts": (begin - self._begin) / _MICROSECOND,
            "dur": (end - begin) / _MICROSECOND,
            "args": about,
        }
