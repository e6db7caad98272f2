"""Goes on with a Trainer whose servers went back to a snapshot: resumes the checkpoint of that cut.

With each checkpoint the servers write a snapshot into its folder. So whoever is told of the
snapshot knows the checkpoint, which has the rest: the step, the place in the data, random states.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from transformers import Trainer
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from tensorwire import parameter_server as ps

_logger: Final = logging.getLogger("tensorwire")
_STATE: Final = "trainer_state.json"


def trainer_of(state: TrainerState) -> Trainer | None:
    """The Trainer that is calling a callback; None if something else calls it.

    A Trainer tells its callbacks of everything but itself, so it is looked for among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and caller.state is state:
            trainer: Trainer = caller
            return trainer
        frame = frame.f_back
    return None


def keep_training(
    trainer: Trainer,
    before: Callable[[str | None], None],
    before_again: Callable[[Trainer], None],
) -> None:
    """Has ``trainer.train`` resume the checkpoint of the cut when servers went back to it.

    Args:
        trainer: the Trainer.
        before: told each time from which checkpoint it begins; None for from none.
        before_again: called each time before it resumes because servers went back.
    """
    train = trainer.train

    def train_on(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        while True:
            before(_named(resume_from_checkpoint, str(trainer.args.output_dir)))
            try:
                return train(resume_from_checkpoint, *args, **options)
            except ps.RolledBack as error:
                checkpoint = checkpoint_of(error, str(trainer.args.output_dir))
                if checkpoint is None:
                    raise
                _logger.warning("%s. Training resumes from %s", error, checkpoint)
                resume_from_checkpoint = checkpoint
            _tidy(trainer)
            before_again(trainer)

    vars(trainer)["train"] = train_on


def checkpoint_of(error: ps.RolledBack, output_dir: str) -> str | None:
    """The folder of the checkpoint that was saved with a snapshot, or else the last checkpoint."""
    folder = Path(error.snapshot).parent
    if (folder / _STATE).exists():
        return str(folder)
    return _named(True, output_dir)


def _named(resume_from_checkpoint: Any, output_dir: str) -> str | None:
    """The checkpoint that the argument of ``train`` means, which may be True for the last one."""
    if resume_from_checkpoint is not True:
        return str(resume_from_checkpoint) if resume_from_checkpoint else None
    last: Any = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    return None if last is None else str(last)


def save_servers(cluster: ps.Cluster, folder: Path) -> None:
    """Has the servers write a snapshot into the folder of a checkpoint.

    One that fails leaves the last one standing, and training goes on.
    """
    if folder.exists():  # of an earlier run, whose checkpoint has just been written over
        shutil.rmtree(folder)
    try:
        cluster.snapshot(folder).wait()
    except ps.SnapshotError as error:
        _logger.warning("the servers wrote no snapshot into %s: %s", folder, error)


def _tidy(trainer: Trainer) -> None:
    """Removes what a loop that was left by an error would have removed at its end."""
    noise = getattr(trainer, "neftune_hook_handle", None)
    if noise is not None:
        noise.remove()
