"""A Trainer whose model looks rows up in tables trains as one with an embedding of torch's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers import Trainer  # noqa: E402

from tensorwire import parameter_server as ps  # noqa: E402
from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: E402
from tests.tensorwire.integrations.tiny import (  # noqa: E402
    SERVERS,
    arguments,
    beside_servers,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
LR, ROWS = 0.5, 40


class Model(nn.Module):
    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        self.top = nn.Linear(4, 1)
        nn.init.constant_(self.top.weight, 0.25)
        nn.init.constant_(self.top.bias, 0.0)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.top(self.words(ids).mean(1)).squeeze(1)
        return {"loss": nn.functional.mse_loss(scores, labels), "logits": scores}


def data(count: int = 32) -> list[dict[str, Any]]:
    ids = torch.randint(0, ROWS, (count, 3), generator=torch.Generator().manual_seed(1))
    return [{"ids": each, "labels": float(each[0] % 2)} for each in ids]


def trained(
    model: Model, folder: Path, callbacks: list[Any], resumed: Path | None = None, **changes: Any
) -> Trainer:
    args = arguments(
        folder,
        **{
            "max_steps": 6,
            "optim": "sgd",
            "learning_rate": LR,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0,
            "lr_scheduler_type": "constant",
            **changes,
        },
    )
    trainer = Trainer(model, args, train_dataset=data(), eval_dataset=data(8), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return trainer


def on_servers(cluster: ps.Cluster) -> Model:
    rule, init = ps.SGD(lr=LR), ps.Uniform(0.5, seed=3)
    return Model(ps.Embedding(cluster.table("words", 4, rule, init=init)))


def rows_of(model: Model) -> Tensor:
    rows: Tensor = model.words.table.pull(torch.arange(ROWS))  # type: ignore[union-attr, operator]
    return rows


def test_rows_move_as_in_a_local_run_and_are_resumed_from_the_snapshot_of_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = Model(nn.Embedding(ROWS, 4))
    saving = {"save_strategy": "steps", "save_steps": 3}
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}

    def same(model: Model) -> None:
        assert torch.equal(rows_of(model), local.words.weight)  # type: ignore[arg-type]
        for mine, other in zip(model.top.parameters(), local.top.parameters(), strict=True):
            assert torch.equal(mine, other)

    def whole() -> None:
        cluster = ps.connect(SERVERS)
        model = on_servers(cluster)
        local.words.weight.data.copy_(rows_of(model))  # type: ignore[operator, union-attr]
        trained(local, tmp_path / "local", [])
        callback = ParameterServerCallback(cluster)
        trained(model, tmp_path, [callback], **saving, **best)
        callback.optimizer.reload()  # type: ignore[union-attr]
        assert "the rows of tables are those of the last step" in caplog.text
        late = Trainer(model, arguments(tmp_path), train_dataset=data())
        late.add_callback(ParameterServerCallback(cluster, name="late"))
        with pytest.raises(ValueError, match="give the callback to the Trainer when it is made"):
            late.train()
        several: Any = SimpleNamespace(world_size=2)
        with pytest.raises(ValueError, match="world_size=2: the model has tables"):
            callback.on_train_begin(
                several, late.state, late.control, optimizer=late.optimizer, model=model
            )

    def resumed() -> None:
        saved = tmp_path / "checkpoint-3"
        cluster = ps.connect(SERVERS[:1], restore=saved / "parameter_server")
        model = on_servers(cluster)
        trainer = trained(model, tmp_path, [ParameterServerCallback(cluster)], saved)
        same(model)
        trainer.train()
        assert cluster.step == 12

    def forgotten() -> None:
        cluster, saved = ps.connect(SERVERS), tmp_path / "checkpoint-3"
        model, callback = on_servers(cluster), ParameterServerCallback(cluster)
        with pytest.raises(ValueError, match=r"checkpoint-3'.* restore="):
            trained(model, tmp_path, [callback], saved)

    for run in (whole, resumed, forgotten):
        beside_servers(run)
