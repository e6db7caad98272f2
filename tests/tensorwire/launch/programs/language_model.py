"""A Trainer of transformers under DistributedDataParallel, whose parameters are at a server.

    language_model.py FOLDER

It saves every fifth step, and a life that is not the first goes on from the last checkpoint that is
whole. It trains until there is a file ``FOLDER/end``, and writes after each step how far it is to
``FOLDER/NAME.progress``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import rpc
from tensorwire.integrations.transformers import ParameterServerCallback
from tests.tensorwire.integrations.tiny import Texts, arguments, model

SAVING = {"max_steps": 100_000, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}


class Notes(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down how far the Trainer is; ends all ranks after the same step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, rpc.get_worker_info().name

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        incarnation = rpc.extend.life_of(self.me).incarnation
        progress = {"pid": os.getpid(), "steps": state.global_step, "incarnation": incarnation}
        progress["ranks"] = dist.get_world_size()
        draft = self.folder / f"{self.me}.draft"
        draft.write_text(json.dumps(progress))
        draft.rename(self.folder / f"{self.me}.progress")
        is_over = torch.tensor(float((self.folder / "end").exists()))
        dist.all_reduce(is_over)
        control.should_training_stop = bool(is_over)


def whole_checkpoint(saved: Path) -> str | None:
    """The last one that has the servers' snapshot, which is written last."""
    found = [each.parents[1] for each in saved.glob("checkpoint-*/parameter_server/manifest*")]
    newest = max(found, key=lambda each: int(each.name.partition("-")[2]), default=None)
    return None if newest is None else str(newest)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rpc.init_rpc(rpc_backend_options=rpc.TensorWireRpcBackendOptions(liveness_timeout=8))
    callbacks = [ParameterServerCallback(["ps:0"]), Notes(folder)]
    args = arguments(folder / "saved", **SAVING)
    trainer = transformers.Trainer(model(), args, train_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=whole_checkpoint(folder / "saved"))
    rpc.shutdown()


if __name__ == "__main__":
    main()
