"""Rows that are kept for batches ahead have the bits that they have at their servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.exchange import PullRequest
from tensorwire.parameter_server.client.stepper import Stepper
from tensorwire.parameter_server.decisions import tasks
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.server.state import ShardState
from tests.tensorwire.parameter_server.clusters import run, server_names, train

IDS, STEPS = 40, 12
Batch = dict[str, Any]
Event = Callable[[ps.Cluster, list[ps.Table]], object]


def batches(trainer: int = 0, steps: int = STEPS) -> list[Batch]:
    r = torch.Generator().manual_seed(trainer)

    def ids(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=r).pow(2) * IDS).long()

    return [
        {"bags": {"a": ids(6, 2), "b": ids(6, 1), "c": ids(6, 3)}, "words": ids(6, 2)}
        for _ in range(steps)
    ]


class Model(nn.Module):
    """A collection over two tables, and a module on one of them, or on another of its own."""

    def __init__(
        self, cluster: ps.Cluster, shares: bool = False, name: str = "", **options: Any
    ) -> None:
        super().__init__()
        init = ps.Uniform(0.1, seed=3)
        rules = {"one": ps.Adagrad(lr=0.1), "two": ps.Adam(lr=0.1)}
        self.tables = [
            cluster.table(name + own, 4, rule, init=init, **options) for own, rule in rules.items()
        ]
        if not shares:
            rule = ps.SGD(lr=0.1)
            self.tables.append(cluster.table(name + "three", 6, rule, init=init, **options))
        one, two = self.tables[:2]
        self.bags = ps.EmbeddingBagCollection({"a": one, "b": ps.Feature(two, "mean"), "c": one})
        self.words = ps.Embedding(self.tables[-1])

    def forward(self, batch: Batch) -> Tensor:
        both = torch.cat((self.bags(batch["bags"]).values(), self.words(batch["words"]).mean(1)), 1)
        return (both.sin() * torch.linspace(-1, 1, both.shape[1])).sum()


class Several(nn.Module):
    """Such models beside each other, each with tables that are declared otherwise."""

    def __init__(self, cluster: ps.Cluster) -> None:
        super().__init__()
        self.models = nn.ModuleDict(
            {name: Model(cluster, name=name, **options) for name, options in OPTIONS.items()}
        )
        self.tables = [table for model in self.models.values() for table in model.tables]

    def forward(self, batch: Batch) -> Tensor:
        return torch.stack([model(batch) for model in self.models.values()]).sum()


def play(
    cluster: ps.Cluster,
    ahead: int,
    *,
    at: dict[int, Event] | None = None,
    made: Callable[[ps.Cluster], Any] = Model,
    given: Sequence[Batch] = (),
) -> tuple[list[float], list[Tensor]]:
    """Trains; returns the losses, and all rows at the end."""
    model = made(cluster)
    optimizer = ps.Optimizer(cluster, model)
    losses: dict[int, float] = {}
    given = given or batches()
    while len(losses) < STEPS:
        begin = len(losses)
        try:
            for batch in ps.prefetch(given[begin:], model, ids=_ids_for(model), ahead=ahead):
                event = (at or {}).pop(len(losses), None)
                if event is not None:
                    event(cluster, model.tables)
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                losses[len(losses)] = loss.item()
        except ps.RolledBack as error:
            losses = {step: losses[step] for step in range(error.step)}
    rows = [table.pull(torch.arange(IDS)) for table in model.tables]
    return list(losses.values()), rows


def _ids_for(model: nn.Module) -> Callable[[Batch], Batch]:
    """The ids that each module gets, by its name."""
    names = [n for n, each in model.named_modules() if n.endswith(("bags", "words"))]
    return lambda batch: {name: batch[name.rpartition(".")[2]] for name in names}


def same(one: Any, other: Any) -> bool:
    """True if two plays have the same bits."""
    return one[0] == other[0] and all(
        torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
    )


def played(
    ahead: int,
    at: Callable[[MemoryHub], dict[int, Event]] = lambda hub: {},
    servers: int = 2,
    spare: int = 0,
    backups: int = 0,
    **how: Any,
) -> Any:
    """One trainer's play, with events that may harm the servers."""
    hub, names = MemoryHub(), server_names(servers + spare)

    def go() -> Any:
        cluster = ps.connect(names[:servers], backups=backups)
        return play(cluster, ahead, at=at(hub), **how)

    with local_group(*names, "trainer0", hub=hub) as agents:
        return run(agents[-1:], [go])[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"shares": True},
    "evicted": {"evict": ps.UnusedFor(steps=2)},
    "both": {"admit": ps.MinCount(2), "evict": ps.UnusedFor(steps=3)},
    "packed": {
        "precision": ps.Precision.BFLOAT16,
        "wire": ps.Wire(push=ps.TopK(0.5), pull=ps.Int8()),
    },
}

