"""Jobs that are killed, and go on from a snapshot with other numbers of servers and trainers."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tensorwire import parameter_server as ps
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Agent, Job, job, progress
from tests.tensorwire.parameter_server.samples import counted
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
]

_WAYS = [("bsp", "files"), ("async", "files"), ("bsp", "batches"), ("async", "batches")]


def _start(work: Job, way: tuple[str, str], servers: int, trainers: int, what: str) -> Agent:
    roles = ("--role", f"ps:{servers},service", "--role", f"trainer:{trainers}")
    program = (str(PROGRAMS / "samples.py"), str(work.folder), *way, str(servers), what)
    return work.start("--standalone", *FORKED, *roles, *program)


@pytest.mark.kills(20, usual=0)
def test_every_sample_counts_once_in_a_job_and_the_one_that_goes_on_from_its_snapshot(
    tmp_path: Path, kill_seed: int
) -> None:
    """All of the first job is killed at any moment after the snapshot."""
    draw, way = random.Random(kill_seed), _WAYS[kill_seed % len(_WAYS)]
    with job(tmp_path) as work:
        first = _start(work, way, 2, 2, "save")
        until((tmp_path / "saved" / "manifest.json").exists, 2 * SECONDS, 0.05)
        time.sleep(draw.uniform(0, 0.5))  # the moment is to be any
        first.send(signal.SIGKILL)
        for name in ("ps:0", "ps:1", "trainer:0", "trainer:1"):
            os.kill(progress(work, name)["pid"], signal.SIGKILL)
        first.process.join()
        _, rows = ps.read(tmp_path / "saved", "counts")
        assert 0 < int(rows.sum()) < counted.SAMPLES * counted.EPOCHS
        (tmp_path / "begun").unlink()
        trainers = draw.choice([1, 3])
        second = _start(work, way, draw.choice([1, 3]), trainers, "restore")
        assert second.wait(2 * SECONDS) == 0, second.said
        counts = [json.loads(path.read_text()) for path in tmp_path.glob("*.counts")]
    assert len(counts) == trainers
    assert all(set(each) == {float(counted.EPOCHS)} for each in counts)
