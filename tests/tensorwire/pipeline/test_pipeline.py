"""A pipeline computes what one process would, bit for bit, whatever the schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc.testing import MemoryHub
from rpc.transports.tensorwire import TensorWireTransport, requests
from tensorwire.pipeline import Pipeline, ScheduleError, StageFailedError, Table
from tests.tensorwire.pipeline.reference import (
    Reference,
    given,
    gradients,
    group,
    place,
    require_equal_gradients,
)

_WIDTH = 6


class _First(nn.Module):
    """Embeds tokens; also returns what later stages skip to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, _WIDTH)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embedding(tokens)
        return embedded, embedded.sin()


class _Middle(nn.Module):
    """Takes the stage before, and what skips to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *skipped: torch.Tensor) -> torch.Tensor:
        for each in skipped:
            x = x * 0.5 + each
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, 11)

    def forward(self, x: torch.Tensor, *skipped: torch.Tensor) -> torch.Tensor:
        return self.head(x + sum(skipped)).flatten(0, 1)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


def _model(stages: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(stages)
    if stages == 1:
        return [nn.Sequential(nn.Embedding(11, _WIDTH), _Middle(), _Last()).to(dtype)]
    return [each.to(dtype) for each in (_First(), *(_Middle() for _ in range(stages - 2)), _Last())]


def _skips(stages: int) -> dict[int, list[Any]]:
    """Every later stage takes what the first returns to skip to, the last also stage 1."""
    skips: dict[int, list[Any]] = {1: [(0, 0)]} if stages > 1 else {}
    for stage in range(2, stages):
        skips[stage] = [stage - 1, (0, 1)]
    if stages > 3:
        skips[stages - 1] = [stages - 2, (0, 1), 1]
    return skips


def _tokens(lengths: list[int], rows: int = 2) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xs = [torch.randint(0, 11, (rows, length)) for length in lengths]
    return xs, [torch.randint(0, 11, (rows, length)) for length in lengths]


_PLACES = {
    "gpipe": ["a", "ab", "abc", "abcd"],
    "1f1b": ["a", "ab", "abc", "abcd"],
    "zb-h1": ["a", "ab", "abc", "abcd"],
    "looped_bfs": ["a", "ab", "aaa", "abab"],
    "interleaved": ["a", "aa", "abc", "abab"],
    "zbv": ["aa", "abba"],
}
"""For each schedule, the workers of the stages of some pipelines."""


@pytest.mark.parametrize("schedule", _PLACES)
def test_losses_and_gradients_are_those_of_one_process_bit_for_bit(schedule: str) -> None:
    xs, ys = _tokens([5, 3, 8, 1, 2, 9])
    with group("a", "b", "c", "d"):
        for places in _PLACES[schedule]:
            stages = len(places)
            for dtype in (torch.float64, torch.float32):
                modules = _model(stages, dtype)
                pipe = Pipeline(place(modules, places), schedule, 6, _loss, inputs=_skips(stages))
                reference = Reference(modules, _loss, _skips(stages))
                for step in range(2):
                    loss = pipe.train_step(xs, target=ys)
                    assert torch.equal(loss, reference.train_step(pipe.table(), xs, ys, step))
                    require_equal_gradients(pipe, modules)
                pipe.close()


def test_stages_can_be_anywhere_whatever_the_schedule_expects() -> None:
    xs, ys = _tokens([5, 3, 8, 1])
    modules = _model(4)
    with group("a", "b"):
        for places in ("aaaa", "aabb", "abba", ["driver", "a", "b", "driver"]):
            pipe = Pipeline(place(modules, places), "1f1b", 4, _loss, inputs=_skips(4))
            loss = pipe.train_step(xs, target=ys)
            reference = Reference(modules, _loss, _skips(4))
            for module in modules:
                module.zero_grad()
            assert torch.equal(loss, reference.train_step(pipe.table(), xs, ys))
            require_equal_gradients(pipe, modules)


def test_evaluation_gives_what_one_process_gives() -> None:
    xs, _ = _tokens([5, 3, 8, 1])
    modules = _model(3)
    reference = Reference(modules, _loss, _skips(3))
    with group("a", "b", "c"), torch.no_grad():
        pipe = Pipeline(place(modules, "abc"), microbatches=2, inputs=_skips(3))
        outputs = pipe.eval_step(xs)
        for x, output in zip(xs, outputs, strict=True):
            assert torch.equal(output, reference.forward((x,), {}, 0, 0))
        whole = pipe.eval_step(torch.cat([xs[0], xs[0]]))
        assert torch.equal(whole, torch.cat([outputs[0], outputs[0]]))


def test_1f1b_holds_as_many_microbatches_as_there_are_stages_ahead() -> None:
    modules = _model(4)
    xs, ys = _tokens([2] * 8)
    with group("a", "b", "c", "d"):
        pipe = Pipeline(place(modules, "abcd"), "1f1b", 8, _loss, inputs=_skips(4))
        pipe.train_step(xs, target=ys)
        assert pipe.most_held == {0: 4, 1: 3, 2: 2, 3: 1}
        pipe = Pipeline(place(modules, "abcd"), "gpipe", 8, _loss, inputs=_skips(4))
        pipe.train_step(xs, target=ys)
        assert pipe.most_held == {0: 8, 1: 8, 2: 8, 3: 8}


def test_a_batch_is_split_and_its_rows_count_alike() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 2)]
    x, y = torch.rand(7, 3), torch.rand(7, 2)
    with group("a", "b"):
        pipe = Pipeline(place(modules, "ab"), "gpipe", 3, nn.MSELoss())
        loss = pipe.train_step(x, target=y)
        reference = Reference(modules, nn.MSELoss())
        xs, ys = x.tensor_split(3), y.tensor_split(3)
        assert torch.equal(loss, reference.train_step(pipe.table(), xs, ys))
        require_equal_gradients(pipe, modules)
        whole = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
        assert torch.allclose(loss, whole)
        with pytest.raises(ValueError, match=r"shape \(2, 3\) has too few rows for count=3"):
            pipe.train_step(x[:2], target=y[:2])


def test_a_table_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0F1,0F2,0B1,0B0,0B2\n1F0,1F1,1B1,1B0,1F2,1B2\n")
    modules = _model(2)
    xs, ys = _tokens([4, 4, 4])
    with group("a", "b"):
        pipe = Pipeline(place(modules, "ab"), path, 3, _loss, inputs=_skips(2))
        assert str(pipe.table()) == path.read_text()
        loss = pipe.train_step(xs, target=ys)
        reference = Reference(modules, _loss, _skips(2))
        assert torch.equal(loss, reference.train_step(pipe.table(), xs, ys))
        require_equal_gradients(pipe, modules)
        with pytest.raises(ScheduleError, match="the table is for 3 micro-batches, not 2"):
            pipe.train_step(xs[:2], target=ys[:2])
        with pytest.raises(ScheduleError, match="comes to a halt"):
            Pipeline(place(modules, "ab"), Table.parse("0B0,0F0\n1F0,1B0\n"), 1, _loss,
                     inputs=_skips(2))  # fmt: skip


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, note: Any = None) -> Any:
        return {"x": self.linear(x) * mask}, ("note", mask.sum())


class _Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, values: dict[str, torch.Tensor], note: tuple[str, torch.Tensor]) -> Any:
        assert note[0] == "note"
        return self.linear(values["x"]) + note[1]


def test_stages_exchange_dicts_plain_values_and_arguments_of_the_step() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), _Masked(), _Unpacks()]
    inputs = {1: [0, "mask"]}
    x, y, mask = torch.rand(4, 3), torch.rand(4, 2), torch.randint(0, 2, (4, 1)).bool()
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), "1f1b", 2, nn.MSELoss(), inputs=inputs)
        loss = pipe.train_step(x, target=y, mask=mask)
        reference = Reference(modules, nn.MSELoss(), inputs)
        masks = [{"mask": each} for each in mask.chunk(2)]
        expected = reference.train_step(pipe.table(), x.chunk(2), y.chunk(2), keywords=masks)
        assert torch.equal(loss, expected)
        require_equal_gradients(pipe, modules)
        with pytest.raises(ValueError, match=r"take the keyword arguments \['mask'\].* got \[\]"):
            pipe.train_step(x, target=y)


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    modules = _model(3)
    tie = [[(0, "embedding.weight"), (2, "head.weight")]]
    xs, ys = _tokens([3, 5])
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), "1f1b", 2, _loss, inputs=_skips(3), tied=tie)
        modules[2].head.weight.data.copy_(modules[0].embedding.weight)  # type: ignore[union-attr, operator, arg-type]
        for step in range(2):
            pipe.train_step(xs, target=ys)
            reference = Reference(modules, _loss, _skips(3))
            reference.train_step(pipe.table(), xs, ys, step)
        first, last = modules[0].embedding.weight, modules[2].head.weight  # type: ignore[union-attr]
        # Each step's uses were summed separately, and so must be here: 2 (a + b) = (a+b) + (a+b).
        total = first.grad / 2 + last.grad / 2  # type: ignore[operator]
        first.grad = last.grad = total + total  # type: ignore[union-attr, assignment]
        require_equal_gradients(pipe, modules)
        with pytest.raises(ValueError, match="stage 1 has no parameter 'x'"):
            Pipeline(
                place(modules, "abc"), "1f1b", 2, _loss, tied=[[(0, "embedding.weight"), (1, "x")]]
            )


def test_replicas_of_a_stage_deal_out_the_microbatches() -> None:
    modules = _model(3)
    xs, ys = _tokens([3, 5, 2, 4])
    first, middle, last = modules
    other = _Middle().double()
    with group("a", "b", "c", "d"):
        (a,), (b, d), (c,) = place([first], "a"), place([middle, other], "bd"), place([last], "c")
        pipe = Pipeline([a, [b, d], c], "1f1b", 4, _loss, inputs=_skips(3))
        loss = pipe.train_step(xs, target=ys)
        # Each replica adds up its own micro-batches, then both sums are added.
        table = pipe.table()
        reference = Reference(modules, _loss, _skips(3))
        assert torch.equal(loss, reference.train_step(table, xs, ys))
        found = [gradients(each) for each in (b, d)]
        for one, two, expected in zip(*found, middle.parameters(), strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)
            assert torch.allclose(one, expected.grad)  # type: ignore[arg-type]
        assert pipe.workers == ["a", "b", "d", "c"]
        assert {action.microbatch for action in table.rows[2]} == {1, 3}


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputed_stages_draw_the_same_random_numbers_again(schedule: str) -> None:
    modules: list[nn.Module] = [_Drops(), _Drops(), _Drops()]
    x, y = torch.rand(8, _WIDTH), torch.rand(8, _WIDTH)
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), schedule, 4, nn.MSELoss(), recompute=True, seed=5)
        reference = Reference(modules, nn.MSELoss(), seed=5)
        for step in range(2):
            loss = pipe.train_step(x, target=y)
            expected = reference.train_step(pipe.table(), x.chunk(4), y.chunk(4), step)
            assert torch.equal(loss, expected)
            require_equal_gradients(pipe, modules)


def test_recomputed_stages_keep_their_random_state_without_a_seed() -> None:
    stage = _Drops()
    with group("a"):
        pipe = Pipeline(place([stage], "a"), "gpipe", 2, nn.MSELoss(), recompute=[0])
        pipe.train_step(torch.ones(4, _WIDTH), target=torch.zeros(4, _WIDTH))
        found = gradients(pipe.stages[0])
        # An output that was dropped has no loss, so its row of weights gets no gradient.
        assert found[1] is not None
        torch.manual_seed(0)
        before = torch.get_rng_state()
        pipe.train_step(torch.ones(4, _WIDTH), target=torch.zeros(4, _WIDTH))
        torch.set_rng_state(before)
        masks = [nn.functional.dropout(torch.ones(2, _WIDTH), 0.5) for _ in range(2)]
        kept = torch.stack(masks).sum((0, 1)) > 0
        step = [now for now in gradients(pipe.stages[0]) if now is not None]
        assert ((step[1] - found[1]) != 0).equal(kept)


def test_a_scale_multiplies_the_gradients_and_not_the_loss() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 2)]
    x, y = torch.rand(4, 3), torch.rand(4, 2)
    with group("a", "b"):
        pipe = Pipeline(place(modules, "ab"), "gpipe", 2, nn.MSELoss())
        first = pipe.train_step(x, target=y)
        plain = gradients(pipe.stages[0])
        second = pipe.train_step(x, target=y, scale=4.0)
        assert torch.equal(first, second)
        for one, five in zip(plain, gradients(pipe.stages[0]), strict=True):
            assert torch.allclose(5 * one, five)  # type: ignore[operator, arg-type]


def test_letters_arrive_at_once_while_a_stage_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TICK_SECONDS", 1e4)  # a transport notices a wait after a while
    modules = [nn.Linear(3, 4), nn.Linear(4, 2)]
    x, y = torch.rand(8, 3), torch.rand(8, 2)
    with group("a", "b", transport=TensorWireTransport):
        pipe = Pipeline(place(modules, ["a", "b"]), "1f1b", 4, nn.MSELoss())
        assert pipe.train_step(x, target=y) > 0.0
        pipe.close()


def test_a_stream_yields_every_batch_in_order() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), nn.Dropout(0.9), nn.Linear(3, 2)]
    batches = [torch.rand(n % 4 + 1, 3) for n in range(15)]
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"))
        expected = nn.Sequential(*modules).eval()
        for batch, output in zip(batches, pipe.stream(iter(batches)), strict=True):
            assert torch.equal(output, expected(batch))
        unfinished = pipe.stream(batches)
        next(unfinished)
        unfinished.close()
        assert torch.equal(pipe.eval_step(batches[3]), expected(batches[3]))
        with pytest.raises(ValueError, match="trains only with a loss"):
            pipe.train_step(batches[0], target=batches[0])


class _FailsAt(nn.Module):
    """Raises an error in the call with a number."""

    def __init__(self, call: int, backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.call, self.backward = 0, call, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self.linear(x)
        if self.calls == self.call:
            if not self.backward:
                raise ValueError("the user's own error")
            output.register_hook(self._fail)
        return output

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("the user's own error")


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_of_a_stage_names_it_and_leaves_gradients_as_they_were(backward: bool) -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), _FailsAt(7, backward), nn.Linear(3, 2)]
    x, y = torch.rand(8, 3), torch.rand(8, 2)
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), "1f1b", 4, nn.MSELoss())
        pipe.train_step(x, target=y)
        before = [gradients(each) for each in pipe.stages]
        with pytest.raises(StageFailedError, match="stage 1 on worker 'b'") as caught:
            pipe.train_step(x, target=y)
        assert (caught.value.stage, caught.value.worker, caught.value.microbatch) == (1, "b", 2)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "in _fail" in str(caught.value.__cause__.__cause__) or "in forward" in str(
            caught.value.__cause__.__cause__
        )
        for stage, wanted in zip(pipe.stages, before, strict=True):
            assert all(map(torch.equal, gradients(stage), wanted))
        pipe.train_step(x, target=y)
        for stage, wanted in zip(pipe.stages, before, strict=True):
            for now, once in zip(gradients(stage), wanted, strict=True):
                assert torch.allclose(now, 2 * once)  # type: ignore[operator, arg-type]


class _Dies(nn.Module):
    """Cuts its worker off in the call with a number."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.calls, self.call = 0, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call:
            _KILL.pop()()
        return x * 2


