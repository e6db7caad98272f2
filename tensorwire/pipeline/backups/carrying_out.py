"""Carries out what a pipeline's coordinator decides: forms it, runs operations, tells workers.

Owns the present formation.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import rpc
from rpc import extend
from tensorwire.pipeline import sessions
from tensorwire.pipeline.backups import keeping
from tensorwire.pipeline.backups.coordinator import (
    AwaitWorkers,
    Coordinator,
    Course,
    Effect,
    Execute,
    Form,
    Gather,
    Kind,
    Lost,
    Operation,
    Settle,
)
from tensorwire.pipeline.backups.keeping import Keep
from tensorwire.pipeline.backups.places import (
    Found,
    NoCopyError,
    NoPlaceError,
    Owners,
    owner_in,
    seats_of,
)
from tensorwire.pipeline.backups.shelf import Epoch
from tensorwire.pipeline.errors import (
    PipelineError,
    StageFailedError,
    StepAbortedError,
    SupersededError,
)
from tensorwire.pipeline.formation import Design, Formation
from tensorwire.pipeline.returning import is_there, wait_for_change

_logger: Final = logging.getLogger("tensorwire")
_GONE: Final = (rpc.WorkerLostError, rpc.UnknownWorkerError)
_SECONDS_TO_NOTICE: Final = 5.0
_MOST_IN_VAIN: Final = 3
"""Most recoveries in a row although nobody was lost."""


class Carrier:
    """Runs a pipeline's operations, and has it go on from backups when workers are lost.

    Args:
        design: of the pipeline.
        renew: makes the optimizers anew, after a formation.
        name: under which the pipeline is found by a later life of its driver.
        backups: how many each stage has: 0 or 1.
        spares: workers without stages that may take some.
        keep_for: seconds for which copies outlive the driver.
        wait_for_return: seconds to wait for a lost worker before another takes its stages.

    Attributes:
        formation: the present one.
        coordinator: what decides.
        resumed: the version that an earlier life of the driver left, if one did.
    """

    formation: Formation

    def __init__(
        self,
        design: Design,
        renew: Callable[[], None],
        name: str | None,
        backups: int,
        spares: Sequence[str],
        keep_for: float,
        wait_for_return: float,
    ) -> None:
        self.pipeline = uuid.uuid4().hex if name is None else name
        self.resumed: int | None = None
        self._design = design
        self._renew = renew
        self._is_named = name is not None
        self.backups = backups
        self._has_backups = backups > 0
        self._keep_for = keep_for
        self._wait_for_return = wait_for_return
        self._waiting_since: float | None = None
        self._lives: dict[int, extend.Life] = {}
        self._in_vain = 0
        self._is_closed = False
        reign = self._next_reign() if self._is_named else 0
        self.coordinator = Coordinator(
            owners_of(design),
            spares,
            Epoch(reign, uuid.uuid4().hex, 0),
            self._waits,
            makes_backups=self._has_backups,
            asks_all=self._is_named,
        )

    def begin(self) -> None:
        """Forms the pipeline: of copies that an earlier driver of its name left, or anew."""
        self._design.placed = self.coordinator.homes
        if self._is_named:
            try:
                self.resumed = self._carry(self.coordinator.resume())
            except NoCopyError:
                self.resumed = None
            else:
                return
        self.form()

    def form(self) -> None:
        """Forms the pipeline of what the stages' workers have, and backs that up."""
        self.coordinator.homes = owners_of(self._design)
        self._design.placed = self.coordinator.homes
        self._lives.clear()
        if self._has_backups:
            self.run(self.coordinator.open())
            self.run(self.coordinator.back_up())
        else:
            epoch = self.coordinator.next_epoch()
            self.coordinator.owners = self.coordinator.homes
            self._form(Form(epoch, self.coordinator.homes, {}))

    def perform(self, kind: Kind, work: Callable[[Operation], Any], kept: Any = None) -> Any:
        """Does an operation; with backups also if workers are lost meanwhile.

        Args:
            kind: what a failed one leaves behind.
            work: does it with the present formation; may be called again.
            kept: the driver's own state.

        Raises:
            StageFailedError: every copy of a stage is lost.
            Exception: what ``work`` raised.
        """
        if self._is_closed:
            raise PipelineError("the pipeline was closed")
        operation = Operation(kind, work, kept)
        if self._has_backups:
            return self.run(self.coordinator.perform(operation))
        return self.coordinator.count(operation, work)

    def move(self, owners: Owners, homes: Owners, kept: Any) -> None:
        """Puts stages on other workers, state and all."""
        self.run(self.coordinator.move(owners, homes, kept))
        if not self._has_backups:
            self._tell(keeping.settle, (self.coordinator.epoch, 2**62))

    def go_home(self, kept: Any) -> None:
        """Gives workers that have come back their stages."""
        coordinator = self.coordinator
        back = [each for each in coordinator.missing if is_there(each)]
        if back and self._has_backups:
            homes = coordinator.homes
            living = [w for stage in homes for w in stage if is_there(w)]
            _logger.warning("workers %s are back and get their stages again", back)
            self.run(coordinator.move(coordinator.at_home(living), homes, kept))

    def run(self, course: Course) -> Any:
        """Carries out all effects of a course; returns what it returns.

        Raises:
            StageFailedError: every copy of a stage is lost.
        """
        try:
            return self._carry(course)
        except NoCopyError as error:
            owner = owner_in(self.coordinator.owners, error.seat)
            raise StageFailedError(
                error.seat.stage, owner, -1, f"{error}; recover() and load a checkpoint"
            ) from error
        except NoPlaceError as error:
            raise StageFailedError(
                error.seat.stage, owner_in(self.coordinator.homes, error.seat), -1, str(error)
            ) from error

    def close(self) -> None:
        """Has the workers forget the pipeline and all copies."""
        self._is_closed = True
        self.formation.leave()
        self._tell(keeping.forget, (self.coordinator.epoch,))

    def _carry(self, course: Course) -> Any:
        try:
            effect = next(course)
            while True:
                try:
                    result = self._carry_out(effect)
                except BaseException as error:
                    effect = course.throw(error)
                else:
                    effect = course.send(result)
        except StopIteration as end:
            return end.value

    def _carry_out(self, effect: Effect) -> Any:
        match effect:
            case Gather():
                return self._gather(effect)
            case Form():
                self._form(effect)
            case Execute():
                return self._execute(effect.operation)
            case Settle():
                self._in_vain = 0
                self._tell(keeping.settle, (effect.epoch, effect.version))
            case AwaitWorkers():
                self._await(effect)
        return None

    def _execute(self, operation: Operation) -> Any:
        try:
            if operation.work is None:
                version, kept = operation.cut, operation.kept or b""
                return self.formation.call_all(sessions.cut, version, kept)
            return operation.work(operation)
        except Exception as error:
            self._require_loss(error)
            raise Lost from error

    def _require_loss(self, error: Exception) -> None:
        """Returns if a worker's loss is the cause of an error, which is raised otherwise."""
        names = {*self.formation.workers, *self.formation.plan.keep.backups.values()}
        if lost := self.formation.lost():
            _logger.warning(
                "pipeline %s lost %s and goes on from its backups: %s", self.pipeline, lost, error
            )
            return
        causes = list(_causes(error))
        if any(isinstance(each, (StepAbortedError, SupersededError)) for each in causes):
            self._in_vain += 1
        else:
            told = [each for each in causes if isinstance(each, rpc.WorkerLostError)]
            if not any(each.name in names for each in told):
                raise error
            self._in_vain += not self._notices(suspects(told, self.formation.plan.lives) & names)
        if self._in_vain > _MOST_IN_VAIN:
            raise error
        _logger.warning("pipeline %s is formed again: %s", self.pipeline, error)

    def _notices(self, suspected: set[str]) -> bool:
        """Waits until this worker knows, too, that one of these is lost."""
        if not suspected:
            return False
        noticed = wait_for_change(
            lambda: bool(self.formation.lost()) or not all(map(is_there, suspected)),
            _SECONDS_TO_NOTICE,
        )
        if not noticed:
            _logger.warning(
                "pipeline %s: a worker has lost %s, which after %g s is still a member here",
                self.pipeline, sorted(suspected), _SECONDS_TO_NOTICE,
            )  # fmt: skip
        return noticed

    def _gather(self, effect: Gather) -> Mapping[str, Found]:
        names = effect.names or [each.name for each in rpc.workers()]
        question = self.pipeline, effect.epoch, effect.begins
        answers = {}
        for name, call in self._ask(names, sessions.gather, question).items():
            try:
                answers[name] = call.wait()
            except _GONE:
                continue
        return answers

    def _form(self, effect: Form) -> None:
        names = {*(w for stage in effect.owners for w in stage), *effect.backups.values()}
        lives = {name: extend.life_of(name) for name in names if is_there(name)}
        try:
            self._place(effect.owners)
            keep = Keep(
                self.pipeline, effect.epoch, effect.backups, effect.version, effect.sources,
                self._keep_for if self._is_named else 0.0, lives,
            )  # fmt: skip
            self.formation = Formation(self._design, keep)
            self._renew()
        except Exception as error:
            lost = names - lives.keys() or any(not extend.is_living(e) for e in lives.values())
            if not self._has_backups or not (lost or _says_lost(error)):
                raise
            raise Lost from error

    def _place(self, owners: Owners) -> None:
        """Makes the modules that are not yet on their workers."""
        for number, seat in enumerate(seats_of(owners)):
            handle, wanted = self._design.stages[seat.stage][seat.replica], owner_in(owners, seat)
            is_there_already = handle.get_module_rref().owner_name() == wanted
            life = extend.life_of(wanted)
            if not is_there_already or self._lives.get(number, life) != life:
                handle.recreate(f"{wanted}/{handle.device}")
            self._lives[number] = life

    def _tell(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Tells all workers that may have copies; nobody waits for that."""
        names = [*self.coordinator.known(), *self.formation.plan.keep.backups.values()]
        for call in self._ask(dict.fromkeys(names), function, (self.pipeline, *arguments)).values():
            call.add_done_callback(_pass_over)

    def _ask(
        self, names: Iterator[str] | Any, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> dict[str, rpc.Future[Any]]:
        """Calls a function on all of these workers that are there."""
        calls = {}
        for name in names:
            if is_there(name):
                try:
                    calls[name] = rpc.rpc_async(name, function, arguments, timeout=0)
                except _GONE:
                    continue
        return calls

    def _waits(self, lost: frozenset[str]) -> bool:
        """Says whether lost workers may still come back in time."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if time.monotonic() - self._waiting_since < self._wait_for_return:
            return True
        self._waiting_since = None
        return False

    def _await(self, effect: AwaitWorkers) -> None:
        seconds = _SECONDS_FOR_A_PLACE if effect.are_needed else self._wait_for_return
        _logger.warning("waiting up to %s seconds for %s", seconds, sorted(effect.names))
        came = wait_for_change(lambda: any(map(is_there, effect.names)), seconds)
        if effect.are_needed and not came:
            raise TimeoutError(
                f"nobody can take a stage of pipeline {self.pipeline!r}: {sorted(effect.names)} "
                f"are lost, and did not come back within {seconds} seconds"
            )

    def _next_reign(self) -> int:
        """The number of this life of the driver, greater than that of any before.

        Raises:
            PipelineError: another living driver has the name.
        """
        me = extend.worker().life
        highest = -1
        calls = self._ask([each.name for each in rpc.workers()], keeping.held_by, (self.pipeline,))
        for call in calls.values():
            try:
                reign, driver = call.wait()
            except _GONE:
                continue
            if driver is not None and driver != me and extend.is_living(driver):
                raise PipelineError(
                    f"name={self.pipeline!r}: a driver that is living has a pipeline of this name"
                )
            highest = max(highest, reign)
        return highest + 1


_SECONDS_FOR_A_PLACE: Final = 300.0


def owners_of(design: Design) -> Owners:
    """The workers that have a design's modules."""
    return tuple(
        tuple(each.get_module_rref().owner_name() for each in replicas)
        for replicas in design.stages
    )


def _pass_over(call: rpc.Future[Any]) -> None:
    """Ignores an outcome that changes nothing: who was not told is told with the next version."""
    with contextlib.suppress(Exception):
        call.wait()


def suspects(told: Iterable[rpc.WorkerLostError], lives: Mapping[str, extend.Life]) -> set[str]:
    """The workers whose loss errors tell, but those of which a later life takes part already.

    That a former life is lost is no news, and nothing follows that one could wait for.

    Args:
        told: the errors.
        lives: that take part, by name.
    """
    return {
        each.name
        for each in told
        if each.name not in lives or each.incarnation >= lives[each.name].incarnation
    }


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_lost(error: BaseException) -> bool:
    return any(isinstance(each, _GONE) for each in _causes(error))
