"""The benchmark of pipelines says how long a step between two hosts took, and what was measured."""

from __future__ import annotations

import os
import re
import sys

import pytest

from benchmarks.parameter_server.relay import relayed
from benchmarks.pipeline import Case, Length, lengths, report, report_lengths

_DELAY = 0.002


def test_medians_have_their_quartiles_and_ratios_are_of_rounds() -> None:
    case = Case(2, 64, 4, 16, 8)
    told = report(case, {"ours": [2.0, 6.0, 4.0], "backups=1": [1.0, 6.0, 8.0]})
    _, ours, backups = told.splitlines()
    assert ours == "  ours       4 (3 to 5) tokens/s; ours / this 1.00 (1.00 to 1.00)"
    assert backups.endswith("6 (4 to 7) tokens/s; ours / this 1.00 (0.75 to 1.50)")


def test_a_step_is_compared_with_its_theory_and_a_delay_a_hop() -> None:
    told = report_lengths([Length(0.030, 0.010), Length(0.030, 0.020), Length(0.048, 0.020)], 0.002)
    assert told.endswith("30.0 (30.0 to 39.0) ms; / theory and a delay a hop 2.00 (1.62 to 2.07)")


@pytest.mark.slow
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK),
    reason="makes networks, which needs root",
)
def test_a_step_between_two_hosts_takes_no_less_than_its_messages() -> None:
    case = Case(2, 8, 2, 4, 2)
    with relayed(_DELAY, megabits=0) as relay:
        (found,) = lengths(case, relay, 1)
    assert found.seconds > 2 * _DELAY
    assert found.theory > 0.0
    assert re.search(r"delay a hop \d", report_lengths([found, found], _DELAY))
