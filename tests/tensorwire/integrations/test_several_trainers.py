"""Several Trainers with data of their own share servers, and learn as one that has all data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer  # noqa: E402

from rpc.testing import as_worker, local_group  # noqa: E402
from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: E402
from tests.tensorwire.integrations.tiny import arguments  # noqa: E402
from tests.tensorwire.parameter_server.clusters import run  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(200),
    pytest.mark.slow,
]

LETTERS = 5
STEPS = 40
BATCH = 16


class Walks(Dataset[dict[str, torch.Tensor]]):
    """Numbers that count up, but for one in four; so some loss remains, however long one learns."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        steps = torch.randint(0, LETTERS, (count, 8), generator=draw)
        steps[torch.rand(count, 8, generator=draw) < 0.75] = 1
        self.texts = steps.cumsum(1) % LETTERS

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def make(folder: Path, data: Any, steps: int, seed: int, callbacks: Sequence[Any]) -> Trainer:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=LETTERS, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=0.02,
            seed=seed,
            logging_steps=1000,
        ),
        train_dataset=data,
        callbacks=list(callbacks),
    )


@torch.no_grad()
def loss_of(trainer: Trainer) -> float:
    texts = Walks(256, seed=99).texts
    return float(trainer.model.eval()(input_ids=texts, labels=texts).loss)


class Replacing(transformers.TrainerCallback):  # type: ignore[misc]
    """Puts a server in the place of another, after half of the steps."""

    def __init__(self, servers: ParameterServerCallback, names: list[str]) -> None:
        self.servers, self.names = servers, names

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == STEPS // 2:
            assert self.servers.cluster is not None
            self.servers.cluster.resize(self.names)


def two_beside_servers(folder: Path, data: Dataset[Any], seed: int) -> float:
    """The loss of what two Trainers have taught the servers, each with every other text."""
    halves = [Subset(data, range(n, len(data), 2)) for n in range(2)]  # type: ignore[arg-type]
    mine = [
        ParameterServerCallback(["ps0", "ps1"], mode="async", staleness=4, trainers=2)
        for _ in halves
    ]
    extra = [[Replacing(mine[0], ["ps0", "ps2"])], []]
    trainers = [
        make(folder, half, STEPS, seed, [callback, *more])
        for half, callback, more in zip(halves, mine, extra, strict=True)
    ]

    with local_group("ps0", "ps1", "ps2", "trainer0", "trainer1") as agents:
        run(agents[3:], [each.train for each in trainers])
        assert mine[0].optimizer is not None
        with as_worker(agents[3]):
            mine[0].optimizer.reload()
        servers = mine[0].optimizer.cluster.session.view.servers
    assert [server.name for server in servers] == ["ps0", "ps2"]
    return loss_of(trainers[0])


def test_two_asynchronous_trainers_learn_as_one_with_all_data_though_a_server_is_replaced(
    tmp_path: Path,
) -> None:
    one, two, untrained = [], [], []
    for seed in range(3):
        data = Walks(2 * BATCH * STEPS, seed)
        alone = make(tmp_path, data, 2 * STEPS, seed, [])
        untrained.append(loss_of(alone))
        alone.train()
        one.append(loss_of(alone))
        two.append(two_beside_servers(tmp_path, data, seed))
    assert mean(two) < 1.02 * mean(one), (one, two)
    assert mean(one) < 0.7 * mean(untrained)
