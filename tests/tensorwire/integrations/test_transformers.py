"""A Trainer whose optimizer is at servers does what it does alone, to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer  # noqa: E402

from rpc import extend  # noqa: E402
from rpc.testing import as_worker, local_group  # noqa: E402
from tensorwire import parameter_server as ps  # noqa: E402
from tensorwire.integrations.low_memory import AdaLomo, GaLoreAdamW, Lomo  # noqa: E402
from tensorwire.integrations.transformers import (  # noqa: E402
    ParameterServerCallback,
    stand_alone,
)
from tests.tensorwire.integrations.tiny import (  # noqa: E402
    SERVERS,
    beside_servers,
    fit,
    require_same,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]


def plain(state: Any) -> Any:
    """A state in which tensors can be compared by ``==``."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items() if value is not None}
    return [plain(each) for each in state] if isinstance(state, list | tuple) else state


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "fused": {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 2},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "polynomial", "bf16": True},
    "adagrad": {"optim": "adagrad", "max_grad_norm": 0.1},
    "rmsprop": {"optim": "rmsprop", "neftune_noise_alpha": 5.0},
    "adafactor": {"optim": "adafactor", "gradient_checkpointing": True},
    "nadam": {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 0.01})},
    "plateau": {
        "optimizer_cls_and_kwargs": (torch.optim.RAdam, {"lr": 0.01}),
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
}


def test_every_optimizer_and_option_has_the_bits_of_the_local_run(tmp_path: Path) -> None:
    local = {name: fit(tmp_path, **options) for name, options in OPTIMIZERS.items()}
    states = {name: plain(each.optimizer.state_dict()) for name, each in local.items()}

    def go() -> None:
        cluster = ps.connect(SERVERS)
        for name, options in OPTIMIZERS.items():
            callback = ParameterServerCallback(cluster, name=name)
            trainer = fit(tmp_path, [callback], **options)
            require_same(local[name], trainer)
            assert isinstance(trainer.optimizer.optimizer, ps.Optimizer)
            assert plain(trainer.optimizer.state_dict()) == states[name], name

    beside_servers(go)


def test_checkpoints_go_from_servers_to_a_local_run_and_back_in_the_middle_of_an_epoch(
    tmp_path: Path,
) -> None:
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    saving |= {"lr_scheduler_type": "cosine"}  # type: ignore[dict-item]
    whole = fit(tmp_path / "local", **saving)

    def go() -> tuple[Trainer, Any]:
        saved = fit(tmp_path / "servers", [ParameterServerCallback(SERVERS)], **saving)
        require_same(whole, saved)
        again = ParameterServerCallback(SERVERS)  # servers are at step 4 meanwhile
        resumed = fit(tmp_path, [again], str(tmp_path / "local" / "checkpoint-2"), **saving)
        return resumed, plain(resumed.optimizer.state_dict())

    resumed, state = beside_servers(go)
    require_same(whole, resumed)
    assert state == plain(whole.optimizer.state_dict())
    back = fit(tmp_path, [], str(tmp_path / "servers" / "checkpoint-2"), **saving)
    require_same(whole, back)


def test_servers_end_with_the_best_model(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "loss",
        "greater_is_better": True,
    }  # fmt: skip
    local = fit(tmp_path / "local", **best)

    def go() -> None:
        callback = ParameterServerCallback(SERVERS)
        trainer = fit(tmp_path / "servers", [callback], **best)
        require_same(local, trainer)
        held = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        for parameter in trainer.model.parameters():
            nn.init.zeros_(parameter)
        assert callback.optimizer is not None
        callback.optimizer.reload()
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, held[name]), name

    beside_servers(go)
    assert local.state.best_global_step < 3


class _Noticing(Trainer):
    """Overrides what people override."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[str] = []

    def create_optimizer(self) -> torch.optim.Optimizer:
        self.seen.append("create_optimizer")
        decayed = [each for each in self.model.parameters() if each.dim() > 1]
        others = [each for each in self.model.parameters() if each.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        self.optimizer = torch.optim.Adam(groups, lr=0.01)
        return self.optimizer

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        self.seen.append("training_step")
        return super().training_step(*args, **options)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        self.seen.append("compute_loss")
        loss = super().compute_loss(*args, **options)
        return (loss[0] * 0.5, loss[1]) if isinstance(loss, tuple) else loss * 0.5


class _Told(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append(f"step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append("evaluate")


def test_overridden_methods_and_callbacks_are_called_as_in_a_local_run(tmp_path: Path) -> None:
    stops = {
        "metric_for_best_model": "loss", "load_best_model_at_end": True, "eval_strategy": "steps",
        "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 8,
    }  # fmt: skip

    def callbacks() -> list[Any]:
        return [_Told(), EarlyStoppingCallback(1, early_stopping_threshold=10.0)]

    alone = callbacks()
    local = fit(tmp_path / "local", alone, make=_Noticing, **stops)

    def go() -> None:
        mine = [*callbacks(), ParameterServerCallback(SERVERS)]
        trainer = fit(tmp_path / "servers", mine, make=_Noticing, **stops)
        require_same(local, trainer)
        assert trainer.seen == local.seen
        assert mine[0].seen == alone[0].seen

    beside_servers(go)
    assert local.state.global_step == 4  # it was stopped


class _Phases(Trainer):
    """Notes in which slow phase its worker is when it computes and when it saves."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[str] = []

    def note(self, what: str) -> None:
        told = f"{what}: {extend.worker().progress.report().phase}"
        if told not in self.seen[-1:]:
            self.seen.append(told)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        self.note("step")
        return super().training_step(*args, **options)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        self.note("batch")
        return super().prediction_step(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.note("save")
        super()._save_checkpoint(*args, **options)


def test_evaluations_and_saves_are_slow_phases_and_steps_are_not(tmp_path: Path) -> None:
    often = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2,
        "max_steps": 3,
    }  # fmt: skip

    def go() -> None:
        trainer = fit(tmp_path, [ParameterServerCallback(SERVERS)], make=_Phases, **often)
        assert trainer.seen == [
            "step: ", "batch: evaluation",
            "step: ", "batch: evaluation", "save: save",
            "step: ", "batch: evaluation", "save: save",
        ]  # fmt: skip
        trainer.evaluate()
        trainer.note("after")
        assert trainer.seen[-1] == "after: "

    beside_servers(go)


