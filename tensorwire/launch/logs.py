"""Keeps the output of each worker: a folder for each of its lives.

``LOG_DIR/RUN_ID_xxxx/ROLE/NUMBER/attempt_LIFE/`` holds ``stdout.log``, ``stderr.log`` and
``error.json`` of one life of one worker, as far as they are asked for. Nothing is overwritten.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from tensorwire.launch.flags import Shown, Streams
from tensorwire.launch.plan import Seat

_TO_TERMINAL = ""


class WorkerLogs(LogsSpecs):
    """The files that one life of one worker writes.

    Args:
        folder: of this life; made if it is not there.
        redirects: streams that go to files.
        tee: streams that go to files and to the terminal.
        is_shown: the terminal shows this worker.
    """

    def __init__(self, folder: Path, redirects: Std, tee: Std, is_shown: bool) -> None:
        super().__init__(str(folder), redirects, tee, None)
        self._folder, self._to_file, self._to_both = folder, redirects | tee, tee
        self._is_shown = is_shown

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Says where the streams of the one process go."""
        self._folder.mkdir(parents=True, exist_ok=True)
        error_file = str(self._folder / "error.json")
        envs[0]["TORCHELASTIC_ERROR_FILE"] = error_file
        out, tee_out = self._place(Std.OUT, "stdout.log")
        err, tee_err = self._place(Std.ERR, "stderr.log")
        return LogsDest({0: out}, {0: err}, tee_out, tee_err, {0: error_file})

    def _place(self, stream: Std, name: str) -> tuple[str, dict[int, str]]:
        path = str(self._folder / name)
        if not self._to_file & stream:
            return (_TO_TERMINAL if self._is_shown else os.devnull), {}
        return path, ({0: path} if self._to_both & stream and self._is_shown else {})


def _any_of(texts: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(text in line for text in texts)


@dataclass(frozen=True, slots=True)
class Output:
    """Says what becomes of the workers' output.

    Args:
        folder: for the logs of all jobs. Default a temporary one, which goes with the job.
        redirects: streams that go to files. Default none.
        tee: streams that go to files and to the terminal. Default none.
        shown: workers whose output the terminal shows. Default all.
        prefix: of each line that is shown from a file; ``${role_name}``, ``${local_rank}``,
            ``${rank}`` and ``${worker_name}`` stand for the worker's. Default its name.
        stdout_filters: lines of ``tee`` with one of these texts go to ``filtered_stdout.log``.
        stderr_filters: likewise.
    """

    folder: str | None = None
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    shown: Shown = field(default_factory=Shown)
    prefix: str | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()


class Logs:
    """The output of one agent's workers.

    Args:
        folder: for the logs of all jobs; None for a temporary one.
        run_id: of the job.
        redirects: what goes to files.
        tee: what goes to files and to the terminal.
        shown: whom the terminal shows.
        prefix: of each line that is shown from a file; ``${role_name}``, ``${local_rank}``,
            ``${rank}`` and ``${worker_name}`` stand for the worker's. Default its name.
        filters: texts; lines of stdout, or stderr, that have one go to a file for all.
    """

    def __init__(
        self,
        folder: str | None,
        run_id: str,
        redirects: Streams,
        tee: Streams,
        shown: Shown,
        prefix: str | None = None,
        filters: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> None:
        if folder:
            os.makedirs(folder, exist_ok=True)
        name = run_id.replace(os.sep, "_")
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=folder or None))
        self.is_temporary = not folder
        self._redirects, self._tee, self._shown = redirects, tee, shown
        self._prefix = Template(prefix or "[${worker_name}]:")
        self._filters = filters
        self._filtered: dict[str, TextIO] = {}

    def of(self, seat: Seat, local_rank: int) -> WorkerLogs:
        """The files that the present life of a worker writes."""
        return WorkerLogs(
            self.folder / seat.role / str(seat.number) / f"attempt_{seat.life - 1}",
            self._redirects.of(seat.role, local_rank),
            self._tee.of(seat.role, local_rank),
            self._shown.has(seat.role, local_rank),
        )

    def prefix(self, seat: Seat, local_rank: int) -> str:
        """The text that lines of a worker begin with on the terminal."""
        return self._prefix.safe_substitute(
            role_name=seat.role, local_rank=local_rank, rank=seat.id, worker_name=seat.name
        )

    def filtering(self, seat: Seat, local_rank: int, logs: WorkerLogs) -> list[TailLog]:
        """Begins to copy the lines that the filters ask for."""
        names = ("stdout", "stderr")
        streams = (Std.OUT, Std.ERR)
        tails = []
        for name, stream, texts in zip(names, streams, self._filters, strict=True):
            if not texts or not self._tee.of(seat.role, local_rank) & stream:
                continue
            if name not in self._filtered:
                path = self.folder / f"filtered_{name}.log"
                self._filtered[name] = open(path, "a", errors="replace", buffering=1)  # noqa: SIM115
            tail = TailLog(
                seat.name,
                {0: str(Path(logs.root_log_dir) / f"{name}.log")},
                self._filtered[name],
                {0: self.prefix(seat, local_rank)},
                log_line_filter=_any_of(texts),
            )
            tails.append(tail.start())
        return tails

    def close(self) -> None:
        """Closes the files that are shared."""
        for file in self._filtered.values():
            file.close()
