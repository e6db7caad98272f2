"""The processes of one agent's workers: started as the plan says, watched, asked to end, ended."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.utils.api import macros

from rpc.errors import RpcError
from tensorwire.launch.chronicle import Chronicle
from tensorwire.launch.group_members import GroupMembers
from tensorwire.launch.logs import Logs, Output
from tensorwire.launch.plan import Phase, Plan, Seat
from tensorwire.launch.processes import (
    OrphanWatch,
    Program,
    WorkerProcess,
    by_cause,
    end_all,
    module_program,
    not_started,
)
from tensorwire.launch.report import describe_end
from tensorwire.launch.roles import Role
from tensorwire.launch.standby import Standbys
from tensorwire.launch.supervisor import Ended, Kill, Stop
from tensorwire.launch.template import Template
from tensorwire.launch.variables import (
    JobFacts,
    LocalPlace,
    inherited_variables,
    visible_device,
    worker_variables,
)
from tensorwire.launch.watched import AgentWatch

_logger = logging.getLogger("rpcrun")

Started = Callable[[Seat, WorkerProcess, LocalPlace], object]
"""Called with each process that was started."""


class LocalWorkers:
    """The workers that one agent runs.

    Args:
        spec: torch's description of the workers.
        roles: as this agent's own command line describes them.
        start_method: how processes of functions begin.
        template: what servers of TensorWire's own are forked off.
        standbys: processes that wait to become workers.
        started: told of each process that was started.

    Attributes:
        running: the processes, by the seats they have.
        failures: by seat, of the last process there that failed.
        values: by seat, what functions returned.
        watch: how the job can be looked at; None if not at all.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        roles: Sequence[Role],
        start_method: str,
        template: Template | None,
        standbys: Standbys | None,
        started: Started,
    ) -> None:
        self._spec, self._roles = spec, roles
        self._start_method, self._template, self._standbys = start_method, template, standbys
        self._started = started
        self._started_at = time.monotonic()
        self.running: dict[int, WorkerProcess] = {}
        self.failures: dict[int, ProcessFailure] = {}
        self.values: dict[int, Any] = {}
        self.watch: AgentWatch | None = None
        self._local_ranks: dict[int, int] = {}
        self._not_started: list[Ended] = []
        self._orphan_watch: OrphanWatch | None = None
        self._logs: Logs | None = None

    def meet(self, node: str, facts: JobFacts, members: GroupMembers, chronicle: Chronicle) -> None:
        """Takes part in a job from now on.

        Args:
            node: this agent in the job's plan.
            facts: of the job.
            members: of the workers' group.
            chronicle: tells what happens.
        """
        self._node, self._facts = node, facts
        self._members, self._chronicle = members, chronicle

    def prepare(self, output: Output, key_file: str) -> None:
        """Makes, once, what outlives single workers: logs, and what ends them with this agent."""
        if self._orphan_watch is None:
            self._orphan_watch = OrphanWatch()
            if key_file:
                self._orphan_watch.tell(f"file {key_file}")
        if self._logs is None:
            filters = output.stdout_filters, output.stderr_filters
            self._logs = Logs(
                output.folder,
                self._facts.run_id,
                output.redirects,
                output.tee,
                output.shown,
                output.prefix,
                filters,
            )

    def tend(self, plan: Plan) -> None:
        """Begins standbys, and ends workers that stand still; once a round."""
        if self._standbys is not None and plan.phase is Phase.RUNNING:
            self._standbys.tend(time.monotonic(), self._started_at)
        if self.watch is not None:
            for process in self.watch.round(plan, self.running):
                process.kill()

    # --- Beginning

    def start(self, seat: Seat, plan: Plan) -> None:
        """Starts the worker of a seat; if that fails, it counts as one that ended."""
        local = self._local_place(seat, plan)
        try:
            self._members.begins(seat.name, seat.life)
            process = self._process(seat, local, plan)
        except Exception as error:
            _logger.exception("%s could not be started", seat.name)
            self._not_started.append(not_started(seat, error))
            return
        self.running[seat.id] = process
        self._started_at = time.monotonic()
        self._tell_orphan_watch(f"run {process.id}")
        self._started(seat, process, local)

    def _process(self, seat: Seat, local: LocalPlace, plan: Plan) -> WorkerProcess:
        assert self._logs is not None
        variables = self._variables(seat, local, plan)
        logs = self._logs.of(seat, local.rank)
        prefix = self._logs.prefix(seat, local.rank)
        note = str(self._logs.folder / f"ending-{seat.id}-{seat.life}")
        program = self._program(self._own_role(seat.role), local)
        process = WorkerProcess(seat, program, variables, logs, prefix, note)
        process.tails += self._logs.filtering(seat, local.rank, logs)
        return process

    def _own_role(self, name: str) -> Role:
        """A role as this agent's own command line describes it: no plan says what to run."""
        own = next((role for role in self._roles if role.name == name), None)
        if own is None:
            raise ValueError(f"this agent was not told what workers of role {name!r} run")
        return own

    def _program(self, role: Role, local: LocalPlace) -> Program:
        spec = self._spec
        assert spec.entrypoint is not None
        entrypoint, given = spec.entrypoint, tuple(macros.substitute([*spec.args], str(local.rank)))
        if role.module is not None:
            entrypoint, first = module_program(role.module, spec.entrypoint)
            given = (*first, *role.arguments)
        is_forked = self._start_method == "fork" or role.is_of_tensorwire
        source = self._template if is_forked else self._standbys
        return Program(entrypoint, given, self._start_method, spec.numa_options, source)

    def _variables(self, seat: Seat, local: LocalPlace, plan: Plan) -> dict[str, str]:
        variables = worker_variables(plan, seat, local, self._facts)
        variables |= inherited_variables(os.environ)
        if self.watch is not None:
            variables |= self.watch.variables
        if getattr(self._spec, "virtual_local_rank", False):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            variables["CUDA_VISIBLE_DEVICES"] = visible_device(local.rank, visible)
            variables["LOCAL_RANK"] = "0"
        return variables

    def _local_place(self, seat: Seat, plan: Plan) -> LocalPlace:
        """Counts the workers of one role on this agent; a worker keeps its number here."""
        mine = [each.id for each in plan.held_by(self._node) if each.role == seat.role]
        taken = {self._local_ranks[each] for each in mine if each in self._local_ranks}
        free = next(rank for rank in range(len(mine) + 1) if rank not in taken)
        rank = self._local_ranks.setdefault(seat.id, free)
        return LocalPlace(rank, max(len(mine), rank + 1))

    # --- Ending

    def stop(self, effect: Stop) -> None:
        """Asks a worker to end, if it is here."""
        if effect.seat in self.running:
            self.running[effect.seat].ask_to_end(signal.SIGTERM, effect.again)

    def kill(self, effect: Kill) -> None:
        """Ends a worker at once, if it is here."""
        if effect.seat in self.running:
            process = self.running[effect.seat]
            _logger.log(self._level(False), "%s is killed: %s", process.seat.name, effect.why)
            process.kill()

    def poll(self) -> list[Ended]:
        """The workers that ended since the last look, those first that others ended because of."""
        failed = []
        for seat_id, process in list(self.running.items()):
            result = process.poll()
            if result is None:
                continue
            del self.running[seat_id]
            end, failure = result
            joined = self._note_end(process, end, failure)
            failed.append((replace(end, joined=joined), failure))
        ended = [*by_cause(failed), *self._not_started]
        self._not_started = []
        return ended

    def _note_end(self, process: WorkerProcess, end: Ended, failure: ProcessFailure | None) -> bool:
        """Tells of it; returns True if the process was seen as a member of the group."""
        name, how = process.seat.name, describe_end(end)
        self._tell_orphan_watch(f"ended {process.id}")
        if end.exit_code == 0:
            self.values[process.seat.id] = process.value
        else:
            _logger.log(self._level(end.stopped), "%s (process %d) %s", name, process.id, how)
        if failure is not None and not end.stopped:
            self.failures[process.seat.id] = failure
        if self.watch is not None:
            self.watch.ended(name, how)
        return self._members.ended(name, process.id, f"its process {how}")

    def _level(self, is_expected: bool) -> int:
        """The level of a line about the end of one worker."""
        if self._chronicle.is_returning:
            return logging.DEBUG  # of all of them there was one line
        return logging.INFO if is_expected else logging.WARNING

    def end_all(self, death_signal: int, timeout: float) -> None:
        """Ends all workers, and waits for that; after so many seconds they are killed."""

        def note(seat: int, result: tuple[Ended, ProcessFailure | None]) -> None:
            with contextlib.suppress(RpcError):
                self._note_end(self.running[seat], *result)
            del self.running[seat]

        end_all(self.running, death_signal, timeout, note)

    def close(self) -> None:
        """Ends what is kept for workers; they have ended."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        for source in (self._template, self._standbys):
            if source is not None:
                source.close()
        if self._orphan_watch is not None:
            self._orphan_watch.dismiss()
            self._orphan_watch = None
        if self._logs is not None:
            self._logs.close()

    def delete_temporary_logs(self) -> None:
        """Deletes the folder of error files, if nobody asked for logs."""
        if self._logs is not None and self._logs.is_temporary:
            shutil.rmtree(self._logs.folder, ignore_errors=True)

    def _tell_orphan_watch(self, line: str) -> None:
        if self._orphan_watch is not None:
            self._orphan_watch.tell(line)
