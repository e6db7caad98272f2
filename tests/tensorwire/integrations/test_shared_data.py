"""Trainers that share one data set train each sample once in each epoch, whoever dies or resumes.

The model is a table that counts: each sample adds one to its own entry.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

transformers = pytest.importorskip("transformers")

from transformers import Trainer  # noqa: E402

from rpc.agent import Agent  # noqa: E402
from rpc.testing import MemoryHub, as_worker, local_group  # noqa: E402
from tensorwire import parameter_server as ps  # noqa: E402
from tensorwire.integrations.transformers import ParameterServerCallback  # noqa: E402
from tensorwire.parameter_server.decisions import tasks  # noqa: E402
from tests.tensorwire.integrations.tiny import PLAIN, SERVERS, arguments  # noqa: E402
from tests.tensorwire.parameter_server.clusters import run  # noqa: E402
from tests.waiting import until  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(200),
    pytest.mark.slow,
]

EPOCHS = 2
SHARED: dict[str, Any] = {
    "max_steps": -1,
    "num_train_epochs": EPOCHS,
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1000,
}


class Numbers(Dataset[dict[str, Tensor]]):
    """Each sample is its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.tensor(index)}


class Counts(nn.Module):
    """A gradient step with rate one adds one to the entry of each sample of the batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(count))
        self.seen: list[list[int]] = []

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        self.seen.append(ids.tolist())
        return {"loss": -self.counts[ids].sum()}


class After(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something after some step of its Trainer, once."""

    def __init__(self, step: int, what: Callable[[], object]) -> None:
        self.step, self.what, self.is_done = step, what, False

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step and not self.is_done:
            self.is_done = True
            self.what()


class Crashed(Exception):
    """Ends a Trainer in the middle of training."""


def crash() -> None:
    raise Crashed


