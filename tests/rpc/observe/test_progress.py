"""Steps, slow phases and facts of one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rpc
from rpc.agent import Agent
from rpc.observe.progress import Progress
from rpc.runtime.clock import VirtualClock
from rpc.testing import as_worker, local_group


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with local_group("here", "there") as group:
        yield group


def test_steps_are_counted_and_their_age_is_told() -> None:
    clock = VirtualClock()
    progress = Progress(clock)
    progress.count(2)
    clock.advance(3.0)
    report = progress.report()
    assert (report.steps, report.age, report.phase) == (2, 3.0, "")


def test_the_innermost_slow_phase_is_told_and_its_end_counts_as_a_sign_of_life() -> None:
    clock = VirtualClock()
    progress = Progress(clock)
    with progress.phase("evaluation"):
        clock.advance(5.0)
        with progress.phase("snapshot"):
            clock.advance(1.0)
            assert (progress.report().phase, progress.report().phase_age) == ("snapshot", 1.0)
        assert progress.report().phase == "evaluation"
    assert progress.report().phase == ""
    assert progress.report().age == 0.0


def test_the_longest_pause_is_told_without_slow_phases_and_the_first_step() -> None:
    clock = VirtualClock()
    progress = Progress(clock)
    clock.advance(90.0)
    progress.count()
    assert progress.report().longest == 0.0
    clock.advance(2.0)
    with progress.phase("evaluation"):
        clock.advance(60.0)
        progress.count()
        assert progress.report().longest == 2.0
    clock.advance(3.0)
    progress.count(0)
    assert (progress.report().age, progress.report().longest) == (3.0, 2.0)
    progress.count()
    assert (progress.report().age, progress.report().longest) == (0.0, 3.0)


def test_a_source_that_fails_spoils_only_its_own_entry() -> None:
    progress = Progress(VirtualClock())
    progress.add_source("broken", lambda: {}["missing"])
    end = progress.add_source("rows", lambda: {"rows": 3})
    assert progress.facts() == {"broken": {"error": "KeyError: 'missing'"}, "rows": {"rows": 3}}
    end()
    assert "rows" not in progress.facts()


def test_a_worker_counts_its_own_steps(agents: list[Agent]) -> None:
    with as_worker(agents[0]):
        rpc.progress()
        rpc.progress(4)
        with rpc.slow_phase("evaluation"):
            report = rpc.extend.worker().progress.report()
    assert (report.steps, report.phase) == (5, "evaluation")
    with as_worker(agents[1]):
        assert rpc.extend.worker().progress.report().steps == 0


def test_steps_that_cannot_be_are_refused(agents: list[Agent]) -> None:
    with as_worker(agents[0]):
        with pytest.raises(ValueError, match="steps=-1 is negative"):
            rpc.progress(-1)
        with pytest.raises(TypeError, match=r"steps=1\.5 is a float"):
            rpc.progress(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="name=3 is a int, not a str"):
            rpc.slow_phase(3)  # type: ignore[arg-type]
