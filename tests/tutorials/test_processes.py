"""``tutorials/digits/processes.py``: whom the launcher of a job blames."""

from __future__ import annotations

import queue
import threading

import pytest

from tutorials.digits import processes
from tutorials.digits.processes import Ended


@pytest.mark.parametrize(
    ("order", "blamed"),
    [
        ([Ended("agent", 1), Ended("observer", -9)], "observer was killed by SIGKILL"),
        ([Ended("observer", -9), Ended("agent", 1)], "observer was killed by SIGKILL"),
        ([Ended("agent", 1), Ended("observer", 2)], "agent ended with status 1"),
        ([Ended("observer", 0), Ended("agent", 1)], "agent ended with status 1"),
    ],
)
def test_who_was_killed_is_blamed_else_who_failed_first(order: list[Ended], blamed: str) -> None:
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    for each in order:
        ended.put(each)
    failed = processes._watch({each.name for each in order}, ended)
    assert str(failed) == blamed


def test_a_job_in_which_nobody_fails_has_nobody_to_blame() -> None:
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    ended.put(Ended("agent", 0))
    assert processes._watch({"agent"}, ended) is None


def test_who_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_SECONDS_FOR_OTHERS_TO_SPEAK", 0.01)
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    ended.put(Ended("agent", 1))
    found: list[Ended | None] = []
    watch = threading.Thread(
        target=lambda: found.append(processes._watch({"agent", "observer"}, ended))
    )
    watch.start()
    watch.join(10)
    assert found == [Ended("agent", 1)]