def make(
    folder: Path,
    servers: Any = SERVERS,
    *more: Any,
    count: int = 24,
    connect: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """A Trainer that counts. Its loss is divided by the batches of a step, so its rate is more."""
    if unknown := changes.keys() - {each.name for each in fields(transformers.TrainingArguments)}:
        pytest.skip(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    model, parts = Counts(count), changes.get("gradient_accumulation_steps", 1)
    sharing = ParameterServerCallback(
        servers, mode="async", every_sample_once=True, **connect or {}
    )
    return Trainer(
        model,
        arguments(folder, **{**SHARED, **changes}),
        train_dataset=Numbers(count),
        callbacks=[*more, sharing],
        optimizers=(torch.optim.SGD(model.parameters(), lr=float(parts)), None),
    )


def counts(trainer: Trainer) -> list[float]:
    found: list[float] = trainer.model.counts.tolist()
    return found


def as_trainer(function: Callable[[], Any], hub: MemoryHub | None = None) -> Any:
    """Calls a function as the one trainer of a new group, with new servers."""
    options = {} if hub is None else {"hub": hub}
    with local_group(*SERVERS, "trainer", **options) as agents, as_worker(agents[-1]):
        return function()


class TestOneTrainer:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
            {"dataloader_num_workers": 2},
        ],
        ids=str,
    )
    def test_trains_each_sample_once_an_epoch(
        self, changes: dict[str, Any], tmp_path: Path
    ) -> None:
        trainer = make(tmp_path, count=22, **changes)
        as_trainer(trainer.train)
        assert counts(trainer) == [EPOCHS] * 22
        assert trainer.state.global_step == trainer.state.max_steps == EPOCHS * 6
        assert trainer.state.epoch == trainer.state.num_train_epochs == EPOCHS

    def test_leaves_out_a_last_step_that_is_short_if_told_so(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, count=22, dataloader_drop_last=True)
        as_trainer(trainer.train)
        assert sum(counts(trainer)) == EPOCHS * 20
        assert max(counts(trainer)) == EPOCHS

    def test_has_the_order_of_its_seed(self, tmp_path: Path) -> None:
        def seen(**changes: Any) -> list[list[int]]:
            trainer = make(tmp_path, **changes)
            as_trainer(trainer.train)
            found: list[list[int]] = trainer.model.seen
            return found

        one = seen(seed=1)
        assert one == seen(seed=2, data_seed=1)
        assert one != seen(seed=2)

    def test_has_the_order_of_the_data_if_told_so(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, train_sampling_strategy="sequential")
        as_trainer(trainer.train)
        assert trainer.model.seen == [list(range(n, n + 4)) for n in range(0, 24, 4)] * EPOCHS

    def test_tells_of_everybodys_progress(self, tmp_path: Path) -> None:
        bars: list[tuple[int, int]] = []

        def look() -> None:
            for each in trainer.callback_handler.callbacks:
                if isinstance(each, transformers.ProgressCallback):
                    bar: Any = each.training_bar
                    bars.append((bar.n, bar.total))

        trainer = make(
            tmp_path,
            SERVERS,
            After(3, look),
            num_train_epochs=1,
            logging_steps=1,
            disable_tqdm=False,
        )
        result = as_trainer(trainer.train)
        assert bars == [(2, 6)]  # when this callback is called, before the bar's own
        told = [each for each in trainer.state.log_history if "loss" in each]
        assert [each["cluster_samples_trained"] for each in told] == [4, 8, 12, 16, 20, 24]
        assert told[-1]["cluster_samples_left"] == 0
        assert result.metrics["cluster_samples_trained"] == 24

    def test_has_nothing_to_do_where_all_is_trained(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def twice() -> list[float]:
            make(tmp_path).train()
            again = make(tmp_path)
            again.train()
            return counts(again)

        assert as_trainer(twice) == [EPOCHS] * 24
        assert "48 of the 48 samples of 2 epochs are trained already" in caplog.text
        assert "nothing left to train" in caplog.text


class TestSeveralTrainers:
    @pytest.mark.parametrize("under", [ps.Async(), ps.SSP(2), ps.BSP(ps.Reduce.SUM)], ids=str)
    def test_train_each_sample_once_an_epoch(self, under: Any, tmp_path: Path) -> None:
        def train(trainer: Trainer, cluster: ps.Cluster) -> list[int]:
            trainer.train()
            cluster.finish()
            return [sample for some in trainer.model.seen for sample in some]

        trainers, functions = [], []
        with local_group(*SERVERS, "trainer0", "trainer1") as agents:
            for agent in agents[2:]:
                with as_worker(agent):
                    cluster = ps.connect(SERVERS, consistency=under, trainers=2)
                options = {"lr_scheduler_type": "cosine"} if under == ps.Async() else {}
                trainers.append(make(tmp_path, cluster, count=80, **options))
                functions.append(partial(train, trainers[-1], cluster))
            one, two = run(agents[2:], functions)
        assert sorted(one + two) == sorted([*range(80)] * EPOCHS)
        for each in trainers:
            if under != ps.Async():
                assert counts(each) == [EPOCHS] * 80
            assert each.state.epoch == EPOCHS
            assert each.state.max_steps == EPOCHS * 20
        assert max(each.lr_scheduler.last_epoch for each in trainers) == EPOCHS * 20

    @pytest.mark.parametrize("under", [ps.Async(), ps.BSP(ps.Reduce.SUM)], ids=str)
    def test_train_each_sample_once_while_servers_change(self, under: Any, tmp_path: Path) -> None:
        """The state moves to three servers, and then to one, in the middle of training."""

        def train(trainer: Trainer, cluster: ps.Cluster) -> list[int]:
            trainer.train()
            cluster.finish()
            return [sample for some in trainer.model.seen for sample in some]

        trainers, functions = [], []
        with local_group(*SERVERS, "ps2", "trainer0", "trainer1") as agents:
            for agent in agents[3:]:
                with as_worker(agent):
                    cluster = ps.connect(SERVERS, consistency=under, trainers=2)
                more = After(4, partial(cluster.resize, [*SERVERS, "ps2"]))
                fewer = After(8, partial(cluster.resize, ["ps2"]))
                changes = (more, fewer) if not trainers else ()
                trainers.append(make(tmp_path, cluster, *changes, count=80))
                functions.append(partial(train, trainers[-1], cluster))
            seen = run(agents[3:], functions)
            assert [each.name for each in cluster.session.view.servers] == ["ps2"]
        assert [counts(each) for each in trainers] == [[EPOCHS] * 80] * 2
        if under != ps.Async():  # where leases end when rows move, and samples are trained anew
            assert sorted(chain.from_iterable(seen)) == sorted([*range(80)] * EPOCHS)

    def test_leave_what_a_trainer_that_died_had_taken_to_the_other(self, tmp_path: Path) -> None:
        hub, died = MemoryHub(), threading.Event()

        def die() -> None:
            hub.cut(3)
            died.set()
            crash()

        waits = After(3, lambda: died.wait(60))
        stays = make(tmp_path, SERVERS, waits, count=80, connect={"trainers": 2})
        dies = make(tmp_path, SERVERS, After(3, die), count=80, connect={"trainers": 2})
        with local_group(*SERVERS, "trainer0", "trainer1", hub=hub) as agents:
            run(agents[2:], [stays.train, partial(crashing, dies)])
        assert counts(stays) == [EPOCHS] * 80


def crashing(trainer: Trainer) -> None:
    """Trains until a callback ends it."""
    with pytest.raises(Crashed):
        trainer.train()


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}


