"""Says whether a job that was attacked noticed anything, and describes its course."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from chaos.attack.job import Job, Observed
from chaos.attack.surroundings import Process
from chaos.attack.training import SERVERS, TRAINERS, train
from rpc.testing import as_worker, local_group

_MOST_STORE_MB = 200
"""The bound that SECURITY.md gives."""
_MIB = 1 << 20


def undisturbed(last: int) -> list[Tensor]:
    """The rows of the same training in this process, without launcher, store or stranger."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "last").write_text(str(last))
        rows: dict[str, Tensor] = {}
        with local_group(*SERVERS, *TRAINERS) as agents:

            def run(number: int) -> None:
                with as_worker(agents[len(SERVERS) + number]):
                    rows[TRAINERS[number]] = train(folder, TRAINERS[number])

            threads = [threading.Thread(target=run, args=(n,)) for n in range(len(TRAINERS))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return [rows[name] for name in TRAINERS]


def violations(job: Job, seen: Observed) -> Iterator[str]:
    """Names all that must not be."""
    if seen.code != 0:
        yield f"the job ended with {seen.code}"
    rows = [job.folder / f"{name}.rows" for name in TRAINERS]
    if not all(each.exists() for each in rows):
        yield "there are no rows of all trainers"
    elif not all(map(torch.equal, map(torch.load, rows), undisturbed(seen.last))):
        yield "the rows are others than those of an undisturbed run"
    if (peak := seen.peak.get("store", 0) // _MIB) >= _MOST_STORE_MB:
        yield f"a store's process took {peak} MiB, more than {_MOST_STORE_MB}"
    if shown := seen.counts.get("values of ours that torch's store showed", 0):
        yield f"torch's store showed {shown} values of ours"
    lost = [line.partition(": ")[0] for name in TRAINERS for line in _lost(job, name)]
    for name in {*lost}:
        if lost.count(name) > len(TRAINERS) * seen.killed.count(name):
            yield f"{name} was declared lost {lost.count(name)} times; it was killed " + (
                f"{seen.killed.count(name)} times, and {len(TRAINERS)} trainers hear of each"
            )
    for line in job.said.splitlines():
        if "Traceback" in line or "Error" in line:
            yield f"it printed: {line}"


def _lost(job: Job, trainer: str) -> list[str]:
    path = job.folder / f"{trainer}.lost"
    return path.read_text().splitlines() if path.exists() else []


def describe(job: Job, seen: Observed, may_listen: bool) -> Iterator[str]:
    """The course of the job, in lines."""
    where, (connections, datagrams) = seen.doors, seen.heard
    yield (
        f"the job listens at {len(where.tcp)} ports of TCP, {len(where.udp)} of UDP and "
        f"{len(where.unix)} Unix sockets"
    )
    if may_listen:
        yield f"{connections} connections and {datagrams} datagrams of its members were recorded"
    else:
        yield "nothing of its members was recorded, as only root may do that"
    for what, times in sorted(seen.counts.items()):
        yield f"{times:10,}  {what}"
    pace = f"{seen.calm:.1f} a second before, {seen.attacked:.1f} during the attack"
    yield f"{seen.last} steps; {pace}"
    yield f"killed and back: {len(seen.killed)} servers"
    for kind in ("store", "agent", "worker", "signs of life"):
        before = [each for each in seen.before if each.kind == kind]
        after = [each for each in seen.after if each.kind == kind]
        yield (
            f"{kind}: {_megabytes(before)} before, {_megabytes(after)} after, at most "
            f"{seen.peak.get(kind, 0) / _MIB:.0f} MiB"
        )
    lines = job.said.splitlines()
    yield f"the job printed {len(lines)} lines" + (", of which the last are:" if lines else "")
    yield from (f"    {line}" for line in lines[-10:])


def _megabytes(found: Sequence[Process]) -> str:
    """The memory of each, and how many descriptors they have."""
    sizes = ", ".join(f"{each.memory / _MIB:.0f}" for each in found)
    return f"{sizes or 'none'} MiB ({sum(each.descriptors for each in found)} descriptors)"
