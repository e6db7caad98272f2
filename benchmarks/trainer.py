"""Compares ways to step the optimizer of a ``transformers.Trainer``.

    python -m benchmarks.trainer

A Trainer trains a GPT of 25 million parameters with AdamW, 8 texts of 128 tokens a step. All groups
of processes are alive at the same time; the measurement goes round them, and those whose turn it
is not are stopped.

=================  ===========================================================================
``local``          one process
``ours``           with ``ParameterServerCallback``, two servers on this host
``torch, by hand`` an optimizer as a user writes it on ``torch.distributed.rpc``: each of two
                   servers has half of the parameters and answers a step with new values
=================  ===========================================================================
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.member import die_with_parent
from benchmarks.stepping import StoppedGroup

_NAMES = ("trainer", "ps0", "ps1")
_LR = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """The size of what is trained.

    Args:
        layers: of the model.
        width: of the model.
        words: of its vocabulary.
        texts: of a step.
        length: of a text, in tokens.
        threads: of torch, in each process.
    """

    layers: int
    width: int
    words: int
    texts: int
    length: int
    threads: int


FULL = Case(layers=12, width=384, words=10_000, texts=8, length=128, threads=2)
QUICK = Case(layers=1, width=32, words=100, texts=2, length=16, threads=1)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Numbers that count up, from another one in each text."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.arange(index, index + self.case.length) * 7 % self.case.words
        return {"input_ids": text, "labels": text}


def model(case: Case) -> Any:
    """A GPT without dropout, the same in every process."""
    import transformers

    kinds: Any = transformers
    torch.manual_seed(0)
    config = kinds.GPT2Config(
        vocab_size=case.words, n_positions=case.length, n_embd=case.width, n_layer=case.layers,
        n_head=max(1, case.width // 64), bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return kinds.GPT2LMHeadModel(config)


def train(case: Case, end: Connection, folder: str, callbacks: list[Any], **options: Any) -> None:
    """Trains for as many steps as it is told again and again; it is killed when all is done."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        left = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if not self.left:
                if state.global_step:
                    end.send(None)
                self.left = end.recv()
            self.left -= 1

    args = TrainingArguments(
        folder, max_steps=1 << 20, per_device_train_batch_size=case.texts, learning_rate=_LR,
        logging_steps=1 << 20, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, optim="adamw_torch",
    )  # fmt: skip
    turns: list[Any] = [*callbacks, Turns()]
    Trainer(model(case), args, train_dataset=Texts(case), callbacks=turns, **options).train()


# --- columns


def local(case: Case, rank: int, folder: str, end: Connection) -> None:
    """One process; servers have nothing to do."""
    if rank == 0:
        train(case, end, folder, [])


def ours(case: Case, rank: int, folder: str, end: Connection) -> None:
    """Trainer and servers of this library."""
    import rpc

    options = rpc.TensorWireRpcBackendOptions(init_method=f"file://{folder}/meeting", rpc_timeout=0)
    rpc.init_rpc(_NAMES[rank], rank=rank, world_size=len(_NAMES), rpc_backend_options=options)
    if rank == 0:
        from tensorwire.integrations.transformers import ParameterServerCallback

        train(case, end, folder, [ParameterServerCallback(list(_NAMES[1:]))])


