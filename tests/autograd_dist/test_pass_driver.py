"""A pass ends whatever a worker's share of it raises, and its caller learns why."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import autograd_dist
import rpc
from autograd_dist import backward_passes
from autograd_dist.backward_passes import BackwardPasses
from autograd_dist.local_engine import DeliverGradients
from autograd_dist.pass_driver import PassDriver
from autograd_dist.passes import PassId
from autograd_dist.recv_node import Origin
from rpc.agent import Agent, AgentOptions
from rpc.current import current_agent
from rpc.testing import VirtualClock, as_worker, local_group
from tests import waiting

SECONDS = 10.0


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there is no text")


class FacelessError(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("there is no class")


class HalfLostError(rpc.WorkerLostError):
    def __init__(self) -> None:
        RuntimeError.__init__(self, "half a loss")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "boom": lambda: ValueError("boom"),
    "KeyError": KeyError,
    r"no file \udc80": lambda: ValueError("no file \udc80"),
    "MuteError whose text raises RuntimeError": MuteError,
    "SystemExit: 3": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "no face": lambda: FacelessError("no face"),
    "half a loss": HalfLostError,
    "worker 'x' (incarnation -1) was lost: y": lambda: rpc.WorkerLostError("x", -1, "y"),
    "worker None (incarnation None) was lost: z": lambda: rpc.WorkerLostError(None, None, "z"),  # type: ignore[arg-type]
}


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    with local_group("alice", "bob", "carol") as group, as_worker(group[0]):
        yield group


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def failing(x: torch.Tensor, text: str) -> torch.Tensor:
    def fail(_: torch.Tensor) -> None:
        raise ERRORS[text]()

    y = x * 2
    y.register_hook(fail)
    return y * 1


def failing_at(worker: str, x: torch.Tensor, text: str) -> torch.Tensor:
    return rpc.rpc_sync(worker, failing, (x, text)) * 2


def at_the_root(x: torch.Tensor, text: str) -> torch.Tensor:
    return failing(rpc.rpc_sync("bob", doubled, (x,)), text)


def at_the_root_in_a_later_wave(x: torch.Tensor, text: str) -> torch.Tensor:
    held = failing(x, text)
    rpc.rpc_sync("bob", doubled, (held,))  # unused, so what it holds back runs later
    return rpc.rpc_sync("bob", doubled, (x,)) + held


def elsewhere(x: torch.Tensor, text: str) -> torch.Tensor:
    return rpc.rpc_sync("bob", failing, (x, text))


def behind_another_worker(x: torch.Tensor, text: str) -> torch.Tensor:
    return rpc.rpc_sync("bob", failing_at, ("carol", x, text))


def failing_before(worker: str, x: torch.Tensor, text: str) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(worker, doubled, (failing(x, text),))
    return result


def before_another_worker(x: torch.Tensor, text: str) -> torch.Tensor:
    return rpc.rpc_sync("bob", failing_before, ("carol", x, text))


Forward = Callable[[torch.Tensor, str], torch.Tensor]


def outcome(forward: Forward, text: str) -> BaseException | None:
    """The error that a pass raises, if any; it must end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with autograd_dist.context() as context_id:
                loss = forward(torch.ones(2, requires_grad=True), text).sum()
                autograd_dist.backward(context_id, [loss])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the pass does not end"
    return raised[0] if raised else None


@pytest.mark.parametrize("text", ERRORS)
@pytest.mark.parametrize(
    ("forward", "node"),
    [(elsewhere, 1), (behind_another_worker, 2), (before_another_worker, 1)],
    ids=["there", "behind", "before"],
)
def test_what_a_hook_raises_elsewhere_comes_to_the_root(
    group: list[Agent], forward: Forward, node: int, text: str
) -> None:
    error = outcome(forward, text)
    assert isinstance(error, autograd_dist.BackwardError)
    assert str(error).startswith(f"Error on Node {node}: ")
    assert text in str(error)


@pytest.mark.parametrize("text", ["boom", "MuteError whose text raises RuntimeError"])
@pytest.mark.parametrize("forward", [at_the_root, at_the_root_in_a_later_wave])
def test_what_a_hook_raises_at_the_root_is_the_cause(
    group: list[Agent], forward: Forward, text: str
) -> None:
    error = outcome(forward, text)
    assert isinstance(error, autograd_dist.BackwardError)
    assert text in str(error)
    assert type(error.__cause__) is type(ERRORS[text]())


@pytest.mark.parametrize("text", ["SystemExit: 3", "CancelledError"])
@pytest.mark.parametrize("forward", [at_the_root, at_the_root_in_a_later_wave])
def test_what_is_no_exception_leaves_the_root_as_it_is(
    group: list[Agent], forward: Forward, text: str
) -> None:
    assert type(outcome(forward, text)) is type(ERRORS[text]())


def through_all(x: torch.Tensor, _: str) -> torch.Tensor:
    """Of a graph whose pass is made of messages of every kind."""
    return rpc.rpc_sync("bob", with_unused, (x,)) + rpc.rpc_sync("bob", doubled_at, ("carol", x))


