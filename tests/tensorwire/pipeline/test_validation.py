"""A table that cannot work is refused, and the refusal says which action is wrong."""

from __future__ import annotations

import random

import pytest

from tensorwire.pipeline.actions import Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.schedules import SCHEDULES
from tensorwire.pipeline.validation import validate
from tensorwire.pipeline.wiring import Wiring


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1B0,1B0\n", "1B0 is there more than once, on workers .1, 1."),
        ("0F0,0B0\n1F0\n", r"stage 1 needs F\+B or F\+I\+W of micro-batch 0, but has F"),
        ("0F0,0B0\n1F0,1I0\n", r"stage 1 .* but has F\+I"),
        ("0F0,0B0\n2F0,2B0\n", "the table has 3 stages, the pipeline 2"),
        ("0F0,1B0\n1F0,0B0\n", r"stage 0 has its passes of micro-batch 0 on workers \[0, 1\]"),
        ("0B0,0F0\n1F0,1B0\n", "0 waits with 0B0 for 0F0, 1B0; worker 1 waits with 1F0 for 0F0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "worker 0 waits with 0W0 for 0I0"),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", None),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "0 waits with 0B0 for 1B0; worker 1 .* 1F1 for 0F1"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_work_is_refused_with_the_action_that_is_wrong(
    text: str, message: str | None
) -> None:
    if message is None:
        validate(Table.parse(text), Wiring.chain(2))
    else:
        with pytest.raises(ScheduleError, match=message):
            validate(Table.parse(text), Wiring.chain(2))


def test_a_table_that_holds_too_much_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 holds the activations of 4 micro-batches"):
        validate(SCHEDULES["gpipe"](2, 2, 4), Wiring.chain(2), most_held=3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_an_action_that_is_dropped_or_repeated_is_always_noticed(name: str) -> None:
    stages = 8 if name == "zbv" else 4
    table = SCHEDULES[name](stages, 4, 6)
    dice = random.Random(7)
    for _ in range(100):
        rows = [list(row) for row in table.rows]
        row = dice.choice(rows)
        at = dice.randrange(len(row))
        if dice.random() < 0.5:
            del row[at]
        else:
            row.insert(dice.randrange(len(row)), row[at])
        with pytest.raises(ScheduleError):
            validate(Table.of(rows), Wiring.chain(stages))
