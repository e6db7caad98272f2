"""The work of a worker for whoever looks at its job is little, and counted right."""

from __future__ import annotations

from benchmarks.watching import count


def test_an_answer_calls_few_functions() -> None:
    calls, size = count()
    assert 20 < calls < 400
    assert 500 < size < 20_000
