"""One agent's watch over a job: gathers, answers viewers, looks for standstills.

The agent tells in each of its rounds who there is; a thread does the rest: once a second while
somebody looks at the job through any agent, ten times within the least budget for standstills and
when a budget ends, and otherwise it only reads whether another agent calls.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tensorwire.watching import jobs
from tensorwire.watching.exchange import AgentReport, Exchange, KeyValues
from tensorwire.watching.hub import Hub, NoAnswerError, Question
from tensorwire.watching.machine import look_at
from tensorwire.watching.standstill import Finding, Standstill
from tensorwire.watching.views import JobView, NodeView, WorkerView

_logger = logging.getLogger("rpcrun")

SECONDS_BETWEEN_LOOKS: Final = 1.0
_LOOKS_IN_A_BUDGET: Final = 10
"""Looks for standstills within the least budget; more would ask workers for nothing."""
_SECONDS_BEYOND_A_BUDGET: Final = 0.1
_SECONDS_FOR_FACTS: Final = 0.8
_SECONDS_FACTS_ARE_NEW: Final = 0.5
"""Seconds for which facts are new: meanwhile nobody is asked for others, however many look at the
job.
"""
_STACKS_AT_ONCE: Final = 8
_MOST_STACKS: Final = 32
_SECONDS_FOR_STACKS: Final = 5.0
_SECONDS_A_VIEWER_COUNTS: Final = 5.0
_SECONDS_FOR_OTHERS: Final = 20.0
_SECONDS_FOR_FIRST_VIEW: Final = 3.0
_SILENT: Final = 1.0
_MOST_NEWS: Final = 50
_LOG_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Seen:
    """The things that an agent knows in a round.

    Args:
        phase: of the job.
        nodes: its machines.
        workers: all of them, without processes and facts.
        local: processes of this agent, by the workers' names.
        logs: files of this agent's workers, by their names.
    """

    phase: str
    nodes: tuple[NodeView, ...]
    workers: tuple[WorkerView, ...]
    local: Mapping[str, int]
    logs: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """The policy for workers that stand still.

    Args:
        least: the least budget in seconds; 0 looks for none.
        at_once: count budgets before there is a minute of history.
        restarts: kill those to blame, so that they start again.
    """

    least: float = 120.0
    at_once: bool = False
    restarts: bool = False


class JobWatch:
    """Watches a job from one of its agents.

    Args:
        job: its id.
        node: the agent's number.
        values: where all agents of the job read and write.
        policy: what is done about standstills.
    """

    def __init__(self, job: str, node: int, values: KeyValues, policy: StallPolicy) -> None:
        self._job, self._node, self._policy = job, node, policy
        self._exchange = Exchange(values, node)
        self._seen = Seen("running", (), (), {}, {})
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._views: dict[str, WorkerView] = {}
        self._heard: dict[str, float] = {}
        self._others: dict[int, AgentReport] = {}
        self._others_at: dict[int, float] = {}
        self._viewed = self._called = -_SECONDS_A_VIEWER_COUNTS
        self._told: tuple[object, ...] = ({}, {}, ())
        self._standstill = Standstill(policy.least, policy.at_once)
        self._looks_again = 0.0
        self._gathered = -_SECONDS_FACTS_ARE_NEW
        self._alarms: deque[str] = deque(maxlen=_MOST_NEWS)
        self._news: deque[str] = deque(maxlen=_MOST_NEWS)
        self._restarts: set[tuple[str, int]] = set()
        self._numbers = itertools.count()
        self._questions: dict[str, dict[str, Any]] = {}
        self._answers: dict[str, Any] = {}
        self._answering: set[str] = set()
        self._stop = threading.Event()
        self.path = jobs.socket_path(job)
        self._hub = Hub(self.path, self.answer)
        self._hub.start()
        self._thread = threading.Thread(target=self._run, name="rpcrun-watch", daemon=True)
        self._thread.start()

    # --- what the agent calls

    def update(self, seen: Seen) -> None:
        """Takes what the agent knows now."""
        with self._lock:
            before = {worker.name: worker for worker in self._seen.workers}
            self._seen = seen
            for worker in seen.workers:
                known = before.get(worker.name)
                if known is not None and worker.life > known.life:
                    why = f": {known.why or worker.why}" if known.why or worker.why else ""
                    self._news.append(f"{worker.name} started again, as life {worker.life}{why}")

    def to_restart(self) -> set[tuple[str, int]]:
        """Names and lives of this agent's workers that are to be killed, each told once."""
        with self._lock:
            restarts, self._restarts = self._restarts, set()
        return restarts

    def close(self) -> None:
        """Ends the watch; viewers are hung up on."""
        self._stop.set()
        self._thread.join(10)
        self._hub.close()
        jobs.forget(self.path)

    # --- what viewers call

    def answer(self, question: Question) -> object:
        """Answers a viewer: ``job``, ``stacks``, ``trace`` or ``log``.

        Raises:
            NoAnswerError: there is no such worker, or it cannot answer.
            ValueError: there is no such question.
        """
        what = question.get("ask")
        if what == "job":
            return self.view().plain()
        if what not in ("stacks", "trace", "log"):
            raise ValueError(f"ask={what!r} must be job, stacks, trace or log")
        worker = self._worker(str(question.get("worker")))
        if worker.node == self._node:
            return self._answer_here(question, worker)
        return self._answer_elsewhere(question, worker)

    def view(self) -> JobView:
        """The whole job, as it is now; the first of several waits for the other machines."""
        is_first = not self._is_viewed()
        self._viewed = time.monotonic()
        self._look(fresh=True)
        if is_first:
            self._wait_for_others()
        with self._lock:
            seen, now = self._seen, time.monotonic()
            nodes = tuple(
                replace(node, heard=max(0.0, now - self._others_at.get(node.number, now)))
                for node in seen.nodes
            )
            alarms = [*self._alarms, *(a for told in self._others.values() for a in told.alarms)]
            return JobView(
                self._job,
                seen.phase,
                time.time(),
                nodes,
                self._all_workers(),
                tuple(alarms),
                tuple(self._news),
            )

    def _worker(self, name: str) -> WorkerView:
        with self._lock:
            for worker in self._seen.workers:
                if worker.name == name:
                    return worker
            names = ", ".join(worker.name for worker in self._seen.workers)
        raise NoAnswerError(f"no worker {name!r} in this job; there are: {names}")

    def _answer_here(self, question: Question, worker: WorkerView) -> object:
        if question["ask"] == "log":
            return self._log(worker.name)
        seconds = float(question.get("seconds", 5.0)) if question["ask"] == "trace" else 0.0
        return self._hub.ask(worker.name, question, _SECONDS_FOR_STACKS + seconds)

    def _log(self, name: str) -> str:
        with self._lock:
            files = self._seen.logs.get(name, ())
        texts = []
        for file in files:
            with contextlib.suppress(OSError), Path(file).open("rb") as opened:
                opened.seek(max(0, Path(file).stat().st_size - _LOG_BYTES))
                texts.append(opened.read(_LOG_BYTES).decode(errors="replace"))
        if not texts:
            raise NoAnswerError(
                f"the output of {name} goes to the terminal only; start rpcrun with --tee 3 to "
                "keep it"
            )
        return "".join(texts)

    def _answer_elsewhere(self, question: Question, worker: WorkerView) -> object:
        number = str(next(self._numbers))
        with self._lock:
            self._questions[number] = {**question, "node": worker.node}
        try:
            deadline = time.monotonic() + _SECONDS_FOR_OTHERS
            while time.monotonic() < deadline and not self._stop.is_set():
                self._look(fresh=False)
                told = self._others.get(worker.node)
                if told is not None and f"{self._node}:{number}" in told.answers:
                    reply: Mapping[str, Any] = told.answers[f"{self._node}:{number}"]
                    if "error" in reply:
                        raise NoAnswerError(str(reply["error"]))
                    return reply["answer"]
                self._stop.wait(0.2)
        finally:
            with self._lock:
                self._questions.pop(number, None)
        raise NoAnswerError(
            f"the agent on {worker.host} has not answered within {_SECONDS_FOR_OTHERS:.0f} s"
        )

    # --- the thread

    def _run(self) -> None:
        looks_at = time.monotonic() + SECONDS_BETWEEN_LOOKS
        while not self._stop.wait(max(0.0, looks_at - time.monotonic())):
            looks_at = time.monotonic() + SECONDS_BETWEEN_LOOKS
            try:
                is_due = bool(self._policy.least) and time.monotonic() >= self._looks_again
                self._look(fresh=is_due)
                if is_due:
                    self._alarm(self._standstills())
            except Exception as error:  # the job goes on, watched or not
                _logger.warning("watching the job failed: %s: %s", type(error).__name__, error)

    def _look(self, fresh: bool) -> None:
        """Gathers what is wanted, and exchanges it with the other agents."""
        with self._looking:
            wanted = self._is_wanted() or fresh
            if wanted and time.monotonic() - self._gathered >= _SECONDS_FACTS_ARE_NEW:
                self._gather()
            if self._others_now():
                self._meet_others(wanted)
            else:
                self._others.clear()

    def _standstills(self) -> list[Finding]:
        """New standstills, at the one agent that looks for those of the whole job."""
        with self._lock:
            is_first = all(node.number >= self._node for node in self._seen.nodes)
            workers = self._all_workers()
        now = time.monotonic()
        self._looks_again = now + self._policy.least / _LOOKS_IN_A_BUDGET
        if not is_first:
            return []
        findings = self._standstill.look(now, workers)
        ends = self._standstill.soonest(now) + _SECONDS_BEYOND_A_BUDGET
        self._looks_again = min(self._looks_again, ends)
        return findings

    def _is_viewed(self) -> bool:
        return time.monotonic() - self._viewed < _SECONDS_A_VIEWER_COUNTS

    def _is_wanted(self) -> bool:
        """True if somebody looks at the job; calls the other agents, or hears them call."""
        if not self._others_now():
            return self._is_viewed()
        if self._is_viewed() or self._questions:
            self._exchange.call()
        elif self._exchange.is_called():
            self._called = time.monotonic()
        return self._is_viewed() or time.monotonic() - self._called < _SECONDS_A_VIEWER_COUNTS

    def _gather(self) -> None:
        with self._lock:
            seen = self._seen
        names = list(seen.local)
        facts = self._hub.facts(names, _SECONDS_FOR_FACTS)
        now = self._gathered = time.monotonic()
        views = {}
        for worker in seen.workers:
            if worker.name not in seen.local:
                continue
            before = self._views.get(worker.name)
            if worker.name in facts:
                self._heard[worker.name] = now
            told = facts.get(worker.name) or (before.facts if before else None)
            has_called = worker.name in self._hub.pids()
            silent = now - self._heard.get(worker.name, now) if has_called else 0.0
            process = look_at(seen.local[worker.name])
            views[worker.name] = replace(worker, process=process, facts=told, silent_for=silent)
        with self._lock:
            self._views = views

    def _all_workers(self) -> tuple[WorkerView, ...]:
        elsewhere = {
            view.name: view
            for told in self._others.values()
            for view in map(WorkerView.of, told.workers)
        }
        views = []
        for worker in self._seen.workers:
            view = self._views.get(worker.name) or elsewhere.get(worker.name)
            if view is not None and view.life == worker.life and worker.state == "runs":
                views.append(view)
            else:
                views.append(worker)
        return tuple(views)

    # --- other agents

    def _others_now(self) -> list[int]:
        """The numbers of the other agents."""
        with self._lock:
            return [n.number for n in self._seen.nodes if n.number != self._node]

    def _meet_others(self, wanted: bool) -> None:
        """Reads what others say and writes what this agent sees, if that is wanted or is new."""
        with self._lock:
            news = dict(self._questions), dict(self._answers), tuple(self._alarms)
            workers = tuple(asdict(view) for view in self._views.values())
        if not (wanted or self._questions or news != self._told):
            return
        self._hear_others()
        self._exchange.write(lambda number: AgentReport(number, workers, *news))
        self._told = news

    def _wait_for_others(self) -> None:
        """Waits until each of the others has written anew, but not long."""
        before, deadline = dict(self._others), time.monotonic() + _SECONDS_FOR_FIRST_VIEW
        while any(self._others.get(each) is before.get(each) for each in self._others_now()):
            if time.monotonic() > deadline or self._stop.wait(0.1):
                return
            with self._looking:
                self._hear_others()

    def _hear_others(self) -> None:
        others = self._others_now()
        for node, told in self._exchange.read(others).items():
            if self._others.get(node) is not told:
                self._others[node] = told
                self._others_at[node] = time.monotonic()
                self._take_questions(node, told)
        for gone in self._others.keys() - set(others):
            del self._others[gone]
        self._drop_answered_restarts()

    def _drop_answered_restarts(self) -> None:
        """Forgets which workers others were asked to start again, if they know or are gone."""
        with self._lock:
            for number, question in list(self._questions.items()):
                told = self._others.get(question["node"])
                is_known = told is None or f"{self._node}:{number}" in told.answers
                if question["ask"] == "restart" and is_known:
                    del self._questions[number]

    def _take_questions(self, node: int, told: AgentReport) -> None:
        """Answers what another agent asks, aside; forgets what it has been told."""
        mine = {f"{node}:{n}": q for n, q in told.questions.items() if q.get("node") == self._node}
        with self._lock:
            for old in [k for k in self._answers if k.startswith(f"{node}:") and k not in mine]:
                del self._answers[old]
            new = [k for k in mine if k not in self._answers and k not in self._answering]
            self._answering |= set(new)
        for key in new:
            threading.Thread(
                target=self._answer_other, args=(key, mine[key]), name="rpcrun-answer", daemon=True
            ).start()

    def _answer_other(self, key: str, question: Mapping[str, Any]) -> None:
        try:
            if question.get("ask") == "restart":
                self._restart(str(question["worker"]), int(question["life"]))
                reply: dict[str, object] = {"answer": True}
            else:
                worker = self._worker(str(question.get("worker")))
                reply = {"answer": self._answer_here(question, worker)}
        except Exception as error:
            reply = {"error": str(error)}
        with self._lock:
            self._answers[key] = reply
            self._answering.discard(key)

    # --- standstills

    def _alarm(self, findings: Sequence[Finding]) -> None:
        """Says first who stands still, then with which stacks: to be told them may take long."""
        for finding in findings:
            _logger.warning("%s", finding.sentence)
        if not findings:
            return
        with self._lock:
            self._alarms.extend(finding.sentence for finding in findings)
        blamed = list(dict.fromkeys(name for finding in findings for name in finding.blamed))
        with ThreadPoolExecutor(_STACKS_AT_ONCE, "rpcrun-stacks") as pool:
            for text in pool.map(self._stacks_or_state, blamed[:_MOST_STACKS]):
                _logger.warning("%s", text)
        if len(blamed) > _MOST_STACKS:
            _logger.warning("stacks of %d more are left out", len(blamed) - _MOST_STACKS)
        for name in blamed if self._policy.restarts else ():
            self._restart_anywhere(name)

    def _stacks_or_state(self, name: str) -> str:
        """The stacks of a worker; if it does not answer, the state of its process."""
        with self._lock:
            view = next((each for each in self._all_workers() if each.name == name), None)
        if view is not None and view.process is not None and view.silent_for > _SILENT:
            state = view.process.state
            return f"no stacks of {name}: it does not answer; in the kernel its state is {state}"
        try:
            return f"stacks of {name}:\n{self.answer({'ask': 'stacks', 'worker': name})}"
        except (NoAnswerError, ValueError) as error:
            return f"no stacks of {name}: {error}"

    def _restart_anywhere(self, name: str) -> None:
        worker = self._worker(name)
        if worker.node == self._node:
            self._restart(name, worker.life)
            return
        with self._lock:
            self._questions[str(next(self._numbers))] = {
                "ask": "restart",
                "worker": name,
                "life": worker.life,
                "node": worker.node,
            }

    def _restart(self, name: str, life: int) -> None:
        _logger.warning("%s stands still and is killed, to start again", name)
        with self._lock:
            self._restarts.add((name, life))
