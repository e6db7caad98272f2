"""The things that are measured: one row of the table each, written once for both libraries.

A row prepares an operation in the process that will run it; the operation is
then called over and over. Rank 1 is the one that is called; the others call it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import floors
from benchmarks.bindings import Api, load, worker

Operation = Callable[[], object]

PEER_RANK = 1
_PEER = worker(PEER_RANK)
_KILOBYTE = 1024
_MEGABYTE = 1024 * 1024
_CALLS_IN_FLIGHT = 1000
_REPORTS_IN_FLIGHT = 22  # as many as the main job sends in an epoch
_BATCH_SIZE = 32
_TRAINERS = 2  # of the main job
_OF_OPTIMIZERS = ("torch._dynamo",)  # which the first optimizer of a process imports
_OF_MAIN_JOB = (*_OF_OPTIMIZERS, "sklearn.datasets")
_LEARNING_RATE = 1e-4  # the rows that step an optimizer do so a million times


class Measure(enum.Enum):
    """The number that a row shows."""

    TIME = "time of one"
    RATE = "per second"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        key: chooses the row on the command line.
        title: names it in the table.
        prepare: called once in each calling process, with that process's number from 0.
        measure: whether the time of an operation or their number per second is shown.
        callers: how many processes run the operation at the same time.
        units: how many of what is counted one operation does.
        large: whether most of the time goes into moving bytes.
        raw: whether the row measures the machine, without any library.
        modules: which it needs, and which take long to import.
    """

    key: str
    title: str
    prepare: Callable[[Api, int], Operation]
    measure: Measure = Measure.TIME
    callers: int = 1
    units: int = 1
    large: bool = False
    raw: bool = False
    modules: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """The number of processes that the row needs."""
        return 1 if self.raw else self.callers + 1


def do_nothing() -> None:
    """Runs at the peer."""


def echo(value: Any) -> Any:
    """Runs at the peer."""
    return value


def add(left: Tensor, right: Tensor) -> Tensor:
    """Runs at the peer."""
    return left + right


def parameter_references(library: str, module: Any) -> list[Any]:
    """Runs at the peer, the owner of ``module``."""
    return [load(library).reference(weight) for weight in module.local_value().parameters()]


@functools.cache
def main_job_server(library: str) -> Any:
    """Runs at the peer; returns a reference to the one server of the main job."""
    from tutorials.digits.train import ParameterServer

    return load(library).reference(ParameterServer(_main_job_settings()))


def _empty(api: Api, _caller: int) -> Operation:
    return lambda: api.rpc_sync(_PEER, do_nothing)


def _small_tensors(api: Api, _caller: int) -> Operation:
    left, right = torch.ones(4), torch.ones(4)
    return lambda: api.rpc_sync(_PEER, add, args=(left, right))


def _echo(size: int) -> Callable[[Api, int], Operation]:
    def prepare(api: Api, _caller: int) -> Operation:
        value = torch.ones(size, dtype=torch.uint8)
        return lambda: api.rpc_sync(_PEER, echo, args=(value,))

    return prepare


def _many_calls(api: Api, _caller: int) -> Operation:
    def operation() -> None:
        calls = [api.rpc_async(_PEER, do_nothing) for _ in range(_CALLS_IN_FLIGHT)]
        torch.futures.wait_all(calls)

    return operation


def _remote_and_fetch(api: Api, _caller: int) -> Operation:
    return lambda: api.remote(_PEER, echo, args=(1,)).to_here()


def _forward_backward(of_the_inputs: bool) -> Callable[[Api, int], Operation]:
    def prepare(api: Api, _caller: int) -> Operation:
        module = api.remote(_PEER, nn.Linear, args=(64, 64))
        inputs = torch.ones(_BATCH_SIZE, 64, requires_grad=of_the_inputs)

        def operation() -> None:
            with api.context() as context:
                api.backward(context, [module.rpc_sync().forward(inputs).sum()])

        return operation

    return prepare


def _stepping(
    take_step: Callable[[Api, Any, int, list[Tensor]], None],
) -> Callable[[Api, int], Operation]:
    def prepare(api: Api, _caller: int) -> Operation:
        module = api.remote(_PEER, nn.Linear, args=(64, 64))
        inputs = torch.ones(_BATCH_SIZE, 64)
        weights = api.rpc_sync(_PEER, parameter_references, args=(api.library, module))
        optimizer = api.optimizer(torch.optim.SGD, weights, lr=_LEARNING_RATE)

        def operation() -> None:
            with api.context() as context:
                take_step(api, optimizer, context, [module.rpc_sync().forward(inputs).sum()])

        return operation

    return prepare


