"""A tiny GPT that has read code is fine-tuned on prose, by a Hugging Face Trainer and two servers.

    rpcrun --standalone --role ps:2,service=tensorwire.parameter_server \\
           --role trainer:1,max_restarts=1 -m tutorials.trainer.fine_tune

The base model is trained first, without servers, on Python's standard library; then it reads
what ``help()`` says about Python, which every Python ships, too. The scripts for both are the
same, but for one callback. With ``--kill`` the trainer is killed on the way: rpcrun starts it
again, and it resumes from its last checkpoint while the servers wait.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import rpc
from tensorwire.integrations.transformers import ParameterServerCallback, stand_alone
from tutorials import pictures
from tutorials.parameter_server import roles

_ROLES = "--role ps:2,service=tensorwire.parameter_server --role trainer:1,max_restarts=1"
_LENGTH = 64
_BATCH = 16
_HELD_OUT = 40
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
_CODES = {character: code for code, character in enumerate(ALPHABET)}


class Text(Dataset[dict[str, Tensor]]):
    """A text in excerpts; each character is a number.

    Args:
        text: the text.
    """

    def __init__(self, text: str) -> None:
        numbers = torch.tensor([_CODES[each] for each in text if each in _CODES])
        self.excerpts = numbers[: len(numbers) // _LENGTH * _LENGTH].view(-1, _LENGTH)

    def __len__(self) -> int:
        return len(self.excerpts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.excerpts[index], "labels": self.excerpts[index]}


def code() -> str:
    """Some of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((library / "asyncio").glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def prose() -> tuple[Text, Text]:
    """The pages of ``help()``: what is trained on, and what is held out."""
    text = Text("\n".join(topics.values()))
    held_out = Text("")
    text.excerpts, held_out.excerpts = text.excerpts[_HELD_OUT:], text.excerpts[:_HELD_OUT]
    return text, held_out


def new_model() -> GPT2LMHeadModel:
    """A GPT that knows nothing."""
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=_LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(options: argparse.Namespace, folder: str, steps: int) -> TrainingArguments:
    """Nothing in them is about servers."""
    often = max(1, steps // 5)
    return TrainingArguments(
        str(options.output / folder),
        max_steps=steps,
        per_device_train_batch_size=_BATCH,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=max(1, often // 8),
        eval_strategy="steps",
        eval_steps=often,
        save_steps=often,
        seed=options.seed,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
    )


def base_model(options: argparse.Namespace, held_out: Text) -> GPT2LMHeadModel:
    """The model that has read code; made by the first life of this process."""
    folder = options.output / "base"
    if not (folder / "config.json").exists():
        print("the base model reads code", flush=True)
        args = arguments(options, "base", options.steps)
        args.save_strategy = "no"
        trainer = Trainer(new_model(), args, train_dataset=Text(code()), eval_dataset=held_out)
        trainer.train()
        trainer.save_model(str(folder))
    found: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(folder)
    return found


class Kill(TrainerCallback):
    """Kills this process after a step, in its first life.

    Args:
        step: the step.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Looks whether it is time.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        if state.global_step == self.step and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print(f"the trainer is killed after step {self.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def fine_tune(options: argparse.Namespace, servers: list[str]) -> Trainer:
    """Fine-tunes the base model; from its last checkpoint, if there is one."""
    text, held_out = prose()
    callbacks: list[TrainerCallback] = [ParameterServerCallback(servers)]
    if options.kill:
        callbacks.append(Kill(options.steps // 2 + 5))
    trainer: Trainer = Trainer(
        base_model(options, held_out),
        arguments(options, "tuned", options.steps),
        train_dataset=text,
        eval_dataset=held_out,
        callbacks=callbacks,
    )
    folder = str(trainer.args.output_dir)
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if checkpoint is None:
        print(f"bits per character before: {_bits(trainer.evaluate()['eval_loss']):.2f}")
    else:
        print(f"training resumes from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def _bits(loss: float) -> float:
    return loss / math.log(2)


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Draws how the losses went.

    Args:
        history: what the Trainer has logged.
        path: of the picture.
    """
    drawn = pictures.figure(6, 3.4)
    axes = drawn.subplots()
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        points = [(each["step"], _bits(each[key])) for each in history if key in each]
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set(title="fine-tuning", xlabel="step", ylabel="bits per character")
    axes.legend()
    pictures.save(drawn, path)


def main(given: Sequence[str] | None = None) -> int:
    """Trains, and shows what came of it; returns the exit status."""
    parser = roles.parser(__doc__, "tutorials.trainer.fine_tune", "trainer", _ROLES)
    parser.add_argument("--steps", type=int, default=200, help="of each training (%(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill the trainer on the way")
    options = parser.parse_args(given)
    servers = roles.place(parser).servers
    torch.set_num_threads(1)  # several processes share this machine's cores
    torch.manual_seed(options.seed)
    rpc.init_rpc()
    stand_alone()  # or accelerate would wait for the servers to form a process group
    trainer = fine_tune(options, servers)
    print(f"bits per character after: {_bits(trainer.evaluate()['eval_loss']):.2f}")
    draw(trainer.state.log_history, options.output / "loss.png")
    rpc.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