def test_of_trainers_that_stand_alone_only_the_first_of_its_role_saves_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = transformers.logging.get_verbosity()
    options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "max_steps": 2}
    options |= {"log_level": "error", "log_level_replica": "critical"}
    levels, saved = [], []
    try:
        for rank in ("0", "1"):
            for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
                monkeypatch.setenv(name, rank)
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                monkeypatch.setenv(name, "2")
            stand_alone()
            folder = tmp_path / rank
            beside_servers(lambda f=folder: fit(f, [ParameterServerCallback(SERVERS)], **options))
            levels.append(transformers.logging.get_verbosity())
            saved.append([each.name for each in folder.glob("checkpoint-*")])
    finally:
        transformers.logging.set_verbosity(before)
    assert levels == [logging.ERROR, logging.CRITICAL]
    assert saved == [["checkpoint-2"], []]


class _Peak(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes the elements of all gradients that are there at once, at most."""

    def __init__(self) -> None:
        self.peak = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._parameters = list(others["model"].parameters())
        for each in self._parameters:
            each.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        held = sum(each.grad.numel() for each in self._parameters if each.grad is not None)
        self.peak = max(self.peak, held)


def test_gradients_pushed_during_backward_take_one_layers_memory_and_give_the_same(
    tmp_path: Path,
) -> None:
    low: dict[str, dict[str, Any]] = {
        "lomo": {"optimizer_cls_and_kwargs": (Lomo, {"lr": 0.1, "clip_grad_value": 0.01})},
        "adalomo": {"optimizer_cls_and_kwargs": (AdaLomo, {"lr": 0.05})},
        "galore": {
            "optimizer_cls_and_kwargs": (GaLoreAdamW, {"lr": 0.01, "rank": 4, "update_gap": 2})
        },
    }
    local = {name: fit(tmp_path, max_grad_norm=0.0, **each) for name, each in low.items()}

    def go() -> None:
        cluster = ps.connect(SERVERS)
        for name, options in low.items():
            peak = _Peak()
            callback = ParameterServerCallback(cluster, mode="backward", name=name)
            trainer = fit(tmp_path, [peak, callback], max_grad_norm=0.0, **options)
            require_same(local[name], trainer)
            largest = max(each.numel() for each in trainer.model.parameters())
            assert largest <= peak.peak <= 1.5 * largest

    beside_servers(go)


def test_the_trainer_can_make_the_optimizer_itself(tmp_path: Path) -> None:
    local = fit(tmp_path, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.01}))

    def go() -> None:
        inner = {"inner": torch.optim.AdamW, "cluster": ps.connect(SERVERS), "lr": 0.01}
        trainer = fit(tmp_path, optimizer_cls_and_kwargs=(ps.TrainerOptimizer, inner))
        require_same(local, trainer)

    beside_servers(go)


class _Start(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the weights with which training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.weights = [each.detach().clone() for each in others["model"].parameters()]


def test_a_second_asynchronous_trainer_begins_with_what_the_servers_have_learnt(
    tmp_path: Path,
) -> None:
    start = _Start()
    with local_group(*SERVERS, "first", "second") as agents:
        for agent in agents[len(SERVERS) :]:
            with as_worker(agent):
                callback = ParameterServerCallback(SERVERS, mode="async", staleness=100)
                trainer = fit(tmp_path, [callback, start])
            if agent is agents[len(SERVERS)]:
                learnt = [each.detach().clone() for each in trainer.model.parameters()]
    assert all(map(torch.equal, learnt, start.weights))
    assert not all(map(torch.equal, learnt, trainer.model.parameters()))


def test_arguments_that_do_not_go_with_a_mode_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode='fast' is none of 'sync', 'async', 'backward'"):
        ParameterServerCallback(SERVERS, mode="fast")
    with pytest.raises(ValueError, match="staleness=3 is for mode='async', not 'sync'"):
        ParameterServerCallback(SERVERS, staleness=3)
    callback = ParameterServerCallback(SERVERS, mode="backward")
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0: in mode 'backward'"):
        fit(tmp_path, [callback])
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2: in mode 'backward'"):
        fit(tmp_path, [callback], max_grad_norm=0.0, gradient_accumulation_steps=2)
