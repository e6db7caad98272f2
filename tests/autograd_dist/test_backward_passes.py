"""Many passes of many contexts at once, between workers whose messages overtake each other.

Each worker has its own table of contexts and of passes; requests travel as the bytes
that the wire carries. Nothing runs by itself: whoever waits for a pass delivers what is
under way, in an order that the seed chooses.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from autograd_dist.backward_passes import BackwardPasses, Driver, sendable
from autograd_dist.contexts import ContextTable
from autograd_dist.errors import BackwardError, UnknownContextError
from autograd_dist.grad_fields import GradFields
from autograd_dist.local_engine import LocalPass
from autograd_dist.passes import Ack, Gradients, PassId, Settle, Survey
from autograd_dist.wire import PassMessage, decode_message, encode_ack
from rpc.errors import RpcError
from rpc.extensions import Answer
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import Answered
from rpc.worker_info import WorkerInfo
from tests.loading import load

graphs = load(Path(__file__).parent, "test_random_graphs")
CONTEXT = graphs.CONTEXT
DONE = encode_ack(Ack())


class Worker:
    """A worker as far as its passes need it, and the passes."""

    def __init__(self, number: int, network: Network) -> None:
        self.info = WorkerInfo(f"w{number}", number)
        self.network = network
        self.wait, self.wake = network.wait, network.wake
        self.contexts = ContextTable(number)
        self.passes = BackwardPasses(self, self.contexts, GradFields())  # type: ignore[arg-type]
        self.unreachable: set[int] = set()

    def future(self, description: str) -> Future[object]:
        return Future(description=description, waiter=self.network.wait)

    def run_soon(self, work: Callable[[], None]) -> None:
        self.network.under_way.append(work)

    def ask(
        self,
        to: int,
        name: str,
        body: bytes,
        tensors: list[torch.Tensor],
        answered: Answered,
        awaited: bool,
    ) -> None:
        if to in self.unreachable:
            raise RuntimeError(f"there is no way to {to}")
        answer: Future[Answer] = Future()
        message = decode_message(body)
        assert isinstance(message, PassMessage)
        answer.add_done_callback(lambda done: tell(done, answered))
        self.network.send(Message(self.info.id, to, message, list(tensors), answer))


def tell(answer: Future[Answer], answered: Answered) -> None:
    try:
        value = answer.value()
    except Exception as error:
        answered(None, error)
    else:
        answered(value, None)


@dataclass(eq=False)
class Message:
    source: int
    to: int
    message: PassMessage
    tensors: list[torch.Tensor]
    answer: Future[Answer]


class Network:
    def __init__(self, seed: int, size: int) -> None:
        self.rng = random.Random(seed)
        self.under_way: list[Callable[[], None]] = []
        self.sent: list[Message] = []
        self.steps = 0
        self.workers = [Worker(number, self) for number in range(size)]

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.under_way.append(lambda: self.deliver(message))

    def deliver(self, message: Message) -> None:
        passes = self.workers[message.to].passes
        reply = passes.request_arrived(message.source, message.message, message.tensors)
        if isinstance(reply, Future):
            reply.add_done_callback(
                lambda done: self.under_way.append(lambda: message.answer.set_result(done.value()))
            )
        else:
            self.under_way.append(lambda: message.answer.set_result(reply))

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        while not done():
            assert self.under_way, "the pass waits, but nothing is under way"
            self.step()

    def wake(self) -> None:
        """Does nothing: who waits looks after every step anyway."""

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 20_000, "the pass goes round for ever"
        self.under_way.pop(self.rng.randrange(len(self.under_way)))()

    def settle(self) -> None:
        while self.under_way:
            self.step()


def made(seed: int) -> tuple[object, list[object], Network]:
    """A random graph, its roots at worker 0, and workers whose contexts have recorded it."""
    builder = graphs.Builder(seed)
    roots = builder.build()
    network = Network(seed, len(builder.workers))
    for worker, recorded in zip(network.workers, builder.workers, strict=True):
        context = worker.contexts.join(CONTEXT)
        assert context is not None
        context.sends = recorded.sends.copy
        for other in recorded.known:
            context.add_worker(other)
    return builder, roots, network


def check_passes(seed: int) -> None:
    """Passes one after the other, each with single-process torch's gradients."""
    builder, roots, network = made(seed)
    root = network.workers[0]
    count = builder.rng.choice([1, 2, 3])
    late: list[Message] = []
    for number in range(1, count + 1):
        retain = number < count
        torch.autograd.backward([r.plain for r in roots], retain_graph=retain)
        root.passes.run(CONTEXT, [r.here for r in roots], retain)
        assert not network.under_way
        assert root.passes.running() == 0
        check_ids(network, number, retain)
        check_late(network, late)
        late = builder.rng.sample(network.sent, min(3, len(network.sent)))
        network.sent.clear()
    check_gradients(builder, network)
    for worker in network.workers:
        worker.passes.drop(CONTEXT, "the context is over")
        assert not worker.passes._passes