_KILL: list[Any] = []


def test_a_lost_worker_ends_the_step_with_an_error_that_names_it() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), _Dies(3), nn.Linear(3, 2)]
    x, y = torch.rand(8, 3), torch.rand(8, 2)
    hub = MemoryHub()
    _KILL.append(lambda: hub.cut(2))
    with group("a", "b", "c", hub=hub):
        pipe = Pipeline(place(modules, "abc"), "gpipe", 4, nn.MSELoss())
        with pytest.raises(StageFailedError, match="stage 1 on worker 'b' failed") as caught:
            pipe.train_step(x, target=y)
        assert (caught.value.stage, caught.value.worker, caught.value.microbatch) == (1, "b", 2)
        assert isinstance(caught.value.__cause__, rpc.WorkerLostError)


def test_arguments_that_cannot_be_right_are_named() -> None:
    with group("a"):
        stage = RemoteModule("a", given, (nn.Linear(3, 3),))
        for arguments, error, message in [
            ({"schedule": "2f2b"}, ValueError, "schedule='2f2b' is none of 'forward', 'gpipe'"),
            ({"schedule": 3}, TypeError, "schedule=3 is a int"),
            ({"microbatches": 0}, ValueError, "microbatches=0 must be a positive integer"),
            ({"microbatches": True}, ValueError, "microbatches=True must be a positive integer"),
            ({"seed": -1}, ValueError, "seed=-1 must be at least 0"),
            ({"wait_for_return": 5}, ValueError, "wait_for_return=5 needs backups=1"),
            ({"stages": []}, ValueError, "a pipeline needs a stage"),
            ({"stages": [nn.Linear(1, 1)]}, TypeError, "a stage is a RemoteModule"),
            ({"loss": "mse"}, TypeError, "loss='mse' is a str, not a function"),
            ({"loss": nn.MSELoss(reduction="none")}, ValueError, "has reduction='none'"),
            ({"reduction": "sum"}, ValueError, "reduction='sum', but loss=MSELoss.* has 'mean'"),
            ({"reduction": "max"}, ValueError, "reduction='max' must be 'mean' or 'sum'"),
            ({"loss": None, "reduction": "sum"}, ValueError, "reduction='sum' needs loss="),
        ]:  # fmt: skip
            with pytest.raises(error, match=message):
                Pipeline(**{"stages": [stage], "loss": nn.MSELoss(), **arguments})  # type: ignore[arg-type]
        pipe, x = Pipeline([stage], loss=nn.MSELoss()), torch.ones(2, 3)
        with pytest.raises(ValueError, match="argument 0 of the step requires a gradient"):
            pipe.train_step([(x.requires_grad_(),)], target=[x.detach()])
        with pytest.raises(ValueError, match="target of the step requires a gradient"):
            pipe.train_step([x.detach()], target=[x])


