"""A tiny GPT-2 made from a configuration, texts for it, and a Trainer; nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from rpc.testing import as_worker, local_group

LENGTH = 6
SERVERS = ["ps0", "ps1"]
T = TypeVar("T")


def beside_servers(function: Callable[[], T]) -> T:
    """Calls a function as the one trainer of a group with servers."""
    with local_group(*SERVERS, "trainer") as agents, as_worker(agents[-1]):
        return function()


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Numbers that count up from somewhere, modulo the size of the vocabulary."""

    def __init__(self, count: int = 24, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = (self.first + index) * 7
        text = torch.arange(start, start + LENGTH) % 31
        return {"input_ids": text, "labels": text}


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=31, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


PLAIN: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of all Trainers here."""


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain = {**PLAIN, "output_dir": str(folder), "save_strategy": "no"}
    return TrainingArguments(**{**plain, **changes})


def tokenizer() -> PreTrainedTokenizerFast:
    """Knows letters."""
    vocabulary = {"<pad>": 0} | {chr(97 + n): n + 1 for n in range(26)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")


def losses(trainer: Trainer) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def fit(
    folder: Path,
    callbacks: list[Any] | None = None,
    resume: str | None = None,
    make: Callable[..., Trainer] = Trainer,
    **changes: Any,
) -> Trainer:
    """Trains a tiny model as a script would."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # which arguments with bf16 have set
    own = {key: changes.pop(key) for key in ("optimizer_cls_and_kwargs", "optimizers")
           if key in changes}  # fmt: skip
    trainer = make(
        model=model(),
        args=arguments(folder, **changes),
        train_dataset=Texts(),
        eval_dataset=Texts(8, first=40),
        callbacks=callbacks or [],
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def require_same(local: Trainer, other: Trainer) -> None:
    """Losses, weights and the optimizer's state are the same, bit for bit."""
    assert losses(local)
    assert losses(other) == losses(local)
    for (name, one), two in zip(
        local.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
