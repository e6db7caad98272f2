"""The chaos job itself, for a short while."""

import re
import sys
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.director import WITNESS, Director, Settings
from chaos.judge import Limits, describe, judge
from chaos.plan import Fault, Kind


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_survivors_go_on(tmp_path: Path) -> None:
    """Over TENSORWIRE; ``make chaos`` does it over both backends."""
    faults = [Fault(0.5, Kind.STOP, "server"), Fault(8.5, Kind.KILL, "trainer1")]
    limits = Limits(
        bound=2.0, grace=30.0, recovery=60.0, more=99, descriptors=99, threads=99
    )  # it is short
    director = Director(Settings("TENSORWIRE", 2, limits.bound, tmp_path / "log"))
    end = director.run(faults, 12.0)
    report = judge(director.done, director.events, WITNESS, end, limits)
    assert report.violations + director.problems == [], describe(report)
    assert report.steps > 0


def test_help_says_what_the_job_is_and_every_options_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["chaos", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    _, about, options = capsys.readouterr().out.split("\n\n")
    assert about.startswith("A parameter-server job whose workers are killed, stopped and cut off")
    described = re.split(r"\n  --(?=[a-z])", options)[1:]
    assert len(described) == 7
    assert all(re.search(r"[a-z] \(.*\)\s*$", each) for each in described), described