def check_ids(network: Network, number: int, retain: bool) -> None:
    """Checks that what was sent belongs to the pass, the only one of its root that is not over."""
    for sent in network.sent:
        message = sent.message
        assert message.pass_id == PassId(CONTEXT, 0, number)
        assert message.retain_graph is retain
        assert message.oldest == number
        if isinstance(message.request, Gradients):
            assert sum(message.present) == len(sent.tensors)
    for worker in network.workers[1:]:
        known = worker.passes._passes.get(CONTEXT)
        assert known is None or len(known.drivers) <= 1, "kept passes that are over"


def check_late(network: Network, late: list[Message]) -> None:
    """A request of a pass that is over is acknowledged, and begins nothing."""
    reached = {sent.to for sent in network.sent}
    for message in late:
        if message.to == 0 or message.to in reached:
            worker = network.workers[message.to]
            reply = worker.passes.request_arrived(message.source, message.message, message.tensors)
            assert reply == DONE
    assert not network.under_way


def check_gradients(builder: object, network: Network) -> None:
    for position, param in enumerate(builder.params):  # type: ignore[attr-defined]
        context = network.workers[param.home].contexts.find(CONTEXT)
        actual = context.leaves.snapshot().get(param.here)
        assert (actual is None) == (param.plain.grad is None), f"param {position}"
        if actual is not None:
            torch.testing.assert_close(actual.to_dense(), param.plain.grad)


