"""A trainer that publishes is killed: rpcrun starts it anew, and followers go on."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorwire import parameter_server as ps
from tensorwire.checkpoint.chain import Chain, Kind
from tests import waiting
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Job, job

_PROGRAM = str(PROGRAMS / "publishes.py")
_SERVERS = "ps:2,service=tensorwire.parameter_server"


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


class _Seen:
    """The versions that a follower serves, looked at again and again."""

    def __init__(self, model: ps.FollowedModel) -> None:
        self._model = model
        self._ended = threading.Event()
        self.versions: list[int] = []
        self.counts: list[float] = []
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            with self._model.pinned() as view:
                rows = view.pull("counts", torch.arange(100)).unique()
                self.versions.append(view.version)
                self.counts += rows.tolist()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.xdist_group("launch")
def test_followers_go_on_after_the_trainer_that_publishes_was_killed(work: Job) -> None:
    chain = work.folder / "chain"
    roles = ("--role", _SERVERS, "--role", "trainer:1,max_restarts=1")
    agent = work.start("--standalone", *FORKED, *roles, _PROGRAM, str(work.folder))
    with ps.follow(chain, timeout=SECONDS, interval=0.01) as model:
        seen = _Seen(model)
        try:
            model.wait_for(version=3, timeout=SECONDS)
            os.kill(int((work.folder / "trainer").read_text()), signal.SIGKILL)
            first, before = _bases(chain)[0], model.version
            waiting.until(lambda: _bases(chain)[-1] > first, SECONDS)
            model.wait_for(version=_bases(chain)[-1] + 3, timeout=SECONDS)
        finally:
            seen.end()
        assert model.error is None
    work.end()
    assert agent.wait() == 0, agent.said
    assert seen.versions == sorted(seen.versions)
    assert seen.counts == sorted(seen.counts), "each version has rows of one step, and of a later"
    told = re.search(r"go on after version (\d+), of step \d+; the next one is a base", agent.said)
    assert told is not None, agent.said
    assert before <= int(told[1]) < _bases(chain)[-1]


def _bases(chain: Path) -> list[int]:
    return [each.number for each in Chain.open(chain).versions() if each.kind is Kind.BASE]
