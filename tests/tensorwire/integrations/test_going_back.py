"""A Trainer goes on when its servers are lost, with the losses of a run that was not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from rpc.agent import Agent  # noqa: E402
from rpc.testing import MemoryHub, as_worker, local_group  # noqa: E402
from tensorwire import parameter_server as ps  # noqa: E402
from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: E402
from tensorwire.parameter_server.decisions import tasks  # noqa: E402
from tests.tensorwire.integrations.tiny import (  # noqa: E402
    SERVERS,
    fit,
    require_same,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(200),
    pytest.mark.slow,
]

SAVING = {
    "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine",
    "neftune_noise_alpha": 5.0,
}  # fmt: skip


class Disturbance(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something once, after a step."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step, self.what = step, what
        self.begins: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begins.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step and len(self.begins) == 1:
            self.what()


def lose(hub: MemoryHub, agents: list[Agent], place: int) -> None:
    """A server vanishes as if it was killed."""
    hub.cut(place)
    agents[place].shutdown(graceful=False)


def disturbed(folder: Path, step: int, backups: int, **options: Any) -> tuple[Any, list[int]]:
    """A run in which a server is lost after a step; with the steps at which it began."""
    hub = MemoryHub()
    with local_group(*SERVERS, "trainer", hub=hub) as agents, as_worker(agents[-1]):
        losing = Disturbance(step, lambda: lose(hub, agents, 1))
        callback = ParameterServerCallback(SERVERS, backups=backups, **options)
        trainer = fit(folder, [losing, callback], **SAVING)
        return trainer, losing.begins


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are gone are not waited for."""
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)


def test_a_lost_server_with_a_backup_is_not_noticed(tmp_path: Path) -> None:
    whole = fit(tmp_path / "local", **SAVING)
    trainer, begins = disturbed(tmp_path / "servers", 3, backups=1)
    require_same(whole, trainer)
    assert begins == [0]


@pytest.mark.usefixtures("impatient")
def test_without_a_backup_training_resumes_from_the_checkpoint_of_the_cut(tmp_path: Path) -> None:
    whole = fit(tmp_path / "local", **SAVING)
    trainer, begins = disturbed(tmp_path / "servers", 3, backups=0)
    require_same(whole, trainer)
    assert begins == [0, 2]


@pytest.mark.usefixtures("impatient")
def test_without_backup_and_snapshot_the_loss_of_a_server_ends_training(tmp_path: Path) -> None:
    with pytest.raises(ps.ServerLostError, match="there is no snapshot to go back to"):
        disturbed(tmp_path, 3, backups=0, snapshots=None)
