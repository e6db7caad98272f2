"""The profiling tutorial shows every call of a step in each of its four ways."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.torch_features import needs_profiles_of_all_threads
from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial


@pytest.mark.slow
@pytest.mark.xdist_group("profiling")
@pytest.mark.usefixtures("process_server")
@needs_profiles_of_all_threads
def test_one_step_is_seen_by_profiler_trace_and_metrics(tmp_path: Path) -> None:
    output = run_tutorial(
        tmp_path,
        "profiling.profile",
        "trainer:1 features:1,service classifier:1,service",
        "--epochs",
        "2",
    )
    assert number_after("final test accuracy:", output) > 60.0
    profiler, remote, trace, metrics = re.split(r"\n[1-4]\. ", output)[1:]
    assert "rpc_sync#RRef.read(trainer:0 -> features:0)" in profiler
    assert re.search(r"worker 2: aten::.*, for rpc_sync#", remote)
    assert re.search(r"RRef\.read \(trainer:0 -> features:0\) +\d", trace)
    assert re.search(r"RRef\.classify \(features:0 -> classifier:0\) +\d", trace)
    assert re.search(r"RRef\.read, features:0", metrics)
    assert "ERROR" not in output
    assert_pictures(tmp_path, "step.png")
    drawn = json.loads((tmp_path / "output" / "trace.json").read_text())
    assert any(event.get("name", "").startswith("aten::") for event in drawn["traceEvents"])
    exported = (tmp_path / "output" / "metrics.prom").read_text()
    assert re.search(r'method="RRef.read"', exported)
