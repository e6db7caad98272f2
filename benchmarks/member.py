"""One process of a group: joins it, then does what it is told, line by line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import TextIO, cast

import torch

from benchmarks import counts, places, timeline
from benchmarks.bindings import OURS, Api, load, make_main_job_importable
from benchmarks.commands import Answer, Command, Place
from benchmarks.workloads import ROWS, Operation

_WARM_UP_SECONDS = 0.3
_WARM_UP_LEAST = 3
_PR_SET_PDEATHSIG = 1


def serve(place: Place) -> None:
    """Obey commands until told to leave, or until nobody is there to give any."""
    answers = _keep_standard_output_for_answers()
    die_with_parent()
    torch.set_num_threads(1)
    if place.counts:
        counts.begin()
    if place.timeline:
        timeline.begin()
    api = _join(place)
    operations: dict[str, Operation] = {}
    print(Answer().to_json(), file=answers, flush=True)
    for line in sys.stdin:
        command = Command.from_json(line)
        if command.verb == "leave":
            break
        answer = _obey(command, api, operations, place.timeline)
        print(answer.to_json(), file=answers, flush=True)
    else:
        os._exit(1)
    operations.clear()
    if not place.column.raw:
        api.rpc.shutdown()


def _obey(
    command: Command, api: Api, operations: dict[str, Operation], is_recorded: bool
) -> Answer:
    match command.verb:
        case "prepare":
            operation = ROWS[command.row].prepare(api, command.caller)
            if is_recorded:
                operation = timeline.watched(operation)
            operations[command.row] = operation
            return _measure(operation, _WARM_UP_SECONDS, _WARM_UP_LEAST)
        case "measure":
            return _measure(operations[command.row], command.seconds, command.least)
        case "count":
            return Answer(calls=counts.take())
        case "record":
            return Answer(spans=tuple(timeline.take()))
        case "locate":
            return Answer(core=places.take())
        case "forget":
            operations.clear()
            return Answer()
    raise ValueError(f"no such command: {command}")


def _measure(operation: Operation, seconds: float, least: int) -> Answer:
    clock = time.perf_counter_ns
    durations: list[int] = []
    begin = clock()
    end = begin + int(seconds * 1e9)
    while (start := clock()) < end or len(durations) < least:
        operation()
        durations.append(clock() - start)
    return Answer((clock() - begin) / 1e9, tuple(durations))


def _join(place: Place) -> Api:
    column = place.column
    api = load(OURS if column.raw else column.library)
    make_main_job_importable(api)
    if not column.raw:
        meeting = {"init_method": f"file://{place.meeting_file}"}
        api.join(place.rank, place.size, column.backend, column.options | meeting)
    return api


def _keep_standard_output_for_answers() -> TextIO:
    """Send what anyone else prints to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return cast(TextIO, answers)


def die_with_parent() -> None:
    """A stopped process cannot see that its parent is gone; the kernel can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