AHEAD = pytest.mark.parametrize("ahead", [2, 4])


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """One batch ahead, and nothing happens."""
    return played(1)


def test_bits_are_those_of_one_batch_ahead_however_tables_are_declared() -> None:
    assert same(played(3, made=Several), played(1, made=Several))


def test_bits_are_those_of_one_batch_ahead_where_few_batches_come_again_and_again() -> None:
    one, other = batches(steps=2)
    given = [one, one, other] * (STEPS // 3)
    assert same(played(4, given=given), played(1, given=given))


def test_bits_hold_when_rows_move_or_are_set() -> None:
    def fill(cluster: ps.Cluster, tables: list[ps.Table]) -> None:
        for table in tables:
            table.fill(torch.arange(IDS), torch.full((IDS, table.dim), 0.25))

    def at(hub: MemoryHub) -> dict[int, Event]:
        return {
            2: fill,
            5: lambda cluster, tables: cluster.resize(server_names(3)),
            8: lambda cluster, tables: cluster.resize(["ps0"]),
        }

    assert same(played(3, at, spare=1), played(1, at, spare=1))


@AHEAD
def test_bits_hold_when_a_head_is_lost(ahead: int, undisturbed: Any) -> None:
    def at(hub: MemoryHub) -> dict[int, Event]:
        return {5: lambda cluster, tables: hub.cut(0)}

    assert same(played(ahead, at, backups=1), undisturbed)


@AHEAD
def test_bits_hold_when_all_go_back(
    ahead: int, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)

    def at(hub: MemoryHub) -> dict[int, Event]:
        return {
            4: lambda cluster, tables: cluster.snapshot(tmp_path / "one").wait(30),
            7: lambda cluster, tables: hub.cut(1),
        }

    assert same(played(ahead, at), undisturbed)


def test_bits_hold_when_another_trainer_changes_rows_and_a_head_is_lost() -> None:
    hub, names = MemoryHub(), server_names(2)

    def go(trainer: int, steps: int, ahead: int, cuts: bool) -> Callable[[], list[float]]:
        def trained() -> list[float]:
            cluster = ps.connect(names, trainers=2, backups=1)
            model = Model(cluster)
            optimizer, losses = ps.Optimizer(cluster, model), []
            given = batches(trainer, steps)
            for batch in ps.prefetch(given, model, ids=lambda batch: batch, ahead=ahead):
                if cuts and len(losses) == 4:
                    hub.cut(0)
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            cluster.finish()
            return losses

        return trained

    wanted = train([go(0, STEPS, 1, False), go(1, 7, 1, False)], servers=2)
    with local_group(*names, "trainer0", "trainer1", hub=hub) as agents:
        assert run(agents[2:], [go(0, STEPS, 3, True), go(1, 7, 4, False)]) == wanted


def test_a_loop_that_goes_on_after_a_roll_back_is_told_once_and_has_the_rows_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)
    hub, names = MemoryHub(), server_names(2)

    def go() -> int:
        cluster = ps.connect(names)
        model, rolled_back = Model(cluster), 0
        words = model.tables[-1].name
        optimizer = ps.Optimizer(cluster, model)
        given = batches()
        for step, batch in enumerate(ps.prefetch(given, model, ids=lambda b: b, ahead=3)):
            if step == 3:
                cluster.snapshot(tmp_path / "one").wait(30)
            if step == 5:
                hub.cut(1)
            unique, places = batch["words"].unique(return_inverse=True)
            try:
                now = cluster.exchange(None, PullRequest({words: unique})).wait().tables[words]
                found = model.words(batch["words"])
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            except ps.RolledBack:
                rolled_back += 1
            else:
                assert torch.equal(found, now[places])
        return rolled_back

    with local_group(*names, "trainer0", hub=hub) as agents:
        assert run(agents[-1:], [go]) == [1]


# --- what travels


Rows = set[tuple[str, int]]


