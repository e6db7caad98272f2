"""Runs one worker's part of a pipeline: its row of each step's table, action by action.

There is no conductor. A worker takes what an action needs from its inbox, does it, and posts
the result to the workers that need it; the driver only says that a step begins and hears when
it is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rpc
from rpc import extend
from tensorwire.pipeline import letters
from tensorwire.pipeline.actions import Action, Kind
from tensorwire.pipeline.arrival import copied
from tensorwire.pipeline.backups.copies import Draft, StageCopy
from tensorwire.pipeline.backups.keeping import Cut, Keepers
from tensorwire.pipeline.backups.places import Seat
from tensorwire.pipeline.errors import StepAbortedError
from tensorwire.pipeline.facts import StepTimes, sender_of
from tensorwire.pipeline.inbox import Inbox
from tensorwire.pipeline.letters import STEP, Address, Content
from tensorwire.pipeline.placement import owner_of
from tensorwire.pipeline.plan import Plan, Progress, Rows, Sharing, Span, StepOrder, StepReport
from tensorwire.pipeline.shared_gradients import StepGradients, average_over_ddp, total
from tensorwire.pipeline.split_backward import Gradients
from tensorwire.pipeline.stage import LOSS, Packet, Stage
from tensorwire.pipeline.trees import map_tensors

CHANNEL: Final = "tensorwire.pipeline/letters"
_NEVER: Final = 2**62
_SECONDS_TO_UNWIND: Final = 5.0
"""Seconds to wait for others; less than the driver waits for an answer."""


class Outbox:
    """Brings letters to the workers of one pipeline.

    Args:
        plan: of the pipeline.
        me: the worker that sends.
        seek: finds what has an inbox on this worker.
    """

    def __init__(
        self, plan: Plan, me: extend.Worker, seek: Callable[[str], StageWorker | None]
    ) -> None:
        self.name = me.info.name
        self._plan = plan
        self._me = me
        self._seek = seek

    def count_step(self) -> None:
        """Tells whoever watches the job that this worker went on by a step."""
        self._me.progress.count()

    def let_letters_in(self) -> None:
        """Has letters arrive at once while the running handler does its part of a step."""
        self._me.let_others_read()

    def deliver(self, worker: str, address: Address, value: Any) -> None:
        """Brings a value to a worker; tensors for a device without a map go through the CPU.

        Raises:
            WorkerLostError: the worker, or the life that belongs to this pipeline, is gone.
        """
        if worker == self.name:
            if (part := self._seek(self._plan.session)) is not None:
                part.inbox.put(address, value)
            return
        body, tensors = letters.write(self._plan.session, address, value)
        life = self._plan.lives[worker]
        try:
            self._me.post(life, CHANNEL, body, tensors)
        except rpc.DeviceMapError:
            self._me.post(life, CHANNEL, body, [tensor.cpu() for tensor in tensors])


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that is done here, and how its gradients are taken back."""

    step: int
    gradients: StepGradients


