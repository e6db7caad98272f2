"""The script that rpcrun starts: a Trainer, and nothing that would not be in a user's.

Its argument is a folder. In its first life it is killed after the step of the file ``kill``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import rpc
from tensorwire.integrations.transformers import ParameterServerCallback, stand_alone
from tests.tensorwire.integrations.tiny import Texts, arguments, losses, model

SAVING = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    """Kills this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, callbacks: list[Any], resume: str | None = None) -> dict[str, Any]:
    """Trains, and returns what can be compared."""
    args = arguments(folder, **SAVING)
    trainer = transformers.Trainer(model(), args, train_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "losses": losses(trainer),
        "weights": [each.detach() for each in trainer.model.parameters()],
        "saves": args.should_save,
        "level": args.get_process_log_level(),
    }


def alone(folder: Path) -> None:
    """One of the Trainers that form no process group."""
    rpc.init_rpc()
    stand_alone()
    callbacks: list[Any] = [ParameterServerCallback(["ps:0", "ps:1"])]
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life:
        callbacks.append(Kill(3))
    found = train(folder, callbacks, None if first_life else get_last_checkpoint(str(folder)))
    infos = [rpc.rpc_sync(server, os.getenv, ("TORCHELASTIC_RESTART_COUNT",))
             for server in ("ps:0", "ps:1")]  # fmt: skip
    torch.save({**found, "lives": infos}, folder / "found")
    rpc.shutdown()


def under_ddp(folder: Path) -> None:
    """One of the ranks of a process group: trains alone, then with servers."""
    local = train(folder / "local", [])
    rank = int(os.environ["RANK"])
    rpc.init_rpc()
    callback = ParameterServerCallback(["ps:0", "ps:1"])
    found = train(folder / "servers", [callback])
    steps = None if callback.cluster is None else callback.cluster.step
    torch.save({"local": local, "servers": found, "steps": steps}, folder / f"found{rank}")
    rpc.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"alone": alone, "ddp": under_ddp}[sys.argv[1]](Path(sys.argv[2]))
