"""A trace says what each worker did when, and how much of the bubble is the schedule's."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorwire.pipeline import Action, Kind, Pipeline
from tensorwire.pipeline.clocks import Reading, offset
from tensorwire.pipeline.plan import Span
from tensorwire.pipeline.trace import Trace
from tensorwire.pipeline.wiring import Wiring
from tests.tensorwire.pipeline.reference import group, place


def _trace() -> Trace:
    """Two stages, two micro-batches; the second worker waits half of the time."""
    rows = {"a": "0F0 0 2, 0F1 2 4, 0B0 7 9, 0B1 10 12", "b": "1F0 2 3, 1B0 3 7, 1F1 7 8, 1B1 8 10"}
    spans = {}
    for worker, row in rows.items():
        spans[worker] = []
        free = 0
        for each in row.split(", "):
            name, began, ended = each.split()
            moments = (n * 1_000_000 for n in (free, int(began), int(ended)))
            spans[worker].append(Span(Action.parse(name), *moments))
            free = int(ended)
    return Trace(spans, Wiring.chain(2))


def test_the_bubble_is_the_time_in_which_nobody_works() -> None:
    trace = _trace()
    assert trace.length == pytest.approx(0.012)
    assert trace.bubble == pytest.approx(1 - 16 / 24)
    assert trace.busy == {"a": pytest.approx(8 / 12), "b": pytest.approx(8 / 12)}
    # On the virtual clock: F 2 and B 2 at the first worker, F 1 and B 3 at the second.
    assert trace.theory().length == pytest.approx(0.012)
    assert str(trace) == "12.0 ms, idle 33% (the schedule alone 33%)"


def test_a_chrome_trace_shows_actions_and_waiting(tmp_path: Path) -> None:
    _trace().save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["ph"] == "M"]
    assert names == ["a", "b"]
    first = next(each for each in events if each["name"] == "1F0")
    assert (first["ts"], first["dur"], first["cat"]) == (2000.0, 1000.0, "forward")
    assert first["args"] == {"stage": 1, "micro-batch": 0}
    waits = [each for each in events if each["name"] == "waiting" and each["pid"] == 1]
    assert sum(each["dur"] for each in waits) == 2000.0


@pytest.fixture(scope="module")
def fonts() -> None:
    """Open matplotlib's fonts, which it keeps open."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.subplots()
    figure.savefig(io.BytesIO())


def test_a_picture_is_drawn_without_a_screen(fonts: None, tmp_path: Path) -> None:
    _trace().save_png(tmp_path / "trace.png", "two stages")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


class _Sleeps(nn.Module):
    """Takes a given time forward, and as long for each part of the backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        x, weight = x * 1.0, self.weight * 1.0
        for each in (x, weight):
            if each.requires_grad:
                each.register_hook(lambda gradient: time.sleep(self.seconds))
        return x * weight


@pytest.mark.slow
def test_sleeping_stages_are_as_idle_as_their_schedule_and_least_with_zero_bubble() -> None:
    x = torch.ones(12, 2)
    found: dict[str, Trace] = {}
    with group("a", "b", "c"):
        for schedule in ("gpipe", "1f1b", "zb-h1"):
            stages = place([_Sleeps(0.02) for _ in range(3)], "abc")
            pipe = Pipeline(stages, schedule, 6, nn.MSELoss())
            pipe.train_step(x, target=x)
            pipe.train_step(x, target=x)
            trace = pipe.trace()
            assert trace is not None
            assert [span.action for span in trace.spans["b"]] == list(pipe.table().rows[1])
            found[schedule] = trace
            pipe.close()
    kinds = {span.action.kind for span in found["zb-h1"].spans["b"]}
    assert kinds == {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}
    for trace in found.values():
        assert trace.bubble >= trace.theory().idle - 0.02
    assert found["zb-h1"].bubble < found["1f1b"].bubble
    assert found["zb-h1"].theory().idle < found["1f1b"].theory().idle


def test_before_the_first_step_there_is_no_trace() -> None:
    with group("a"):
        assert Pipeline(place([nn.Linear(1, 1)], "a")).trace() is None


def test_clocks_of_one_kernel_are_the_same_and_others_are_measured() -> None:
    here = iter(range(0, 10_000, 7))
    assert offset(lambda: Reading("x", 99), lambda: Reading("x", next(here))) == 0
    moments = iter([0, 10, 100, 104, *([200, 300] * 9)])
    answers = iter([1005, 1102, *([5000] * 9)])
    # The second round trip is the quickest: 1102 was read between 100 and 104.
    assert offset(
        lambda: Reading("y", next(answers)), lambda: Reading("x", next(moments))
    ) == 1000  # fmt: skip


def test_a_progress_bar_shows_rate_bubble_and_memory(
    capsys: pytest.CaptureFixture[str], no_monitor: None
) -> None:
    x = torch.ones(4, 3)
    with group("a", "b"):
        pipe = Pipeline(place([nn.Linear(3, 3), nn.Linear(3, 3)], "ab"), "gpipe", 2, nn.MSELoss())
        for batch in pipe.progress([x] * 3, mininterval=0):
            pipe.train_step(batch, target=batch)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens/s, idle" in shown
    assert ", MB " in shown
