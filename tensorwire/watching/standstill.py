"""Decides which workers of a job stand still, and why. Sans-IO: views in, findings out.

A worker's *budget* is what its own past allows: ten times the longest pause between two steps that
it has made, as it measured that itself, and at least the job's stall timeout. A worker without a
first step has none, so a slow first step raises nothing. Three things are known to take long and
end a suspicion: a phase that the program or a library has named (``rpc.slow_phase``, a snapshot, a
resize), code that is being compiled, and a process that computes: it took much processor time
lately outside of waits.

Of those whose budget is used up, the ones that others wait for are to blame: the waits are
followed to whoever waits for nobody, or round a cycle. Nobody is blamed while one of the three
things explains why it takes long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import rpc
import tensorwire
from tensorwire.watching.views import WorkerView

_TIMES: Final = 10.0
_HISTORY_SECONDS: Final = 60.0
_COMPUTES: Final = 0.3
_LONG_WAIT: Final = 1.0
_COMPILERS: Final = (
    "torch/_dynamo/",
    "torch/_inductor/",
    "numba/core/",
    "torch/utils/cpp_extension",
)
_COLLECTIVES: Final = ("torch/distributed/distributed_c10d.py",)
_LOADERS: Final = ("torch/utils/data/",)
_OURS: Final = (
    *(f"{Path(each.__file__ or '').parent}/" for each in (rpc, tensorwire)),
    "threading.py",
    "concurrent/futures",
)
"""Parts of the files that are passed over; on other machines ours are mostly at the same place."""
_RUNS: Final = "runs"
_COLLECTING: Final = 1.0
_SERVER: Final = "parameter server"
_OWES_A_PUSH: Final = ", and has neither pushed nor called cluster.finish()"


@dataclass(frozen=True, slots=True)
class Finding:
    """A standstill.

    Args:
        sentence: who stands still and why.
        blamed: the workers that the others wait for.
        waiting: the others whose budget is used up.
    """

    sentence: str
    blamed: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(slots=True)
class _Past:
    """The steps of a worker that were seen so far.

    Args:
        life: the life that this is about.
        since: when it was first seen.
        last: when it made its last step.
        longest: the longest pause between two steps.
        cpu: processor seconds, by the time of the look, as far back as its budget goes.
    """

    life: int
    since: float
    last: float
    longest: float = 0.0
    cpu: list[tuple[float, float]] = field(default_factory=list)


class Standstill:
    """Watches the workers of one job.

    Args:
        least: the least budget in seconds.
        at_once: whether budgets count before a minute of history: somebody named ``least``.
    """

    def __init__(self, least: float, at_once: bool = False) -> None:
        self._least = least
        self._history = 0.0 if at_once else _HISTORY_SECONDS
        self._pasts: dict[str, _Past] = {}
        self._told: dict[str, bool] = {}

    def look(self, now: float, workers: Iterable[WorkerView]) -> list[Finding]:
        """Takes in how the workers are; returns each standstill that was not told before.

        One that was told before others were seen to wait for it is told once more.
        """
        known = {worker.name: worker for worker in workers if worker.state == _RUNS}
        for gone in self._pasts.keys() - known.keys():
            del self._pasts[gone]
        for worker in known.values():
            self._note(now, worker)
        still = {name for name, worker in known.items() if self._stands(now, worker)}
        if not still:
            self._told = {}
            return []
        slow = {name for name, worker in known.items() if self._takes_long(worker)}
        findings = [f for f in _findings(known, still) if not slow.issuperset(f.blamed)]
        new = [each for each in findings if self._is_news(each)]
        self._told = {
            name: bool(each.waiting) or self._told.get(name, False)
            for each in findings
            for name in each.blamed
        }
        return [
            Finding(f"no progress for {self._pause(now, each):.0f} s: {each.sentence}",
                    each.blamed, each.waiting)
            for each in new
        ]  # fmt: skip

    def _is_news(self, finding: Finding) -> bool:
        known = [self._told.get(name) for name in finding.blamed]
        return None in known or (bool(finding.waiting) and False in known)

    def soonest(self, now: float) -> float:
        """The time when the next budget ends, if nobody makes a step before; infinity for never."""
        ends = (past.last + self.budget(name) for name, past in self._pasts.items())
        return min((end for end in ends if end >= now), default=math.inf)

    def budget(self, name: str) -> float:
        """Seconds without a step after which a worker is suspected."""
        past = self._pasts.get(name)
        return self._least if past is None else max(self._least, _TIMES * past.longest)

    def _pause(self, now: float, finding: Finding) -> float:
        names = (*finding.waiting, *finding.blamed)
        return max(now - self._pasts[name].last for name in names if name in self._pasts)

    def _note(self, now: float, worker: WorkerView) -> None:
        past = self._pasts.get(worker.name)
        if past is None or past.life != worker.life:
            past = self._pasts[worker.name] = _Past(worker.life, now, last=now)
        progress = _progress(worker)
        past.longest = float(progress.get("longest", 0.0))
        heard = now - worker.silent_for
        past.last = heard if progress.get("phase") else heard - float(progress.get("age", 0.0))
        if worker.process is not None:
            past.cpu.append((now, worker.process.cpu_seconds))
            past.cpu = [(t, used) for t, used in past.cpu if t >= now - self.budget(worker.name)]

    def _stands(self, now: float, worker: WorkerView) -> bool:
        past = self._pasts[worker.name]
        if not _progress(worker).get("steps") or now - past.since < self._history:
            return False
        return now - past.last > self.budget(worker.name) and not self._takes_long(worker)

    def _takes_long(self, worker: WorkerView) -> bool:
        """True if the worker may take long: it is in a slow phase, compiles or computes."""
        is_known = worker.silent_for <= self.budget(worker.name)  # or else it may have left both
        told = bool(_progress(worker).get("phase")) or _in_files(worker, _COMPILERS)
        return (is_known and told) or self._computes(worker)

    def _computes(self, worker: WorkerView) -> bool:
        """True if it took much processor time lately, outside of a collection or a collective."""
        past = self._pasts[worker.name]
        if len(past.cpu) < 2 or _collecting(worker) or _in_files(worker, _COLLECTIVES):
            return False
        (begun, before), (ended, after) = past.cpu[0], past.cpu[-1]
        return after - before >= _COMPUTES * (ended - begun) > 0


# --- who waits for whom


def waits(worker: WorkerView, names: Iterable[str]) -> set[str]:
    """The workers that one waits for: of its calls, of its exchange with servers, of its steps."""
    facts = worker.facts or {}
    known = set(names)
    waited_for = {str(row["to"]) for row in facts.get("waiting", ()) if row["age"] >= _LONG_WAIT}
    for source in facts.get("sources", {}).values():
        waited_for |= set(map(str, source.get("waits_for", ())))
    return (waited_for & known) - {worker.name}


def _findings(known: Mapping[str, WorkerView], still: set[str]) -> list[Finding]:
    """One finding for each group that is to blame; those found twice say who waits for them."""
    edges = {name: waits(worker, known) for name, worker in known.items()}
    led: dict[frozenset[str], set[str]] = {}
    for name in sorted(still):
        led.setdefault(frozenset(_follow(name, edges)), set()).add(name)
    findings: dict[frozenset[str], Finding] = {}
    for blamed, names in led.items():
        finding = explain(known, set(blamed), names, still)
        key = frozenset(finding.blamed)
        if key not in findings or len(finding.waiting) > len(findings[key].waiting):
            findings[key] = finding
    return list(findings.values())


def _follow(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Goes along waits to whoever waits for nobody, or to the cycle that it comes to."""
    path = [name]
    while edges[path[-1]]:
        following = min(edges[path[-1]])
        if following in path:
            return set(path[path.index(following) :])
        path.append(following)
    return {path[-1]}