class _Adds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0)


_IN_PLACE: dict[str, nn.Module] = {
    "relu": nn.ReLU(inplace=True),
    "add": _Adds(),
    "dropout": nn.Dropout(0.5, inplace=True),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", _IN_PLACE)
def test_a_stage_may_begin_by_changing_its_input_in_place(
    kind: str, schedule: str, recompute: bool
) -> None:
    modules: list[nn.Module] = [
        nn.Sequential(_IN_PLACE[kind], nn.Linear(3, _WIDTH)),
        nn.Sequential(_IN_PLACE[kind], nn.Linear(_WIDTH, _WIDTH)),
        nn.Sequential(_IN_PLACE[kind], nn.Linear(_WIDTH, 2)),
    ]
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    with group("a", "b", "c"):
        for places in ("abc", "aab", ["driver"] * 3):
            for module in modules:
                module.zero_grad()
            pipe = Pipeline(
                place(modules, places), schedule, 4, nn.MSELoss(), recompute=recompute, seed=3
            )
            loss = pipe.train_step(x.clone(), target=y)
            reference = Reference(modules, nn.MSELoss(), seed=3)
            xs = [each.clone() for each in x.chunk(4)]
            assert torch.equal(loss, reference.train_step(pipe.table(), xs, y.chunk(4)))
            require_equal_gradients(pipe, modules)
            pipe.close()


def test_a_consumer_that_changes_its_input_hides_that_from_the_others_of_its_worker() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), _Adds(), nn.Bilinear(3, 3, 2)]
    inputs: dict[int, list[Any]] = {2: [1, 0]}
    x, y = torch.rand(4, 3), torch.rand(4, 2)
    losses = []
    with group("a", "b", "c"):
        for places in ("abc", "aaa", "aab"):
            pipe = Pipeline(place(modules, places), "1f1b", 2, nn.MSELoss(), inputs=inputs)
            losses.append((pipe.train_step(x, target=y), pipe.eval_step(x)))
            pipe.close()
    hidden = modules[0](x)
    assert torch.allclose(losses[0][1], modules[2](hidden + 1, hidden))
    for other in losses[1:]:
        assert all(map(torch.equal, losses[0], other))


