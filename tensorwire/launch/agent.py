"""The agent: one on each machine, it runs the seats that the plan gives it.

Torch's ``SimpleElasticAgent`` drives it: rendezvous, then a round after each monitor interval
until the job is over. A round reads the plan, reports what was seen, and does what the supervisor
decides. Nothing in a round waits for a process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import ProcessFailure

from rpc.errors import BringUpError, RpcError
from rpc.extend import (
    KeyValueStore,
    StoreClient,
    StoreServer,
    WaitLog,
    address_on_the_way_to,
    host_store,
    key_values,
    prompt_signals,
)
from tensorwire.launch.chronicle import Chronicle, describe_starts
from tensorwire.launch.endpoint import is_loopback
from tensorwire.launch.exits import ExitRules
from tensorwire.launch.group_members import GroupMembers
from tensorwire.launch.local_workers import LocalWorkers
from tensorwire.launch.logs import Output
from tensorwire.launch.plan import Failure, Node, Phase, Plan, Seat
from tensorwire.launch.plan_store import PlanStore
from tensorwire.launch.processes import (
    WorkerProcess,
)
from tensorwire.launch.rendezvous import NAMESPACE, TensorWireRendezvous
from tensorwire.launch.report import ProgressLine, describe_plan
from tensorwire.launch.roles import Role, digest
from tensorwire.launch.seats import Left, Met
from tensorwire.launch.silence import Silence
from tensorwire.launch.standby import Standbys
from tensorwire.launch.supervisor import Effect, HostStore, Kill, Start, Stop, Supervisor
from tensorwire.launch.template import Template
from tensorwire.launch.variables import (
    JobFacts,
    LocalPlace,
    group_url,
)
from tensorwire.launch.watched import Watching, begin_watch

_logger = logging.getLogger("rpcrun")

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_OTHERS = 8.0
_SECONDS_BETWEEN_POLLS = 0.02
_SECONDS_OF_HURRY = 2.0
"""Seconds for which rounds follow each other at once while the last workers end."""
_LAST_PHASES = (Phase.ENDING, Phase.FAILED)
_JOIN_SECONDS = 600.0
_READ_SECONDS = 60.0

_JOB = ""
"""Stands for the job, where roles have stores of their own."""
_MEETING = "meeting"


class RoleAgent(SimpleElasticAgent):
    """Runs this machine's part of a job that has roles.

    It can stand where torch's ``LocalElasticAgent`` does in a launcher of your own: made of a
    ``WorkerSpec`` alone, it runs ``local_world_size`` workers of one role, each of which
    starts again by itself up to ``max_restarts`` times.

    Args:
        spec: torch's description of the workers: program, rendezvous, intervals.
        roles: the roles. Default one, which the spec describes.
        spare: seats for workers of an agent that died. Default 0.
        min_nodes: agents that the job needs. Default 1.
        output: what becomes of what the workers write. Default the terminal shows all of it.
        start_method: how processes of functions begin: spawn, fork or forkserver. With
            ``template``, fork also has programs in Python forked off that. Default spawn.
        template: what servers of TensorWire's own are forked off. Default none: commands start
            all workers.
        standbys: processes that wait to become workers. Default none.
        exit_codes: which ends are worth a restart. Default all, but for a worker that fails twice
            in the same way before it joins its group.
        shutdown_timeout: seconds from asking a worker to end to killing it. Default 30.
        group_key: the key of the workers' group. Default the rendezvous', if it has one.
        key_file: a file with that key, which is deleted if this agent is killed.
        program: the job's program and its arguments as the user gave them; agents that were
            told others do not work together. Default the spec's.
        watching: how the job can be looked at. Default not at all.

    Example::

        agent = RoleAgent(spec, [parse_role("ps:2,service"), parse_role("trainer:4")])
        result = agent.run()

    Attributes:
        failure: why the job failed, once it has, or why this agent was taken out of it.
        is_dismissed: this agent was taken out of the job, which goes on without it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        roles: Iterable[Role] = (),
        *,
        spare: int = 0,
        min_nodes: int = 1,
        output: Output | None = None,
        start_method: str = "spawn",
        template: Template | None = None,
        standbys: Standbys | None = None,
        exit_codes: ExitRules | None = None,
        shutdown_timeout: float = 30,
        group_key: bytes = b"",
        key_file: str = "",
        program: Sequence[str] = (),
        watching: Watching | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=0)
        given = tuple(roles) or (Role(spec.role, spec.local_world_size),)
        self._roles = tuple(_with_restarts(role, spec.max_restarts) for role in given)
        self._spare, self._min_nodes, self._grace = spare, min_nodes, float(shutdown_timeout)
        self._output, self._exits = output or Output(), exit_codes or ExitRules()
        self._handler = spec.rdzv_handler
        if isinstance(self._handler, TensorWireRendezvous):
            group_key = self._handler.group_key
        self._group_key, self._key_file = group_key, key_file
        self._program_digest = digest(*(program or _words_of(spec)))
        self._local = LocalWorkers(
            spec, self._roles, start_method, template, standbys, self._note_start
        )
        self._workers: dict[int, Worker] = {}
        self._role_names: dict[int, str] = {}
        self.failure: Failure | None = None
        self.is_dismissed = False
        self._stores: dict[str, StoreServer] = {}
        self._watches = contextlib.ExitStack()
        self._looked = self._heard = 0.0
        self._silent_numbers: Set[int] = frozenset()
        self._asked_about: list[tuple[str, int]] = []
        self._declared: list[str] = []
        self._has_left = True
        self._watching = watching
        self._progress = ProgressLine(sys.stderr)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Runs this machine's part of the job; signals are noticed at once meanwhile."""
        with prompt_signals():
            result: RunResult = super().run(role)
        return result

    # --- What torch calls

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assigns nothing: this agent learns its seats from the plan."""
        offers = tuple((role.name, role.count) for role in self._roles)
        handler = self._handler
        hosts = isinstance(handler, TensorWireRendezvous) and handler.is_hosting
        self._node = Node(
            str(group_rank), group_rank, socket.gethostname(), offers, self._spare, hosts=hosts
        )
        self._chronicle = Chronicle(self._node.id)
        self._workers.clear()
        return []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Does the first round; every start is recorded where it happens."""
        self._meet(worker_group)
        self._local.prepare(self._output, self._key_file)
        if self._watching is not None and self._local.watch is None:
            run_id, node = self._facts.run_id, worker_group.group_rank or 0
            self._local.watch = begin_watch(run_id, node, self._job_values, self._watching)
        self._round()
        return {}

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Finds the job's store, and takes part in the plan that lies there."""
        handler, rank = self._handler, worker_group.group_rank or 0
        host, port = worker_group.master_addr or "", int(worker_group.master_port or 0)
        patience = _JOIN_SECONDS
        if isinstance(handler, TensorWireRendezvous):
            patience = handler.join_seconds
            self._silence = Silence(handler.silence_seconds)
            store, values, url = handler.job_store, handler.values, handler.group_url
        else:
            store, url = self._store_beside(worker_group, rank, host, port)
            values = key_values(store, self._group_key, NAMESPACE)
            port = port if handler.use_agent_store else store.port
        most = handler.max_nodes if isinstance(handler, TensorWireRendezvous) else 0
        self._facts = JobFacts(handler.get_run_id(), host, port, url, most)
        self._job_values = values
        author = f"rpcrun on {self._node.host}"
        self._members = GroupMembers(store, self._group_key, author)
        self._watches.callback(self._members.close)
        self._plans = PlanStore(values, self._min_nodes)
        self._watches.callback(self._plans.close)
        self._supervisor = Supervisor(
            self._node, self._roles, self._grace, patience, self._program_digest, self._exits
        )
        self._local.meet(self._node.id, self._facts, self._members, self._chronicle)
        self._has_left = False

    def _store_beside(
        self, worker_group: WorkerGroup, rank: int, host: str, port: int
    ) -> tuple[StoreClient, str]:
        """The job's store, and its URL, under a rendezvous that is not ours.

        Without a key it is the rendezvous' own, if workers may use that. Otherwise the first
        agent hosts one, and only its address, signed, lies in the other.
        """
        job = self._handler.get_run_id()
        if not self._handler.use_agent_store or self._group_key:
            shared: Any = worker_group.store
            notes = key_values(shared, self._group_key, NAMESPACE)
            if rank == 0:
                self._stores[_JOB] = host_store(host, 0, self._group_key)
                notes.set(_MEETING, str(self._stores[_JOB].port).encode())
            port = _wait_for_port(notes)
        client = StoreClient(host, port, _READ_SECONDS, self._group_key, job)
        return client, group_url(host, port, job)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Does a round; says how the job is."""
        plan = self._round()
        hurry = time.monotonic() + _SECONDS_OF_HURRY
        while plan.phase in _LAST_PHASES and not self._supervisor.is_finished(plan):
            if time.monotonic() > hurry:
                break
            time.sleep(_SECONDS_BETWEEN_POLLS)
            plan = self._round()
        worker_group.workers = list(self._workers.values())
        if not self._supervisor.is_finished(plan):
            return RunResult(WorkerState.HEALTHY)
        self._part(plan)
        if plan.phase is Phase.SUCCEEDED:
            values = dict.fromkeys(self._workers) | self._local.values
            return RunResult(WorkerState.SUCCEEDED, values)
        self._remaining_restarts = 0  # what starts again, the plan has said
        dismissal = plan.dismissal(self._node.id)
        self.is_dismissed = dismissal is not None and not plan.phase.is_over
        self.failure = plan.failure if dismissal is None else dismissal.failure
        return RunResult(WorkerState.FAILED, failures=self._first_failures(self.failure))

    def _first_failures(self, first: Failure | None) -> dict[int, ProcessFailure]:
        """The failure that ended the job, or this agent's part in it, if it was here."""
        failures = self._local.failures
        if first is None or first.id not in failures or first.host != self._node.host:
            return {}
        return {first.id: failures[first.id]}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Ends all workers, and waits for that."""
        self._local.end_all(signal.SIGTERM, self._grace)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ends all workers, and leaves the job if that was not over."""
        try:
            self._local.end_all(death_sig, self._grace)
            if not self._has_left:
                with contextlib.suppress(RpcError):  # the store may be what was lost
                    self._leave()
        finally:
            self._let_go()

    def _exit_barrier(self) -> None:
        """Does nothing: agents wait for the store only, and have done so."""

    # --- Rounds

    def _round(self) -> Plan:
        now, plan = time.monotonic(), self._plans.read()
        self._tell_of(plan)  # it may say that this agent is out, and the next one already not
        ended = self._local.poll()
        events = self._supervisor.report(now, plan, ended, self._silent(plan))
        orphans = [
            member
            for event in events
            if isinstance(event, Left)
            for seat in plan.held_by(event.node)
            for member in self._members.up_to(seat.name, seat.life)
        ]
        plan = self._plans.put(events)
        for member in orphans:
            self._members.strike_off(member, "its agent gives no sign of life")
        for event in events:
            if isinstance(event, Left):
                _logger.warning("agent %s gives no sign of life; it is struck out", event.node)
        self._tell_of(plan)
        lost = self._lost()
        running = self._local.running.values()
        ending = [each.seat.name for each in running if lost and each.is_ending]
        effects = self._supervisor.act(now, plan, lost, ending)
        if starts := describe_starts([each.seat for each in effects if isinstance(each, Start)]):
            _logger.warning(starts)
        for effect in effects:
            self._perform(effect, plan)
        self._progress.show(describe_plan(plan, lambda seat: seat.id in self._local.running))
        self._local.tend(plan)
        return plan

    def _tell_of(self, plan: Plan) -> None:
        """Logs what of a plan was not said of earlier ones."""
        running = [process.seat.name for process in self._local.running.values()]
        for line in self._chronicle.lines(plan, running):
            _logger.warning(line)

    def _silent(self, plan: Plan) -> list[str]:
        """The nodes that give no sign of life."""
        handler = self._handler
        if not isinstance(handler, TensorWireRendezvous):
            return []
        now = time.monotonic()
        if now - self._heard >= handler.beat_seconds / 2:
            self._heard = now
            numbers = [node.number for node in plan.nodes if node.id != self._node.id]
            self._silent_numbers = self._silence.hear(now, handler.beats(numbers))
        return [node.id for node in plan.nodes if node.number in self._silent_numbers]

    def _lost(self) -> list[str]:
        """Names of this agent's workers that their group declared lost, as of the last look."""
        now = time.monotonic()
        processes = [(each.seat.name, each.id) for each in self._local.running.values()]
        is_due = now - self._looked >= _SECONDS_BETWEEN_LOOKS and self._members.may_have_changed()
        if is_due or processes != self._asked_about:
            self._looked, self._asked_about = now, processes
            self._declared = list(self._members.lost(processes))
        return self._declared

    # --- Effects

    def _perform(self, effect: Effect, plan: Plan) -> None:
        if isinstance(effect, Start):
            self._local.start(effect.seat, plan)
        elif isinstance(effect, Stop):
            self._local.stop(effect)
        elif isinstance(effect, Kill):
            self._local.kill(effect)
        elif isinstance(effect, HostStore):
            self._host_store(effect)

    def _note_start(self, seat: Seat, process: WorkerProcess, local: LocalPlace) -> None:
        worker = Worker(local.rank, seat.id, seat.number, -1, -1)
        worker.id = process.id
        self._workers[seat.id] = worker
        self._role_names[seat.id] = seat.role
        state = "START" if seat.life == 1 else "RESTART"
        handler = self._worker_group.spec.event_log_handler
        record(self._construct_event(state, EventSource.WORKER, worker), handler)
        put_metric(f"workers.{seat.role}.{state.lower()}", 1)

    def _construct_event(
        self, state: str, source: EventSource, worker: Worker | None = None, *args: Any, **more: Any
    ) -> Event:
        """Torch's event, with the role of the worker that it is about."""
        event: Event = super()._construct_event(state, source, worker, *args, **more)
        if worker is not None and worker.global_rank in self._role_names:
            event.metadata["role"] = self._role_names[worker.global_rank]
        return event

    def _host_store(self, effect: HostStore) -> None:
        host = "127.0.0.1" if is_loopback(self._facts.host) else self._own_address()
        store = host_store(host, 0)
        self._stores[effect.role] = store  # the last attempt's ends here
        self._plans.put([Met(effect.role, effect.attempt, f"{host}:{store.port}")])

    def _own_address(self) -> str:
        """This machine's address on the way to the store's."""
        given: str | None = self._worker_group.spec.local_addr
        if given:
            return given
        mine = address_on_the_way_to(self._facts.host, self._facts.port)
        if mine is None:
            raise OSError(errno.ENETUNREACH, f"no way leads to {self._facts.host}")
        return mine

    # --- The end

    def _part(self, plan: Plan) -> None:
        """Leaves a job that is over; the agent that hosts the store is the last."""
        handler = self._handler
        if isinstance(handler, TensorWireRendezvous):
            with contextlib.suppress(RpcError):
                if plan.phase.is_over:
                    handler.set_closed()
                if handler.is_hosting:
                    self._wait_for_others(plan)
        with contextlib.suppress(RpcError):
            self._leave()

    def _wait_for_others(self, plan: Plan) -> None:
        deadline = time.monotonic() + _SECONDS_FOR_OTHERS
        while time.monotonic() < deadline:
            silent = self._silent(plan)
            others = [n.id for n in plan.nodes if n.id != self._node.id and n.id not in silent]
            if not others:
                return
            time.sleep(_SECONDS_BETWEEN_POLLS)
            plan = self._plans.read()

    def _leave(self) -> None:
        self._has_left = True
        plan = self._plans.put([Left(self._node.id)])
        if isinstance(self._handler, TensorWireRendezvous):
            self._handler.is_last = not plan.nodes

    def _let_go(self) -> None:
        self._progress.close()
        self._local.close()
        self._watches.close()
        self._stores.clear()

    def delete_temporary_logs(self) -> None:
        """Deletes the folder of error files, if nobody asked for logs."""
        self._local.delete_temporary_logs()


def _with_restarts(role: Role, default: int) -> Role:
    return role if role.max_restarts is not None else replace(role, max_restarts=default)


def _words_of(spec: WorkerSpec) -> list[str]:
    """The program and its arguments, as far as they are text or numbers."""
    entrypoint: Any = spec.entrypoint
    name = entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__qualname__", "")
    return [name, *(str(each) for each in spec.args if isinstance(each, str | int | float))]


def _wait_for_port(notes: KeyValueStore) -> int:
    """The port of the job's store, as the first agent says.

    Raises:
        BringUpError: it does not.
    """
    deadline = time.monotonic() + _JOIN_SECONDS
    log = WaitLog(time.monotonic(), (1.0, 5.0), 10.0)
    while (port := notes.get(_MEETING)) is None:
        now = time.monotonic()
        if now > deadline:
            raise BringUpError(
                f"the first agent did not say within {_JOIN_SECONDS:g} s where the job's store is"
            )
        if log.is_due(now):
            _logger.warning("the first agent has not said yet where the job's store is")
        time.sleep(_SECONDS_BETWEEN_POLLS)
    return int(port)