@contextmanager
def _noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Rows], list[Rows]]]:
    """The rows that answers bring: those to steps, and those to pulls beside steps."""
    with_steps: list[Rows] = []
    beside: list[Rows] = []
    read = ShardState.read

    def noted(state: ShardState, ask: messages.Ask, time: int) -> Any:
        answer = read(state, ask, time)
        if ask.known:
            brought: Rows = set()
            for rows, changed in zip(ask.tables, answer[2], strict=True):
                there = np.unpackbits(changed.which.numpy(), count=len(rows.ids)).astype(bool)
                names = np.repeat(rows.tables, rows.sizes)[there].tolist()
                brought |= set(zip(names, rows.ids.numpy()[there].tolist(), strict=True))
            (beside if ask.trainer < 0 else with_steps).append(brought)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ShardState, "read", noted)
        yield with_steps, beside


def _rows_of(batch: Batch) -> Rows:
    bags = batch["bags"]
    named = [("one", bags["a"]), ("two", bags["b"]), ("one", bags["c"]), ("three", batch["words"])]
    return {(name, each) for name, ids in named for each in ids.reshape(-1).tolist()}


@AHEAD
def test_an_answer_to_a_step_brings_only_what_the_step_has_changed(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = [_rows_of(batch) for batch in batches()]
    with _noted(monkeypatch) as (with_steps, beside):
        played(ahead, servers=1)
    assert len(with_steps) == STEPS  # the first batch's, and one for each step but the last
    assert len(beside) == STEPS - 2
    for step in range(1, STEPS - 1):
        assert with_steps[step + 1] == wants[step] & wants[step + 1]
    for step in range(ahead - 1, STEPS - ahead):
        kept = set().union(*wants[step : step + ahead])
        fresh = wants[step + ahead] - kept
        trained = set().union(*wants[step + 2 - ahead : step + 1])
        assert beside[step] == fresh | (wants[step + 2] & trained - wants[step + 1])


def test_a_step_is_sent_before_the_answer_beside_the_last_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    send, send_aside, wait_aside = Stepper.send, Stepper.send_aside, Stepper.wait_aside

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            done.append(name)
            return function(*args, **how)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "send", noted("step", send))
        patch.setattr(Stepper, "send_aside", noted("aside", send_aside))
        patch.setattr(Stepper, "wait_aside", noted("answer", wait_aside))
        played(2, servers=1)
    steps = " ".join(done)
    assert steps.startswith("step step aside step aside answer step aside answer ")
    assert done.count("answer") == done.count("aside") == STEPS - 2


def test_rows_that_nobody_wants_any_more_are_forgotten() -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        table = cluster.table("t", 2, ps.SGD(lr=0.1))
        module = ps.Embedding(table)
        optimizer = ps.Optimizer(cluster, module)
        given = [torch.arange(10 * step, 10 * step + 10) for step in range(20)]
        for ids in ps.prefetch(given, module, ids=lambda ids: ids, ahead=3):
            module(ids).sum().backward()
            optimizer.step()
            window = cluster.rows.ahead
            assert window is not None
            assert len(window) <= 40
        assert cluster.rows.ahead is None

    train([go])


def test_a_loop_that_is_left_early_leaves_nothing_behind() -> None:
    def go() -> tuple[int, list[float]]:
        cluster = ps.connect(server_names(1))
        model = Model(cluster)
        optimizer = ps.Optimizer(cluster, model)
        losses = []
        for begin in (0, 3, 6):
            given = batches()[begin:]
            for step, batch in enumerate(ps.prefetch(given, model, ids=_ids_for(model), ahead=4)):
                if step == 3:
                    break
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return cluster.session.open_pulls, losses

    ((left, losses),) = train([go])
    assert left == 0
    assert losses == played(1, servers=1)[0][:9]


# --- what is refused


@pytest.mark.parametrize(
    ("consistency", "options", "ahead", "kind", "wanted"),
    [
        (ps.SSP(1), {}, 2, ValueError, r"ahead=2 keeps the bits of ps.BSP\(\), and this cluster"),
        (ps.BSP(), {"cache": ps.Cache(9, 1)}, 3, ValueError, "'one' has cache=Cache"),
        (ps.BSP(), {}, 0, ValueError, "ahead=0 must be at least 1"),
        (ps.BSP(), {}, 1.5, TypeError, "ahead=1.5 is a float, not a whole number"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    consistency: Any, options: Any, ahead: Any, kind: type[Exception], wanted: str
) -> None:
    def go() -> None:
        model = Model(ps.connect(server_names(1), consistency=consistency), **options)
        with pytest.raises(kind, match=wanted):
            ps.prefetch(batches(), model, ids=lambda batch: batch, ahead=ahead)

    train([go])