def test_what_an_earlier_stage_needs_for_its_backward_pass_may_not_be_changed() -> None:
    """Torch says the same where the two are layers of one process."""
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()), _Adds()]
    with group("a"):
        pipe = Pipeline(place(modules, "aa"), "1f1b", 2, nn.MSELoss())
        with pytest.raises(StageFailedError, match="modified by an inplace operation"):
            pipe.train_step(torch.rand(4, 3), target=torch.rand(4, 3))


_SUMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "module": (nn.CrossEntropyLoss(reduction="sum"), {}),
    "partial": (partial(nn.functional.cross_entropy, reduction="sum"), {}),
    "function": (
        lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum"),
        {"reduction": "sum"},
    ),
}


@pytest.mark.parametrize("kind", _SUMS)
def test_losses_that_add_rows_up_are_added_up(kind: str) -> None:
    loss, options = _SUMS[kind]
    modules: list[nn.Module] = [nn.Linear(3, 5), nn.Linear(5, 4)]
    x, y = torch.rand(7, 3), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    whole = loss(nn.Sequential(*modules)(x), y)
    whole.backward()
    with group("a", "b"):
        pipe = Pipeline(place(modules, "ab"), "gpipe", 3, loss, **options)
        assert torch.allclose(pipe.train_step(x, target=y), whole)
        for stage, module in zip(pipe.stages, modules, strict=True):
            for found, parameter in zip(gradients(stage), module.parameters(), strict=True):
                assert found is not None
                assert torch.allclose(found, parameter.grad, atol=1e-5)  # type: ignore[arg-type]


def _summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def _unreduced_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target, reduction="none")


def test_a_loss_that_is_no_mean_and_says_nothing_is_refused_in_the_first_step() -> None:
    x = torch.rand(8, 3)
    with group("a"):
        for loss, message in [
            (_summed_loss, "adds up the losses of rows.* say reduction='sum'"),
            (_unreduced_loss, r"returned shape \(4, 3\), not one number"),
            (lambda output, target: 1.0, "returned a float, not a tensor"),
        ]:
            pipe = Pipeline(place([nn.Linear(3, 3)], "a"), "gpipe", 2, loss)
            with pytest.raises(StageFailedError, match=message):
                pipe.train_step(x, target=x)
            assert gradients(pipe.stages[0]) == [None, None]
        pipe = Pipeline(place([nn.Linear(3, 3)], "a"), "gpipe", 2, _summed_loss, reduction="mean")
        assert pipe.train_step(x, target=x) > 0