# --- in words


def explain(
    known: Mapping[str, WorkerView], blamed: set[str], led: set[str], still: set[str]
) -> Finding:
    """One sentence about a standstill, and whom it concerns.

    Args:
        known: all workers.
        blamed: those to blame.
        led: those whose waits lead to them.
        still: all whose budget is used up.
    """
    waiting = tuple(sorted(led - blamed))
    if len(blamed) > 1:
        names = _cycle(known, blamed)
        sentence = f"{' waits for '.join(names)}: a cycle, each in a call to the next"
        return Finding(sentence, tuple(names[:-1]), waiting)
    (name,) = blamed
    others = f"{_listed(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {name}, which "
    missing = _missing_from_collective(known, known[name], still)
    if missing is not None:
        return missing
    why = reason(known[name]) + (_OWES_A_PUSH if _owes_a_push(name, known) else "")
    return Finding((others if waiting else f"{name} ") + why, (name,), waiting)


def _owes_a_push(name: str, known: Mapping[str, WorkerView]) -> bool:
    """True if parameter servers wait for a push of that worker."""
    sources = [(each.facts or {}).get("sources", {}) for each in known.values()]
    return any(name in each.get(_SERVER, {}).get("waits_for", ()) for each in sources)


def reason(worker: WorkerView) -> str:
    """The reason why a worker that waits for nobody does not go on, as the end of a sentence."""
    process = worker.process
    if process is not None and process.state in ("T", "t"):
        return "is stopped (kernel state T, by SIGSTOP or a debugger)"
    if process is not None and process.state == "D":
        return "waits in the kernel (state D), as for a disk or a network file system"
    if worker.silent_for > _COLLECTING:
        return (
            f"has not answered for {worker.silent_for:.0f} s although its process runs: a call "
            "into C holds the interpreter's lock"
        )
    collecting = _collecting(worker)
    if collecting:
        return f"has been collecting garbage for {collecting:.0f} s"
    if _in_files(worker, _LOADERS):
        return "waits for its data loader"
    serving = [row for row in (worker.facts or {}).get("serving", ()) if row["age"] >= _LONG_WAIT]
    if serving:
        row = max(serving, key=lambda each: float(each["age"]))
        since = f"for {row['age']:.0f} s{_where(worker)}"
        return f"has been running {row['call']} for {row['from']} {since}"
    return f"is in {_place(_main(worker))}"