class StageWorker:
    """One worker's part of one pipeline.

    Args:
        plan: of the pipeline.
        modules: the stages that are here, by index, and where their tensors are.
        outbox: brings letters to the others.
        restored: the copies that the stages were made of; empty if they were not.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[int, tuple[nn.Module, torch.device]],
        outbox: Outbox,
        restored: Mapping[int, StageCopy],
    ) -> None:
        self.plan = plan
        self.inbox = Inbox()
        self.stages = {
            index: Stage(index, module, device, plan.wiring, plan.settings[index])
            for index, (module, device) in modules.items()
        }
        self.outbox = outbox
        self.restored = restored
        self._keeper = Keepers.here().of(plan.keep.pipeline)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._rows: dict[Rows, tuple[Action, ...]] = {}
        self._failed: dict[int, Action] = {}
        self._ending = threading.Lock()
        self._ended: _Ended | None = None
        self.spans: list[Span] = []
        self.awaited: Address | None = None
        self.steps = 0
        self._times: StepTimes | None = None

    def facts(self) -> dict[str, object]:
        """The facts about these stages for whoever watches the job."""
        times, awaited = self._times, self.awaited
        sender = "" if awaited is None else sender_of(self.plan, awaited)
        return {
            "stages": sorted(self.stages),
            "steps": self.steps,
            **({} if times is None else times.facts()),
            "waits_for": [sender] if sender else [],
        }

    def install(self, rows: Rows, actions: tuple[Action, ...]) -> None:
        """Keeps this worker's row of a table for all steps that are of its kind."""
        self._rows[rows] = actions

    def run(self, order: StepOrder) -> StepReport:
        """Does this worker's part of a step, when the steps before are over.

        Raises:
            StepAbortedError: the step was called off.
            Exception: whatever a stage raised.
        """
        self.outbox.let_letters_in()
        self.inbox.begin(order.step)
        run, began = _Run(self, order), time.perf_counter_ns()
        cut = None if order.cut is None else self.begin_cut(order.cut, order.kept)
        gradients = StepGradients(self.parameters() if order.rows.trains else ())
        self._ended = None
        self.spans = []
        action: Action | None = None
        try:
            for action in self._rows[order.rows]:
                run.perform(action)
            action = None
            if order.rows.trains:
                run.share()
            if cut is not None:
                cut.finish()
            self._end(order.step, gradients)
        except BaseException as error:
            gradients.drop()
            if cut is not None:
                cut.wait()
            self._fail(order.step, action, error)
            raise
        self.inbox.end(order.step)
        if order.rows.trains:
            self._count(began)
        return run.report()

    def _count(self, began: int) -> None:
        """Counts a training step that is done here."""
        before = began if self._times is None else self._times.ended
        self._times = StepTimes(before, began, time.perf_counter_ns(), self.spans)
        self.steps += 1
        self.outbox.count_step()

    def seats(self) -> dict[int, Seat]:
        """The seats of the stages that are here."""
        me = self.outbox.name
        return {index: Seat(index, self.plan.owners[index].index(me)) for index in self.stages}

    def begin_cut(self, version: int, kept: bytes) -> Cut:
        """Begins to copy all stages that are here, for their backups."""
        drafts: dict[Seat, Draft | StageCopy] = {}
        for index, seat in self.seats().items():
            whole = self._keeper.get(seat, version)
            drafts[seat] = whole or Draft(
                seat, self.stages[index].module, self.optimizers, b"" if index else kept
            )
        cut = Cut(self._keeper, self.plan.keep, version, drafts)
        cut.start()
        return cut

    def abort(self, step: int, last: int, reason: str) -> Progress:
        """Calls off all steps from ``step`` to ``last``, also if they are done here.

        Returns when gradients are as they were before. Only if a stage computes for long, they
        will be when it is done.

        Returns:
            How far this worker got in ``step``.
        """
        self.inbox.abort(last, reason)
        self.inbox.wait_until_idle(_SECONDS_TO_UNWIND)
        with self._ending:
            if self._ended is not None and step <= self._ended.step:
                self._ended.gradients.drop()
                self._ended = None
        return Progress(self._failed.get(step), self.inbox.arrived(step))

    def _end(self, step: int, gradients: StepGradients) -> None:
        """Lets the step's gradients count, until it is called off because of somebody else."""
        with self._ending:
            self.inbox.require_running(step)
            gradients.add()
            self._ended = _Ended(step, gradients)

    def _fail(self, step: int, action: Action | None, error: BaseException) -> None:
        for stage in self.stages.values():
            stage.forget()
        if action is not None and not isinstance(error, StepAbortedError):
            self._failed = {step: action}
        self.inbox.fail(step, f"{type(error).__name__}: {error}")

    def close(self, reason: str) -> None:
        """Calls off all steps, now and later."""
        self.inbox.abort(_NEVER, reason)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all stages that are here."""
        for stage in self.stages.values():
            yield from stage.module.parameters()

    def located_parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        """The same with their stages and their names in the pipeline, each tensor once."""
        located: dict[int, tuple[int, str, nn.Parameter]] = {}
        for index, stage in self.stages.items():
            for name, parameter in stage.module.named_parameters():
                full_name = self.plan.prefixes[index] + name
                located.setdefault(id(parameter), (index, full_name, parameter))
        return list(located.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same by their names in the pipeline."""
        return {name: parameter for _, name, parameter in self.located_parameters()}

    def settle(self) -> None:
        """Keeps the last step's gradients for good, as they are about to be used."""
        with self._ending:
            self._ended = None