def _backward_then_step(api: Api, optimizer: Any, context: int, losses: list[Tensor]) -> None:
    api.backward(context, losses)
    optimizer.step(context)


def _backward_and_step(api: Api, optimizer: Any, context: int, losses: list[Tensor]) -> None:
    api.backward_and_step(optimizer, context, losses)


def _main_job(api: Api, caller: int) -> Operation:
    from tutorials.digits.digits import load as load_digits
    from tutorials.digits.train import Trainer

    settings = _main_job_settings()
    training, _ = load_digits(settings.seed)
    shard = training.shard(caller, _TRAINERS)
    server = api.rpc_sync(_PEER, main_job_server, args=(api.library,))
    trainer = Trainer(server, settings.learning_rate)
    name = f"trainer:{caller}"
    images, labels = shard.images[:_BATCH_SIZE], shard.labels[:_BATCH_SIZE]
    reports: list[Any] = []

    def operation() -> None:
        loss = trainer.step(images, labels)
        reports.append(server.rpc_async().report(name, loss, _BATCH_SIZE))
        if len(reports) == _REPORTS_IN_FLIGHT:
            torch.futures.wait_all(reports)
            reports.clear()

    return operation


def _main_job_alone(_api: Api, _caller: int) -> Operation:
    """One trainer's step with everything in this process and no call at all."""
    from tutorials.digits.digits import load as load_digits
    from tutorials.digits.digits import network

    settings = _main_job_settings()
    training, _ = load_digits(settings.seed)
    images, labels = training.images[:_BATCH_SIZE], training.labels[:_BATCH_SIZE]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)

    def operation() -> None:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return operation


def _main_job_settings() -> Any:
    from tutorials.digits.train import Settings

    return Settings(epochs=1, batch_size=_BATCH_SIZE, learning_rate=_LEARNING_RATE, seed=0)


def _raw(prepare: Callable[[], Operation]) -> Callable[[Api, int], Operation]:
    return lambda _api, _caller: prepare()


CALLERS = (1, 2, 4, 8, 16)
"""The numbers of callers that the rows ``callers1`` and so on have."""


def _with_callers(count: int) -> Row:
    plural = "s" if count > 1 else ""
    return Row(
        f"callers{count}",
        f"empty calls, {count} caller{plural}",
        _empty,
        Measure.RATE,
        callers=count,
    )


_ROWS = (
    Row("empty", "empty call", _empty),
    Row("small", "call with two 16-byte tensors", _small_tensors),
    Row("echo1k", "echo of 1 KB", _echo(_KILOBYTE)),
    Row("echo64k", "echo of 64 KB", _echo(64 * _KILOBYTE)),
    Row("echo1m", "echo of 1 MB", _echo(_MEGABYTE), large=True),
    Row("echo16m", "echo of 16 MB", _echo(16 * _MEGABYTE), large=True),
    Row("echo64m", "echo of 64 MB", _echo(64 * _MEGABYTE), large=True),
    Row("async", "asynchronous calls", _many_calls, Measure.RATE, units=_CALLS_IN_FLIGHT),
    Row("remote", "remote + to_here", _remote_and_fetch),
    Row("autograd", "autograd forward + backward", _forward_backward(of_the_inputs=False)),
    Row("back", "... + gradient of the input", _forward_backward(of_the_inputs=True)),
    Row(
        "optimizer",
        "... + optimizer step",
        _stepping(_backward_then_step),
        modules=_OF_OPTIMIZERS,
    ),
    Row(
        "fused",
        "... with backward_and_step",
        _stepping(_backward_and_step),
        modules=_OF_OPTIMIZERS,
    ),
    Row(
        "job",
        "main job, steps of 2 trainers",
        _main_job,
        Measure.RATE,
        callers=_TRAINERS,
        modules=_OF_MAIN_JOB,
    ),
    *(_with_callers(count) for count in CALLERS),
    Row("unix", "raw Unix socket ping-pong", _raw(floors.unix_ping_pong), raw=True),
    Row("tcp", "raw TCP ping-pong", _raw(floors.tcp_ping_pong), raw=True),
    Row("copy64m", "copy of 64 MB, warm", _raw(floors.warm_copy), raw=True),
    Row("metrics", "rpc.metrics() counting a call", _raw(floors.counting), raw=True),
    Row(
        "alone",
        "main job, one step without RPC",
        _main_job_alone,
        raw=True,
        modules=_OF_MAIN_JOB,
    ),
)

ROWS = {row.key: row for row in _ROWS}
DEFAULT_ROWS = tuple(key for key in ROWS if not key.startswith("callers"))