def _where(worker: WorkerView) -> str:
    """The place of a handler that takes long, as far as a thread of the pool shows one."""
    for thread in (worker.facts or {}).get("threads", ()):
        stack = thread["stack"]
        if str(thread["name"]).startswith("rpc-") and any("service.py" in line for line in stack):
            return f", now in {_place(stack)}"
    return ""


def _missing_from_collective(
    known: Mapping[str, WorkerView], blamed: WorkerView, still: set[str]
) -> Finding | None:
    """Names those of a role that are not in the collective in which the others are."""
    inside = {n for n in still if _in_files(known[n], _COLLECTIVES)}
    role = {n for n, worker in known.items() if worker.role == blamed.role}
    outside = role - inside
    if blamed.name not in inside or not outside:
        return None
    operation = next(
        line.split(" ")[0]
        for line in reversed(_main(blamed))
        if any(each in line for each in _COLLECTIVES) and not line.startswith("wrapper ")
    )
    texts = [f"{name} {reason(known[name])}" for name in sorted(outside)]
    sentence = (
        f"{_listed(tuple(sorted(inside)))} {'wait' if len(inside) > 1 else 'waits'} in "
        f"{operation} of a process group; missing from it: {'; '.join(texts)}"
    )
    return Finding(sentence, tuple(sorted(outside)), tuple(sorted(inside)))


def _cycle(known: Mapping[str, WorkerView], blamed: set[str]) -> list[str]:
    names = [min(blamed)]
    while len(names) <= len(blamed):
        names.append(min(waits(known[names[-1]], blamed)))
    return names


def _listed(names: tuple[str, ...]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _progress(worker: WorkerView) -> Mapping[str, Any]:
    progress: Mapping[str, Any] = (worker.facts or {}).get("progress", {})
    return progress


def _collecting(worker: WorkerView) -> float:
    seconds = float((worker.facts or {}).get("collecting", 0.0))
    return seconds if seconds >= _COLLECTING else 0.0


def _main(worker: WorkerView) -> list[str]:
    """The main thread's stack, innermost first."""
    for thread in (worker.facts or {}).get("threads", ()):
        if thread["name"] == "MainThread":
            return list(thread["stack"])
    return []


def _in_files(worker: WorkerView, parts: tuple[str, ...]) -> bool:
    return any(part in line for line in _main(worker) for part in parts)


def _place(stack: list[str]) -> str:
    """The innermost function that is the program's, or else the innermost one."""
    for line in stack:
        if not any(part in line for part in _OURS):
            return line
    return stack[0] if stack else "code that shows no Python stack"
