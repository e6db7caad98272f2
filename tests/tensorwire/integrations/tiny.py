"""A tiny GPT-2 made from a configuration, texts for it, and a Trainer; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

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


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**plain, **changes})


def losses(trainer: Trainer) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]