@pytest.mark.parametrize("block", range(4))
def test_gradients_equal_single_process_torch(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        try:
            check_passes(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_passes({seed})") from error


def spread_out(first: int = 0) -> tuple[list[object], Network]:
    """A graph whose pass needs other workers."""
    for seed in range(first, first + 100):
        _, roots, network = made(seed)
        if any(worker.contexts.find(CONTEXT).sends() for worker in network.workers[1:]):
            return roots, network
    raise AssertionError("there is none")


def begin(roots: list[object], network: Network, steps: int) -> BackwardError | Exception | None:
    """Runs a pass; after some steps ``network.under_way`` gets what ``network.then`` does."""
    try:
        network.workers[0].passes.run(CONTEXT, [r.here for r in roots], False)  # type: ignore[attr-defined]
    except Exception as error:
        return error
    return None


class Interrupted(Network):
    """Does something after some steps."""

    left = 0

    def then(self, steps: int, act: Callable[[], None]) -> None:
        self.left, self.act = steps, act

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()
        else:
            super().step()


def interrupted(steps: int, act: Callable[[Network], None]) -> tuple[Exception | None, Network]:
    roots, network = spread_out()
    network.__class__ = Interrupted
    network.then(steps, lambda: act(network))  # type: ignore[attr-defined]
    return begin(roots, network, steps), network


def check_interrupted(seed: int) -> None:
    """A pass in the midst of which something ends it: nobody waits for ever, all is forgotten."""
    draw = random.Random(seed)
    _, roots, network = made(seed)
    network.__class__ = Interrupted
    happens = draw.choice((ends_at_its_root, ends_elsewhere, root_is_lost))
    network.then(draw.randint(1, 12), lambda: happens(network, draw))  # type: ignore[attr-defined]
    error = begin(roots, network, 0)
    assert error is None or isinstance(error, BackwardError)
    assert network.workers[0].passes.running() == 0
    network.settle()
    for worker in network.workers:
        worker.contexts.release(CONTEXT)
        worker.passes.drop(CONTEXT, "the context is over")
        assert not worker.passes._passes
    network.settle()
    assert all(sent.answer.done() for sent in network.sent), "somebody is never answered"
    count = len(network.sent)
    for sent in network.sent[:5]:
        reply = network.workers[sent.to].passes.request_arrived(
            sent.source, sent.message, sent.tensors
        )
        assert reply == DONE
    assert len(network.sent) == count


def ends_at_its_root(network: Network, draw: random.Random) -> None:
    network.workers[0].contexts.release(CONTEXT)
    network.workers[0].passes.drop(CONTEXT, RpcError("it was released"))
    assert network.workers[0].passes.running() == 0


def ends_elsewhere(network: Network, draw: random.Random) -> None:
    for worker in draw.sample(network.workers[1:], draw.randint(1, len(network.workers) - 1)):
        worker.contexts.release(CONTEXT)
        worker.passes.drop(CONTEXT, RpcError("it was released"))


def root_is_lost(network: Network, draw: random.Random) -> None:
    """Its own pass still goes on; the others' have nothing to do with it any more."""
    for worker in network.workers[1:]:
        worker.contexts.release(CONTEXT)
        worker.passes.root_lost(0)
        known = worker.passes._passes.get(CONTEXT)
        assert known is None or not known.drivers


@pytest.mark.parametrize("block", range(4))
def test_a_pass_that_is_interrupted_leaves_nothing_behind(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        try:
            check_interrupted(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_interrupted({seed})") from error


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_context_that_ends_ends_its_passes(steps: int) -> None:
    error, network = interrupted(
        steps, lambda network: network.workers[0].passes.drop(CONTEXT, RpcError("it was released"))
    )
    assert isinstance(error, BackwardError)
    assert "Error on Node 0: it was released" in str(error)
    network.settle()
    assert network.workers[0].passes.running() == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_pass_ends_when_other_workers_give_its_context_up(steps: int) -> None:
    def drop(network: Network) -> None:
        for worker in network.workers[1:]:
            worker.contexts.release(CONTEXT)
            worker.passes.drop(CONTEXT, RpcError("it was released"))

    _, network = interrupted(steps, drop)
    network.settle()
    assert network.workers[0].passes.running() == 0
    assert not any(worker.passes._passes for worker in network.workers[1:])


def test_workers_forget_the_passes_of_a_root_that_is_lost() -> None:
    _, network = spread_out()
    other = network.workers[1]
    for root in (0, 2):
        message = PassMessage(PassId(CONTEXT, root, 1), 1, Survey(1))
        other.passes.request_arrived(0, message, [])
    other.passes.root_lost(0)
    assert [p.root for p in other.passes._passes[CONTEXT].drivers] == [2]


def test_what_a_lost_root_waited_for_is_acknowledged() -> None:
    network = Network(0, 3)
    other = network.workers[1]
    context = other.contexts.join(CONTEXT)
    assert context is not None
    context.add_worker(2)
    message = PassMessage(PassId(CONTEXT, 0, 1), 1, Survey(1))
    token = other.passes.request_arrived(0, message, [])
    assert isinstance(token, Future)
    assert not token.done()
    other.passes.root_lost(0)
    assert token.value() == DONE


def waiting_request(worker: Worker, root: int, number: int, oldest: int) -> Future[Answer]:
    """A request of a pass that waits for what it caused at worker 2."""
    message = PassMessage(PassId(CONTEXT, root, number), oldest, Survey(1))
    token = worker.passes.request_arrived(0, message, [])
    assert isinstance(token, Future)
    return token


def test_a_pass_that_is_over_for_its_root_lets_go_of_who_waits_and_no_other_does() -> None:
    worker = Network(0, 4).workers[1]
    context = worker.contexts.join(CONTEXT)
    assert context is not None
    context.add_worker(2)
    over = waiting_request(worker, root=0, number=1, oldest=1)
    of_another_root = waiting_request(worker, root=3, number=1, oldest=1)
    following = waiting_request(worker, root=0, number=2, oldest=2)
    assert over.value() == DONE
    assert not of_another_root.done()
    assert not following.done()


def test_requests_name_the_oldest_pass_of_their_root_that_is_not_over() -> None:
    network = Network(0, 3)
    passes = network.workers[1].passes
    context = passes._contexts.join(CONTEXT)
    assert context is not None

    def made_here(root: int, number: int) -> Driver:
        pass_id = PassId(CONTEXT, root, number)
        return passes._make_driver(context, pass_id, False, lambda error: None)

    def oldest_told(driver: Driver) -> int:
        passes.send(driver, 2, Survey(1), None)
        return network.sent[-1].message.oldest

    own = [made_here(1, number) for number in (4, 5)]
    for driver in own:
        passes._begin(driver)
    assert [oldest_told(each) for each in own] == [4, 4]
    passes._end(own[0])
    assert oldest_told(own[1]) == 5
    passes.request_arrived(0, PassMessage(PassId(CONTEXT, 0, 9), 7, Survey(1)), [])
    assert oldest_told(made_here(0, 9)) == 7


def test_a_late_request_of_its_own_pass_begins_nothing_at_the_root() -> None:
    passes = Network(0, 2).workers[0].passes
    message = PassMessage(PassId(CONTEXT, 0, 1), 1, Survey(1))
    assert passes.request_arrived(0, message, []) == DONE
    assert not passes._passes[CONTEXT].drivers


def test_a_pass_lets_go_of_the_graph_with_its_context() -> None:
    passes = Network(0, 2).workers[1].passes
    passes.request_arrived(0, PassMessage(PassId(CONTEXT, 0, 1), 1, Survey(1)), [])
    (driver,) = passes._passes[CONTEXT].drivers.values()
    (local,) = [weakref.ref(each) for each in gc.get_referents(driver) if type(each) is LocalPass]
    passes.drop(CONTEXT, RpcError("it was released"))
    assert local() is None


def test_one_that_cannot_be_reached_fails_the_pass_and_is_named() -> None:
    roots, network = spread_out()
    network.workers[0].unreachable = {1, 2, 3}
    error = begin(roots, network, 0)
    assert isinstance(error, BackwardError)
    assert "Error on Node 0: gradients for worker" in str(error)
    assert "cannot be sent: there is no way to" in str(error)


def test_an_answer_that_is_an_error_fails_the_pass() -> None:
    def fail(network: Network) -> None:
        network.under_way.clear()
        network.sent[0].answer.set_exception(RuntimeError("worker 1 was lost"))

    error, _ = interrupted(1, fail)
    assert isinstance(error, BackwardError)
    assert "Error on Node 0: worker 1 was lost" in str(error)


def test_a_context_that_is_not_there_is_told() -> None:
    network = Network(0, 1)
    with pytest.raises(UnknownContextError):
        network.workers[0].passes.run(99, [], False)
    assert network.workers[0].passes.running() == 0


def test_a_pass_of_a_context_that_ends_as_it_begins_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, roots, network = made(1)
    passes = network.workers[0].passes
    make_driver = passes._make_driver

    def release_and_make(*args: object) -> object:
        driver = make_driver(*args)  # type: ignore[arg-type]
        network.workers[0].contexts.release(CONTEXT)
        passes.drop(CONTEXT, RpcError("it was released"))
        return driver

    monkeypatch.setattr(passes, "_make_driver", release_and_make)
    with pytest.raises(UnknownContextError):
        passes.run(CONTEXT, [root.here for root in roots], False)
    assert not passes._passes


def test_a_request_for_a_context_that_was_released_begins_nothing() -> None:
    worker = Network(0, 2).workers[1]
    worker.contexts.release(CONTEXT)
    message = PassMessage(PassId(CONTEXT, 0, 1), 1, Settle(1))
    assert worker.passes.request_arrived(0, message, []) == DONE
    assert not worker.passes._passes


def test_a_request_of_an_older_pass_begins_nothing_and_of_the_oldest_does() -> None:
    worker = Network(0, 2).workers[1]
    worker.passes.request_arrived(0, PassMessage(PassId(CONTEXT, 0, 5), 5, Settle(1)), [])
    for number, begins in ((4, False), (5, True), (6, True)):
        worker.passes.request_arrived(0, PassMessage(PassId(CONTEXT, 0, number), 3, Settle(1)), [])
        assert (PassId(CONTEXT, 0, number) in worker.passes._passes[CONTEXT].drivers) is begins


def test_it_is_running_while_it_runs() -> None:
    counts: list[int] = []
    error, network = interrupted(
        1, lambda network: counts.append(network.workers[0].passes.running())
    )
    assert error is None
    assert (counts, network.workers[0].passes.running()) == ([1], 0)


class OnDevice:
    """A tensor on a device that this machine may lack."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cpu = self.device.type == "cpu"

    def cpu(self) -> str:
        return f"from {self.device}"


def test_gradients_without_a_way_of_their_own_go_through_host_memory() -> None:
    host, mapped, other = OnDevice("cpu"), OnDevice("cuda:1"), OnDevice("cuda:0")
    device_map = {torch.device("cuda:1"): torch.device("cuda:0")}
    gradients: list[object] = [host, mapped, other]
    assert sendable(gradients, device_map) == [host, mapped, "from cuda:0"]  # type: ignore[arg-type]
