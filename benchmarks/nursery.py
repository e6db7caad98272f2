"""Starts processes of a column: imports what they need, once, and forks them.

What processes with one parent run lies at the same addresses in all of them. That matters
where they share a core: a processor's branch predictor goes by address, and what one
interpreter has taught it misleads another whose code lies elsewhere. Two that took turns
on a core, with a switch after each empty call, needed 42 µs for what takes 24 µs alone,
three 60 µs; with code at the same addresses two needed 25 µs, three 29 µs.

A process of its own (``python -m benchmarks.nursery``), which ends when all it started have.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from benchmarks.bindings import OURS, load
from benchmarks.commands import Birth
from benchmarks.member import die_with_parent, serve


def _main(births: Sequence[Birth]) -> None:
    die_with_parent()
    column = births[0].place.column
    load(OURS if column.raw else column.library)
    for module in births[0].place.modules:
        importlib.import_module(module)
    for birth in births:
        if not os.fork():
            _live(birth, births)
    for birth in births:
        os.close(birth.commands)
        os.close(birth.answers)
    for _ in births:
        os.wait()


def _live(birth: Birth, births: Sequence[Birth]) -> None:
    """In the new process; never returns."""
    status = 1
    try:
        log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, standard in ((birth.commands, 0), (birth.answers, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.close(log)
        for each in births:
            os.close(each.commands)
            os.close(each.answers)
        serve(birth.place)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main([Birth.from_json(text) for text in sys.argv[1:]])