def with_unused(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    rpc.rpc_sync("carol", doubled_at, ("alice", y))  # unused, so y is held back
    return rpc.rpc_sync("carol", doubled, (x,)) + y


def doubled_at(worker: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(worker, doubled, (x,))
    return result


@pytest.mark.parametrize("kind", [MemoryError, SystemExit])
@pytest.mark.parametrize("part", ["gather", "encode_request", "encode_ack"])
def test_a_pass_ends_whichever_message_cannot_be_put_together(
    group: list[Agent], monkeypatch: pytest.MonkeyPatch, part: str, kind: type[BaseException]
) -> None:
    put_together: Callable[..., Any] = getattr(backward_passes, part)
    failing, numbers = 0, itertools.count(1)

    def run_short(*args: Any) -> Any:
        if next(numbers) == failing:
            raise kind("no memory for a message")
        return put_together(*args)

    monkeypatch.setattr(backward_passes, part, run_short)
    while next(numbers) > failing:
        failing, numbers = failing + 1, itertools.count(1)
        error = outcome(through_all, "")
        waiting.until(lambda: all(agent.caller.quiet() for agent in group), SECONDS)
        assert error is None or "no memory for a message" in str(error)
        assert (error is None) == (next(numbers) <= failing)
    assert failing > 3


def drivers() -> int:
    return sum(type(each) is PassDriver for each in gc.get_objects())


@pytest.mark.parametrize("forward", [elsewhere, at_the_root, at_the_root_in_a_later_wave])
def test_a_pass_that_failed_is_not_left_to_the_garbage_collector(
    group: list[Agent], forward: Forward
) -> None:
    gc.collect()
    others = drivers()
    gc.disable()
    try:
        with autograd_dist.context() as context_id:
            loss = forward(torch.ones(2, requires_grad=True), "boom").sum()
            with pytest.raises(autograd_dist.BackwardError, match="boom"):
                autograd_dist.backward(context_id, [loss])
        waiting.until(lambda: drivers() <= others, SECONDS)
    finally:
        gc.enable()


def test_a_gradient_comes_back_with_the_acknowledgement_to_who_waits(
    group: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = BackwardPasses.send
    monkeypatch.setattr(
        BackwardPasses, "send", lambda self, *rest: (sent.append(self._me), send(self, *rest))[1]
    )
    threads: list[int] = []
    x = torch.ones(3, requires_grad=True)
    with autograd_dist.context() as context:
        y = x.exp()
        y.register_hook(lambda _: threads.append(threading.get_ident()))
        loss = rpc.rpc_sync("bob", torch.square, (y,)).sum()
        autograd_dist.backward(context, [loss])
        gradient = autograd_dist.get_gradients(context)[x]
    torch.testing.assert_close(gradient, 2 * (2 * torch.ones(3)).exp())
    assert threads == [threading.get_ident()]
    assert sent == [0]


def test_gradients_on_other_devices_do_not_wait_for_the_acknowledgement() -> None:
    waits: list[bool] = []

    class Decides:
        def gradients_ready(self, origin: object, payload: object, *, may_wait: bool) -> list[Any]:
            waits.append(may_wait)
            return []

    def make_local(deliver: DeliverGradients) -> Any:
        for device, is_last in (("cpu", True), ("meta", True), ("cpu", False)):
            deliver(Origin(0, 1, 2), [None, torch.ones(2, device=device)], is_last)

    PassDriver(PassId(1, 0, 1), 1, Decides(), make_local, None, print, retain_graph=False)  # type: ignore[arg-type, var-annotated]
    assert waits == [True, False, False]


class Slow:
    """A worker's hook that takes until it is let go."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.started.set()
        assert self.go_on.wait(SECONDS)


def held(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(current_agent().slow)  # type: ignore[attr-defined]
    return y


def be_slow() -> None:
    assert current_agent().slow.go_on.wait(SECONDS)  # type: ignore[attr-defined]


def test_a_pass_has_no_time_limit_of_its_own() -> None:
    clock, slow = VirtualClock(), Slow()
    options = AgentOptions(rpc_timeout=1.0)

    def let_time_pass(call: rpc.Future[None]) -> None:
        assert slow.started.wait(SECONDS)
        clock.advance(1000.0)
        waiting.until(call.done, SECONDS)
        slow.go_on.set()

    with local_group("alice", "bob", clock=clock, options=options) as group, as_worker(group[0]):
        group[1].slow = slow  # type: ignore[attr-defined]
        x = torch.ones(2, requires_grad=True)
        with autograd_dist.context() as context_id:
            loss = rpc.rpc_sync("bob", held, (x,)).sum()
            call = rpc.rpc_async("bob", be_slow)
            thread = threading.Thread(target=let_time_pass, args=(call,))
            thread.start()
            autograd_dist.backward(context_id, [loss])
            thread.join()
            assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
        with pytest.raises(rpc.RpcTimeoutError):
            call.wait()