class _Run:
    """One worker's part of one step."""

    def __init__(self, worker: StageWorker, order: StepOrder) -> None:
        self._worker = worker
        self._plan = worker.plan
        self._order = order
        self._losses: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, Any] = {}
        self._last = worker.plan.wiring.stages - 1
        for stage in worker.stages.values():
            stage.most_held = 0

    def perform(self, action: Action) -> None:
        """Waits for what an action needs, does it, and sends on what comes of it."""
        waited = time.perf_counter_ns()
        stage = self._worker.stages[action.stage]
        # What is taken from the inbox must come before `began`, so each case says when it has it.
        match action.kind:
            case Kind.FORWARD if self._order.rows.trains:
                began = self._forward(stage, action.microbatch)
            case Kind.FORWARD:
                began = self._evaluate(stage, action.microbatch)
            case Kind.WEIGHT:
                began = waited
                stage.backward_weights(action.microbatch)
            case _:
                began = self._backward(stage, action)
        self._worker.spans.append(Span(action, waited, began, time.perf_counter_ns()))

    def share(self) -> None:
        """Exchanges the gradients of parameters that must stay equal, and sums them."""
        for stage in self._worker.stages.values():
            if isinstance(stage.module, DistributedDataParallel):
                average_over_ddp(stage.module)
        for number, sharing in enumerate(self._plan.shared):
            self._share(number, sharing)

    def report(self) -> StepReport:
        """The report that the driver hears."""
        held = {index: stage.most_held for index, stage in self._worker.stages.items()}
        losses = {microbatch: loss.cpu() for microbatch, loss in self._losses.items()}
        return StepReport(losses, self._outputs, held)

    def _forward(self, stage: Stage, microbatch: int) -> int:
        packets, given = self._inputs(stage, microbatch)
        if stage.index != self._last:
            began = time.perf_counter_ns()
            sent = stage.forward_to_train(self._order.drawn, microbatch, packets, given)
            for consumer, packet in sent.items():
                self._send(Content.ACTIVATION, stage.index, consumer, microbatch, packet)
            return began
        target = self._take(Content.TARGET, STEP, stage, microbatch)
        began = time.perf_counter_ns()
        loss = self._plan.loss
        assert loss is not None, "the driver trains only with a loss"
        self._losses[microbatch] = stage.forward_to_loss(
            self._order.drawn, microbatch, packets, given, partial(_apply, loss, target)
        )
        return began

    def _evaluate(self, stage: Stage, microbatch: int) -> int:
        packets, given = self._inputs(stage, microbatch)
        began = time.perf_counter_ns()
        with _evaluating(stage.module):
            output = stage.forward(self._order.drawn, microbatch, packets, given)
        if stage.index == self._last:
            keep = torch.Tensor.cpu if self._plan.outputs_to_cpu else _same
            self._outputs[microbatch] = map_tensors(output, keep)
        for consumer, packet in stage.packets(output).items():
            self._send(Content.ACTIVATION, stage.index, consumer, microbatch, packet)
        return began

    def _backward(self, stage: Stage, action: Action) -> int:
        gradients: dict[int, Gradients] = {
            consumer: self._take(Content.GRADIENT, consumer, stage, action.microbatch)
            for consumer in self._plan.wiring.consumers(stage.index)
        }
        if stage.index == self._last:
            loss = self._losses[action.microbatch]
            weight = self._order.weights[action.microbatch] * self._order.scale
            gradients[LOSS] = [torch.full_like(loss, weight)]
        began = time.perf_counter_ns()
        run = stage.backward if action.kind is Kind.BACKWARD else stage.backward_inputs
        for producer, outgoing in run(action.microbatch, gradients).items():
            self._send(Content.GRADIENT, stage.index, producer, action.microbatch, tuple(outgoing))
        return began

    def _inputs(self, stage: Stage, microbatch: int) -> tuple[dict[int, Packet], Mapping[str, Any]]:
        wiring = self._plan.wiring
        given: Mapping[str, Any] = {}
        if wiring.keywords(stage.index):
            given = self._take(Content.ACTIVATION, STEP, stage, microbatch)
        packets = {
            producer: self._take(Content.ACTIVATION, producer, stage, microbatch)
            for producer in wiring.producers(stage.index)
        }
        return packets, given

    def _take(self, content: Content, source: int, stage: Stage, microbatch: int) -> Any:
        address = Address(self._order.step, content, source, stage.index, microbatch)
        return map_tensors(self._wait_for(address), partial(_moved, stage.device))

    def _wait_for(self, address: Address) -> Any:
        self._worker.awaited = address
        try:
            return self._worker.inbox.take(address)
        finally:
            self._worker.awaited = None

    def _send(self, content: Content, source: int, to: int, microbatch: int, value: Any) -> None:
        address = Address(self._order.step, content, source, to, microbatch)
        worker = owner_of(self._plan.owners, to, microbatch)
        is_here = worker == self._worker.outbox.name and content is Content.ACTIVATION
        if is_here and len(self._plan.wiring.consumers(source)) > 1:
            value = copied(value)  # which this consumer may change, and no other may see that
        self._worker.outbox.deliver(worker, address, value)

    def _share(self, number: int, sharing: Sharing) -> None:
        name = self._worker.outbox.name
        others = list(dict.fromkeys(m.worker for m in sharing.members if m.worker != name))
        mine = {
            position: [
                self._worker.stages[member.stage].module.get_parameter(each)
                for each in member.names
            ]
            for position, member in enumerate(sharing.members)
            if member.worker == name
        }
        for position in mine:
            for worker in [name, *others]:
                self._worker.outbox.deliver(
                    worker, self._shared(number, position), _once(position, mine)
                )
        if not mine:
            return
        contributions = [
            self._wait_for(self._shared(number, position))
            for position in range(len(sharing.members))
        ]
        for parameters in mine.values():
            for place, parameter in enumerate(parameters):
                parameter.grad = total([each[place] for each in contributions], parameter)

    def _shared(self, number: int, position: int) -> Address:
        return Address(self._order.step, Content.SHARED, position, number, 0)


def _once(position: int, mine: dict[int, list[nn.Parameter]]) -> tuple[torch.Tensor | None, ...]:
    """A member's gradients; of a tensor that an earlier member here shares, nothing."""
    earlier = {id(each) for at, members in mine.items() if at < position for each in members}
    return tuple(None if id(each) in earlier else each.grad for each in mine[position])


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _apply(loss: Any, target: Any, output: Any) -> Any:
    return loss(output, target)


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Has the module in evaluation mode for a block."""
    if not module.training:
        yield
        return
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