@pytest.fixture
def loads_random_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allows torch to load numpy's states all the time.

    A Trainer allows it for a moment, in the whole process, and disallows it to those beside it.
    """
    with transformers.trainer_pt_utils.safe_globals():
        monkeypatch.setattr(transformers.trainer, "safe_globals", nullcontext)
        yield


class TestResuming:
    def test_goes_on_where_the_servers_are_not_where_the_checkpoint_was(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two steps were made after the checkpoint, and servers still have them."""

        def go() -> Trainer:
            crashing(make(tmp_path, SERVERS, After(6, crash), **SAVING))
            trainer = make(tmp_path, **SAVING)
            trainer.train(resume_from_checkpoint=True)
            return trainer

        trainer = as_trainer(go)
        assert counts(trainer) == [EPOCHS] * 24
        assert len(trainer.model.seen) == 6
        assert "24 of the 48 samples of 2 epochs are trained already" in caplog.text

    def test_goes_on_at_new_servers_where_the_checkpoint_was(self, tmp_path: Path) -> None:
        as_trainer(partial(crashing, make(tmp_path, SERVERS, After(6, crash), **SAVING)))
        trainer = make(tmp_path, **SAVING)
        as_trainer(lambda: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")))
        assert counts(trainer) == [EPOCHS] * 24
        assert len(trainer.model.seen) == 8
        assert trainer.state.global_step == trainer.state.max_steps == 12

    def test_is_refused_where_servers_lack_what_the_checkpoint_has(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"connect": {"snapshots": None}, **SAVING}
        as_trainer(partial(crashing, make(tmp_path, SERVERS, After(6, crash), **options)))
        with pytest.raises(ValueError, match="4 batches of sampler 'model' that were trained"):
            as_trainer(lambda: make(tmp_path, **options).train(resume_from_checkpoint=True))

    def test_is_refused_where_the_checkpoint_has_no_account(self, tmp_path: Path) -> None:
        model = Counts(24)
        Trainer(
            model,
            arguments(tmp_path, **{**SHARED, **SAVING}),
            train_dataset=Numbers(24),
            optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
        ).train()
        with pytest.raises(ValueError, match=r"has no cluster_samples\.json: it was saved without"):
            as_trainer(lambda: make(tmp_path, **SAVING).train(resume_from_checkpoint=True))

    @pytest.mark.parametrize("are_new", [True, False])
    def test_of_two_goes_on_with_both(
        self, are_new: bool, tmp_path: Path, loads_random_states: None
    ) -> None:
        """Both crash after the first one's checkpoint, and resume it, with new servers or not."""
        meet = threading.Barrier(2)

        def crash_together() -> None:
            meet.wait(60)
            crash()

        options: dict[str, Any] = {"count": 80, "connect": {"trainers": 2}, **SAVING}
        others = {**options, "save_strategy": "no"}
        begin = [
            make(tmp_path, SERVERS, After(6, crash_together), **each) for each in (options, others)
        ]
        again = [make(tmp_path, SERVERS, **each) for each in (options, others)]
        resume = [partial(each.train, str(tmp_path / "checkpoint-4")) for each in again]
        with local_group(*SERVERS, "trainer0", "trainer1") as agents:
            run(agents[2:], [partial(crashing, each) for each in begin])
            if not are_new:
                run(agents[2:], resume)
        if are_new:
            with local_group(*SERVERS, "trainer0", "trainer1") as agents:
                run(agents[2:], resume)
        assert [counts(each) for each in again] == [[EPOCHS] * 80] * 2

    def test_is_what_train_does_itself_when_servers_went_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tasks, "PATIENCE", 0.05)
        hub = MemoryHub()

        def lose(agents: list[Agent]) -> None:
            hub.cut(1)
            agents[1].shutdown(graceful=False)

        with local_group(*SERVERS, "trainer", hub=hub) as agents, as_worker(agents[-1]):
            trainer = make(tmp_path, SERVERS, After(6, lambda: lose(agents)), **SAVING)
            trainer.train()
        assert counts(trainer) == [EPOCHS] * 24


