"""Runs programs whose interpreters end as any does, with torch imported beforehand.

The processes of ``multiprocessing`` end without it: no exit hooks, nothing finalized. These go
through the end of a process as ``python program.py`` does, and spare the seconds that importing
torch takes.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.processes import ready_made


@dataclass(frozen=True, slots=True)
class Ended:
    """A program's exit status, and all that it printed."""

    returncode: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program under way."""

    process: BaseProcess
    out: Path
    err: Path

    def wait(self, seconds: float = 60.0) -> Ended:
        """Waits for its end; kills it when the time is over."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        status = self.process.exitcode
        self.process.close()
        return Ended(status, self.out.read_text(), self.err.read_text())


def start_program(folder: Path, code: str, *arguments: str) -> Program:
    """Starts a program. Needs the fixture ``process_server``.

    Args:
        folder: where it and its output are kept, and where it finds modules.
        code: of the program.
        arguments: of its command line.
    """
    name = "-".join(["program", *arguments])
    file = folder / f"{name}.py"
    file.write_text(code)
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    process = ready_made().Process(target=_run, args=(file, arguments, out, err))
    process.start()
    return Program(process, out, err)


def run_program(folder: Path, code: str, *arguments: str) -> Ended:
    """Runs a program to its end; see :func:`start_program`."""
    return start_program(folder, code, *arguments).wait()


def _run(file: Path, arguments: tuple[str, ...], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.parent))
    ctypes.pythonapi.Py_Exit(_status_of(file))


def _status_of(file: Path) -> int:
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
