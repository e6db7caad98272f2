"""Backward passes and optimizer steps that involve a worker which freezes or dies."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import autograd_dist
import rpc
from autograd_dist.contexts import entered
from optim_dist import DistributedOptimizer
from rpc.agent import Agent, AgentOptions
from rpc.testing import MemoryHub, as_worker, connect
from rpc.transports.base import Peer
from tests.virtual_time import SteadyClock
from tests.waiting import until

SECONDS = 20.0
BOUND = 5.0


class Group:
    """Alice, bob and carol, who watch each other."""

    def __init__(self) -> None:
        self.clock = SteadyClock()
        self.hub = MemoryHub(self.clock)
        options = AgentOptions(rpc_timeout=0, liveness_timeout=BOUND)
        self.agents = connect(
            "alice", "bob", "carol", hub=self.hub, clock=self.clock, options=options
        )

    def step(self) -> None:
        """Moves time by as much as matters; handlers that wait for the frozen do not end."""
        self.clock.step(0.1, self.agents, lambda: 100)

    def error_of(self, work: Callable[[], object]) -> tuple[str, float]:
        """The error that ``work`` raises as alice, and how long it took while time passes."""
        outcome: list[str] = []

        def run() -> None:
            with as_worker(self.agents[0]):
                try:
                    work()
                except RuntimeError as error:
                    outcome.append(str(error))
                else:
                    outcome.append("no error")

        thread = threading.Thread(target=run)
        start = self.clock.now()
        thread.start()
        until(lambda: not thread.is_alive(), SECONDS, meanwhile=self.step)
        return outcome[0], self.clock.now() - start


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    with as_worker(made.agents[0]):
        yield made
    for agent in made.agents:
        agent.shutdown(graceful=False)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def square_at(name: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(name, square, (x,))
    return result + 1


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


def contexts(agent: Agent) -> object:
    return agent.debug_info().get("num_autograd_contexts", 0)


def test_a_pass_that_needs_a_frozen_worker_fails_and_the_next_context_works(group: Group) -> None:
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("bob", square_at, ("carol", leaf()))
        group.hub.freeze(2)
        message, seconds = group.error_of(lambda: autograd_dist.backward(context_id, [y.sum()]))
    assert "'carol'" in message
    assert "no sign of life" in message
    assert seconds < 2 * BOUND

    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("bob", square, (x,))
        autograd_dist.backward(context_id, [y.sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


def test_the_contexts_of_a_frozen_worker_are_dropped_everywhere(group: Group) -> None:
    alice, bob, carol = group.agents
    with as_worker(carol):
        context = autograd_dist.context()
        context.__enter__()
        for name in ("alice", "bob"):
            rpc.rpc_sync(name, square, (leaf(),))
    assert [contexts(alice), contexts(bob)] == [1, 1]
    group.hub.freeze(2)
    until(
        lambda: [contexts(alice), contexts(bob)] == [0, 0],
        SECONDS,
        meanwhile=group.step,
    )
    with as_worker(carol):
        context.__exit__()


@pytest.mark.parametrize("ended", ["before the loss", "after the loss"])
def test_who_was_led_into_a_context_by_a_lost_worker_learns_of_its_end(
    group: Group, ended: str
) -> None:
    alice, _, carol = group.agents
    context = autograd_dist.context()
    context.__enter__()
    rpc.rpc_sync("bob", square_at, ("carol", leaf()))
    until(lambda: contexts(carol) == 1, SECONDS)
    group.hub.freeze(1)
    if ended == "before the loss":
        context.__exit__()
    until(lambda: not carol.group.lives("bob"), SECONDS, meanwhile=group.step)
    if ended == "after the loss":
        until(lambda: not alice.group.lives("bob"), SECONDS, meanwhile=group.step)
        group.step()
        assert contexts(carol) == 1
        context.__exit__()
    until(lambda: contexts(carol) == 0, SECONDS, meanwhile=group.step)
    assert contexts(alice) == 0


def extension_of(agent: Agent) -> Any:
    return agent.extensions.load("autograd_dist")


def out_of_memory(*_: object) -> None:
    raise MemoryError("no memory for it")


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


def test_a_worker_that_does_not_take_the_end_of_a_context_is_named_in_the_log(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extension_of(group.agents[1]), "release", out_of_memory)
    with autograd_dist.context() as context_id:
        rpc.rpc_sync("bob", square, (leaf(),))
    until(lambda: bool(errors_in(caplog)), SECONDS)
    assert errors_in(caplog) == [f"worker 1 may keep contexts that are over: [{context_id}]"]
    assert "no memory for it" in caplog.text


def test_a_worker_that_does_not_say_which_contexts_are_over_is_named_in_the_log(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alice, _, carol = group.agents
    monkeypatch.setattr(extension_of(alice).contexts, "find", out_of_memory)
    with autograd_dist.context():
        rpc.rpc_sync("bob", square_at, ("carol", leaf()))
        group.hub.cut(1)
        until(lambda: not carol.group.lives("bob"), SECONDS)
        until(lambda: bool(errors_in(caplog)), SECONDS)
    assert errors_in(caplog) == ["worker 0 does not say which of its contexts are over"]
    assert "no memory for it" in caplog.text


def test_one_that_cannot_be_asked_which_contexts_are_over_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = MemoryHub()
    agents = alice, _, carol, dave = connect("alice", "bob", "carol", "dave", hub=hub)
    send = carol.messages.send

    def send_but_to_alice(to: int, *rest: Any, **more: Any) -> Any:
        return out_of_memory() if to == 0 else send(to, *rest, **more)

    monkeypatch.setattr(carol.messages, "send", send_but_to_alice)
    open_contexts = []
    for creator in (alice, dave):
        with as_worker(creator):
            open_contexts.append(autograd_dist.context())
            contextvars.copy_context().run(begin_at_carol, open_contexts[-1])
    hub.cut(1)
    until(lambda: "worker 0 is not asked which of its contexts are over" in caplog.text, SECONDS)
    open_contexts[1].__exit__()
    until(lambda: contexts(carol) == 1, SECONDS)
    for agent in agents:
        agent.shutdown(graceful=False)


def begin_at_carol(context: autograd_dist.context) -> None:
    context.__enter__()
    rpc.rpc_sync("bob", square_at, ("carol", leaf()))


def begun_by_the_lost_carol(group: Group) -> int:
    """A context whose creator bob takes for lost, and that nobody else has heard of."""
    _, bob, carol = group.agents
    with as_worker(carol), autograd_dist.context() as context_id:
        group.hub.freeze(2)
        until(lambda: not bob.group.lives("carol"), SECONDS, meanwhile=group.step)
    return context_id


def test_a_call_in_a_context_of_a_lost_worker_is_refused_rather_than_left_out_of_it(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """She may live, and would miss its gradients."""
    context_id = begun_by_the_lost_carol(group)
    table = group.agents[0].extensions.load("autograd_dist").contexts  # type: ignore[attr-defined]
    monkeypatch.setattr(table, "lives", lambda _: True)  # alice has not heard of it
    assert table.join(context_id) is not None
    with entered(context_id), pytest.raises(rpc.WorkerLostError, match="'carol'"):
        rpc.rpc_sync("bob", square, (leaf(),))


def test_a_late_mention_does_not_bring_a_context_of_a_lost_worker_into_being(
    group: Group,
) -> None:
    context_id = begun_by_the_lost_carol(group)
    table = group.agents[1].extensions.load("autograd_dist").contexts  # type: ignore[attr-defined]
    in_her_next_life = context_id + (1 << 32)
    assert table.join(context_id) is None
    assert table.join(in_her_next_life) is not None


PARAMETERS: dict[str, torch.nn.Parameter] = {}


def parameter(name: str) -> rpc.RRef[torch.nn.Parameter]:
    PARAMETERS[name] = torch.nn.Parameter(torch.ones(2))
    return rpc.RRef(PARAMETERS[name])


def scaled(name: str, x: torch.Tensor) -> torch.Tensor:
    return PARAMETERS[name] * x


def test_a_step_that_needs_a_frozen_worker_fails_and_the_next_works(group: Group) -> None:
    owned = {name: rpc.rpc_sync(name, parameter, (name,)) for name in ("bob", "carol")}
    both = DistributedOptimizer(torch.optim.SGD, list(owned.values()), lr=0.5)
    with autograd_dist.context() as context_id:
        loss = sum(rpc.rpc_sync(name, scaled, (name, torch.ones(2))).sum() for name in owned)
        autograd_dist.backward(context_id, [loss])
        group.hub.freeze(2)
        message, seconds = group.error_of(lambda: both.step(context_id))
    assert "'carol'" in message
    assert seconds < 2 * BOUND

    left = DistributedOptimizer(torch.optim.SGD, [owned["bob"]], lr=0.5)
    before = PARAMETERS["bob"].tolist()
    with autograd_dist.context() as context_id:
        loss = rpc.rpc_sync("bob", scaled, ("bob", torch.ones(2))).sum()
        autograd_dist.backward(context_id, [loss])
        left.step(context_id)
    assert PARAMETERS["bob"].tolist() == [value - 0.5 for value in before]
    PARAMETERS.clear()


def train_once(name: str) -> list[float]:
    """A pass and a step in a context of the calling worker's own; returns the parameter."""
    owned = rpc.rpc_sync(name, parameter, (name,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [owned], lr=0.5)
    with autograd_dist.context() as context_id:
        loss = rpc.rpc_sync(name, scaled, (name, torch.ones(2))).sum()
        autograd_dist.backward(context_id, [loss])
        optimizer.step(context_id)
    return PARAMETERS[name].tolist()


def test_contexts_of_a_worker_that_returned_are_not_taken_for_its_earlier_ones() -> None:
    hub = MemoryHub()
    options = AgentOptions(rpc_timeout=0)
    alice, bob = connect("alice", "bob", hub=hub, options=options)
    with as_worker(alice):
        assert train_once("bob") == [0.5, 0.5]
        until(lambda: contexts(bob) == 0, SECONDS)  # it heard that the context is over
    known = alice.group.peer(1)
    alice.shutdown(graceful=False)
    again = Agent(alice.info, 1, hub.transport(), options)
    peers = [Peer(again.info, 1, again.start()), known]
    again.join(peers)
    bob.add_peer(peers[0])
    with as_worker(again):
        assert train_once("bob") == [0.5, 0.5]
    for agent in (again, bob):
        agent.shutdown(graceful=False)


def multiply(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def test_the_gradients_of_a_lost_life_do_not_go_to_its_successor() -> None:
    hub = MemoryHub()
    options = AgentOptions(rpc_timeout=0)
    alice, bob = connect("alice", "bob", hub=hub, options=options)
    again = Agent(bob.info, 1, hub.transport(), options)
    with as_worker(alice), autograd_dist.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        of_the_lost = rpc.rpc_sync("bob", multiply, (x, 3.0))
        bob.shutdown(graceful=False)
        peers = [alice.group.peer(0), Peer(again.info, 1, again.start())]
        again.join(peers)
        alice.add_peer(peers[1])
        of_the_successor = rpc.rpc_sync("bob", multiply, (x, 5.0))
        with pytest.raises(autograd_dist.BackwardError, match="never sent from here"):
            autograd_dist.backward(context_id, [of_the_lost.sum()])
        autograd_dist.backward(context_id, [of_the_successor.sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [5.0, 5.0]
    for agent in (alice, again):
        agent.shutdown(graceful=False)


_computing, _may_return = threading.Event(), threading.Event()


def multiply_when_told(x: torch.Tensor, factor: float) -> torch.Tensor:
    _computing.set()
    assert _may_return.wait(SECONDS)
    return x * factor


def test_a_result_that_a_worker_sends_as_it_shuts_down_is_not_cut_off_from_its_graph() -> None:
    _computing.clear()
    _may_return.clear()
    alice, bob = connect("alice", "bob")
    with as_worker(alice), autograd_dist.context():
        future = rpc.rpc_async("bob", multiply_when_told, (torch.ones(2, requires_grad=True), 3.0))
        assert _computing.wait(SECONDS)
        bob.extensions.load("autograd_dist").close()  # as a shutdown begins
        _may_return.set()
        with pytest.raises(RuntimeError, match="this worker shut down"):
            future.wait()
    for agent in (alice, bob):
        agent.shutdown(graceful=False)


def test_a_worker_that_shuts_down_does_not_acknowledge_gradients_that_it_drops() -> None:
    alice, bob = connect("alice", "bob")
    with as_worker(alice), autograd_dist.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("bob", multiply, (x, 3.0)).sum()
        bob.extensions.load("autograd_dist").close()  # as a shutdown begins
        with pytest.raises(autograd_dist.BackwardError, match="this worker shut down"):
            autograd_dist.backward(context_id, [loss])
    for agent in (alice, bob):
        agent.shutdown(graceful=False)