class Stream(IterableDataset[dict[str, Tensor]]):
    """Has no length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"ids": torch.tensor(0)}])


class OwnLoader(Trainer):  # type: ignore[misc]
    """Makes a loader whose order is its own."""

    def get_train_dataloader(self) -> Any:
        batches = [[0, 1], [2, 3]]
        return DataLoader(self.train_dataset, batch_sampler=batches)


class TestWhatCannotBeHonoured:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"max_steps": 7}, "max_steps=7: every_sample_once=True ends with the last sample"),
            ({"num_train_epochs": 1.5}, r"num_train_epochs=1\.5: .* give a whole number"),
            ({"auto_find_batch_size": True}, "auto_find_batch_size=True: .* needs one batch size"),
            ({"train_sampling_strategy": "group_by_length"}, "'group_by_length': .* give 'random'"),
            ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "dataloader_in_order="),
            (
                {"gradient_accumulation_steps": 5, "per_device_train_batch_size": 1},
                "gradient_accumulation_steps=5: .* with 4 samples, fewer than one for each batch",
            ),
            (
                {"per_device_train_batch_size": 32, "dataloader_drop_last": True},
                "dataloader_drop_last=True: .* leaves no step of 24 samples",
            ),
        ],
        ids=str,
    )
    def test_of_the_arguments_is_refused_before_training(
        self, changes: dict[str, Any], says: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=says):
            make(tmp_path, **changes).train()

    def test_of_the_data_is_refused_before_training(self, tmp_path: Path) -> None:
        trainer = make(tmp_path)
        trainer.train_dataset = Stream()
        with pytest.raises(
            ValueError, match=r"train_dataset='Stream': .* a data set with a length"
        ):
            trainer.train()

    def test_of_a_loader_is_refused_before_training(self, tmp_path: Path) -> None:
        sharing = ParameterServerCallback(SERVERS, mode="async", every_sample_once=True)
        trainer = OwnLoader(
            Counts(4), arguments(tmp_path, **SHARED), train_dataset=Numbers(4), callbacks=[sharing]
        )
        with pytest.raises(ValueError, match=r"'a loader with a list': .* makes the order"):
            trainer.train()

    def test_of_the_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="every_sample_once=True is for mode='async', not 'sy"):
            ParameterServerCallback(SERVERS, every_sample_once=True)

    def test_is_refused_to_a_callback_that_came_late(self, tmp_path: Path) -> None:
        trainer = Trainer(Counts(4), arguments(tmp_path, **PLAIN), train_dataset=Numbers(4))
        sharing = ParameterServerCallback(SERVERS, mode="async", every_sample_once=True)
        trainer.add_callback(sharing)
        with pytest.raises(ValueError, match="give the callback to the Trainer when it is made"):
            trainer.train()

    def test_is_another_seed(self, tmp_path: Path) -> None:
        def go() -> None:
            make(tmp_path, seed=1).train()
            make(tmp_path, seed=2).train()

        with pytest.raises(ps.DeclarationError, match="seed=1, not 2"):
            as_trainer(go)

    def test_is_said_by_one_that_was_stopped_and_goes_on_when_it_trains_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Stop(transformers.TrainerCallback):  # type: ignore[misc]
            step = 2

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                control.should_training_stop = state.global_step == self.step

        def go() -> list[int]:
            trainer.train()
            until(lambda: not multiprocessing.active_children())  # the workers of the loader
            assert "this Trainer was stopped; 40 of 48 samples are not trained" in caplog.text
            stop.step = -1
            trainer.train()
            assert trainer.state.epoch == EPOCHS
            trainer.train()
            return [sample for some in trainer.model.seen for sample in some]

        caplog.set_level(logging.WARNING)
        stop = Stop()
        trainer = make(tmp_path, SERVERS, stop, dataloader_num_workers=1)
        seen = as_trainer(go)
        assert sorted(seen) == sorted([*range(24)] * EPOCHS)
        assert counts(trainer) == [EPOCHS] * 24
        assert "8 of the 48 samples of 2 epochs are trained already" in caplog.text
        assert "there is nothing left to train" in caplog.text
