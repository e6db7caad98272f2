"""Connections are a chain unless said otherwise, and what cannot be right is named."""

from __future__ import annotations

from typing import Any

import pytest

from tensorwire.pipeline.wiring import FromStage, FromStep, Wiring


def test_without_further_word_each_stage_takes_the_outputs_of_the_one_before() -> None:
    wiring = Wiring.chain(3)
    assert wiring.sources == ((FromStep(),), (FromStage(0),), (FromStage(1),))
    assert wiring.consumers(0) == [1]
    assert wiring.consumers(2) == []


def test_skip_connections_add_consumers() -> None:
    wiring = Wiring.chain(4, {2: [1, (0, 1)], 3: [2, 0, "mask"]})
    assert wiring.consumers(0) == [1, 2, 3]
    assert wiring.producers(3) == [0, 2]
    assert wiring.keywords(3) == ["mask"]
    assert wiring.sources[2] == (FromStage(1), FromStage(0, 1))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({3: [2]}, "names stage 3 of 3"),
        ({1: [1]}, "not an output of an earlier stage"),
        ({1: [(0, -2)]}, "not an output of an earlier stage"),
        ({2: ["x"]}, "nothing takes the output of stage=1"),
    ],
)
def test_connections_that_cannot_be_right_are_named(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wiring.chain(3, inputs)


def test_a_source_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"inputs\[1\] has 0.5"):
        Wiring.chain(2, {1: [0.5]})  # type: ignore[list-item]
