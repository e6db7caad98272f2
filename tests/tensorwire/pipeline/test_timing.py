"""On a virtual clock the schedules take as long as the literature says, and idle as much."""

from __future__ import annotations

import pytest

from tensorwire.pipeline.actions import Action, Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.schedules import SCHEDULES
from tensorwire.pipeline.timing import Costs, play, theory
from tensorwire.pipeline.wiring import Wiring

_UNEVEN = Costs(forward=1.0, input=1.5, weight=0.75)


@pytest.mark.parametrize(
    ("name", "stages", "workers"),
    [
        ("forward", 4, 4), ("gpipe", 2, 2), ("gpipe", 4, 4), ("1f1b", 1, 1), ("1f1b", 2, 2),
        ("1f1b", 4, 4), ("interleaved", 4, 2), ("interleaved", 8, 4), ("interleaved", 12, 4),
        ("looped_bfs", 8, 4), ("zb-h1", 2, 2), ("zb-h1", 4, 4), ("zbv", 4, 2), ("zbv", 8, 4),
    ],
)  # fmt: skip
def test_a_step_takes_as_long_as_the_schedules_closed_form(
    name: str, stages: int, workers: int
) -> None:
    for costs in [Costs()] if name == "zbv" else [Costs(), _UNEVEN]:
        for microbatches in (2 * workers, 4 * workers):
            table = SCHEDULES[name](stages, workers, microbatches)
            timeline = play(table, Wiring.chain(stages), costs.of)
            assert timeline.length == theory(name, stages, workers, microbatches, costs)


def test_zero_bubble_schedules_idle_less_than_1f1b() -> None:
    def idle(name: str, stages: int) -> float:
        # The same model: twice as many stages are half as long each.
        cost = Costs(4 / stages, 4 / stages, 4 / stages)
        return play(SCHEDULES[name](stages, 4, 12), Wiring.chain(stages), cost.of).idle

    assert idle("zbv", 8) < idle("zb-h1", 4) < idle("interleaved", 8) < idle("1f1b", 4)
    assert idle("1f1b", 4) == pytest.approx(idle("gpipe", 4))


def test_a_slow_stage_and_slow_transfers_make_the_step_longer() -> None:
    table = Table.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")

    def cost(action: Action) -> float:
        return 3.0 if action.stage == 1 else 1.0

    # Worker 1: arrives at 1.5, works four times 3; the gradient is back at 14.
    assert play(table, Wiring.chain(2), cost, transfer=0.5).length == 1.5 + 12 + 0.5 + 1


def test_a_table_that_comes_to_a_halt_has_no_length() -> None:
    with pytest.raises(ScheduleError, match="comes to a halt"):
        play(Table.parse("0B0,0F0\n"), Wiring.chain(1), Costs().of)


def test_what_has_no_closed_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no closed form"):
        theory("zbv", 8, 4, 8, _UNEVEN)
