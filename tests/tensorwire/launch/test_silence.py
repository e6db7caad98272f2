"""Nodes that give no sign of life are found."""

from __future__ import annotations

from tensorwire.launch.silence import Silence


def test_a_node_whose_count_stands_still_is_silent() -> None:
    silence = Silence(5.0)
    for second in range(5):
        assert silence.hear(second, {1: second, 2: 7}) == set()
    assert silence.hear(5, {1: 5, 2: 7}) == {2}
    assert silence.hear(6, {1: 6, 2: 8}) == set()


def test_a_node_that_slept_itself_gives_the_others_time() -> None:
    silence = Silence(5.0)
    silence.hear(0, {1: 1})
    assert silence.hear(100, {1: 1}) == set()
    assert silence.hear(102, {1: 1}) == set()
    assert silence.hear(104, {1: 1}) == {1}


def test_a_node_that_is_not_asked_after_is_forgotten() -> None:
    silence = Silence(5.0)
    silence.hear(0, {1: 1, 2: 1})
    silence.hear(2, {1: 1})
    assert silence.hear(4, {1: 1, 2: 1}) == set()
    assert silence.hear(5, {1: 1, 2: 1}) == {1}