class Share:
    """The parameters of one server, as a user writes it."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def begin(self, values: list[Tensor]) -> None:
        """Takes the first values."""
        self.parameters = [torch.nn.Parameter(each) for each in values]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=_LR, weight_decay=0.0)

    def step(self, grads: list[Tensor], lr: float) -> list[Tensor]:
        """Moves the parameters, and returns what they are now."""
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = lr
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        return [each.detach() for each in self.parameters]


_share = Share()


def _begin(values: list[Tensor]) -> None:
    _share.begin(values)


def _step(grads: list[Tensor], lr: float) -> list[Tensor]:
    return _share.step(grads, lr)


class ByHand(torch.optim.Optimizer):
    """Has two servers step, each half of the elements.

    Args:
        params: the parameters.
        rpc: a module with torch's functions.
        lr: learning rate.
    """

    def __init__(self, params: Any, rpc: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.rpc = rpc
        every = [each for group in self.param_groups for each in group["params"]]
        self.shares: tuple[list[Tensor], list[Tensor]] = ([], [])
        for each in sorted(every, key=Tensor.numel, reverse=True):
            min(self.shares, key=lambda some: sum(map(Tensor.numel, some))).append(each)
        for server, share in zip(_NAMES[1:], self.shares, strict=True):
            rpc.rpc_sync(server, _begin, args=([each.detach() for each in share],))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Pushes gradients and takes what comes back.

        Args:
            closure: not used.
        """
        lr = self.param_groups[0]["lr"]
        answers = [
            self.rpc.rpc_async(server, _step, args=([each.grad for each in share], lr))
            for server, share in zip(_NAMES[1:], self.shares, strict=True)
        ]
        for answer, share in zip(answers, self.shares, strict=True):
            for parameter, value in zip(share, answer.wait(), strict=True):
                parameter.copy_(value)


def torch_by_hand(case: Case, rank: int, folder: str, end: Connection) -> None:
    """On torch's RPC."""
    from torch import distributed

    rpc: Any = distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting", rpc_timeout=0)
    rpc.init_rpc(_NAMES[rank], rank=rank, world_size=len(_NAMES), rpc_backend_options=options)
    if rank == 0:
        train(case, end, folder, [], optimizer_cls_and_kwargs=(ByHand, {"rpc": rpc, "lr": _LR}))


COLUMNS: dict[str, Callable[[Case, int, str, Connection], None]] = {
    "local": local,
    "ours": ours,
    "torch, by hand": torch_by_hand,
}


# --- measuring


def _live(column: str, case: Case, rank: int, folder: str, end: Connection) -> None:
    """A process, until it is killed; what libraries say goes into a file."""
    die_with_parent()
    with Path(folder, f"log{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
    torch.set_num_threads(case.threads)
    end.send(rank == 0)
    COLUMNS[column](case, rank, folder, end)
    threading.Event().wait()


def compare(case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds per step of each column in each round."""
    found: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with ExitStack() as stack:
        groups = {}
        for column in COLUMNS:
            live = partial(_live, column, case)
            groups[column] = StoppedGroup(live, len(_NAMES), warm_up=2)
            stack.callback(groups[column].close)
        for _ in tqdm(range(rounds), unit=" rounds", disable=None):
            for column, group in groups.items():
                found[column].append(1e3 * group.measure(steps))
    return found


def report(case: Case, found: dict[str, list[float]]) -> str:
    """Medians with quartiles, and how many times as long as local each takes, round by round."""
    count = sum(each.numel() for each in model(case).parameters())
    lines = [
        f"{count / 1e6:.1f} million parameters, {case.texts} texts of {case.length} tokens, "
        f"{case.threads} threads of torch"
    ]
    for column, taken in found.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        ratios = [b / a for a, b in zip(found["local"], taken, strict=True)]
        worst, ratio, best = statistics.quantiles(ratios, n=4)
        spread = f"({low:.0f} to {high:.0f})"
        lines.append(
            f"  {column:<15}{middle:8.0f} ms {spread:>16}; "
            f"{ratio:.2f} x local ({worst:.2f} to {best:.2f})"
        )
    return "\n".join(lines)


def _import_once_for_all_processes() -> None:
    """Imports what they would each spend many seconds on, some of it with their first step."""
    import transformers
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    import rpc  # noqa: F401
    from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: F401

    transformers.logging.set_verbosity_error()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model: shows that it runs, not how fast")
    add("--rounds", type=int, default=9, help="(%(default)s)")
    add("--steps", type=int, default=2, help="of a round (%(default)s)")
    options = parser.parse_args(arguments)
    case = QUICK if options.quick else FULL
    _import_once_for_all_processes()
    print(report(case, compare(case, options.rounds, options.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
