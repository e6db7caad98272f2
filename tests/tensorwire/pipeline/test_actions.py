"""A table of actions prints as text and is read from text, torch's included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.errors import ScheduleError


def test_a_table_prints_one_line_per_worker() -> None:
    table = Table.of([[Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)], []])
    assert str(table) == "0F0,0B0\n\n"


def test_a_table_is_read_from_torchs_text_without_what_says_nothing_here(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,,0F1, 0RECV_B0 ,0I0,0W0,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1,1RESHARD\n"
    )
    table = Table.read(path)
    assert str(table) == "0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1B0,1B1\n"
    assert (table.stages, table.microbatches, table.trains) == (2, 2, True)
    assert table.stages_of(1) == [1]


@pytest.mark.parametrize("text", ["F0", "0X1", "0F", "0F-1", "0F0 0F1"])
def test_a_cell_that_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ScheduleError, match=f"'{text}' is not an action"):
        Table.parse(text)
