"""Brings a worker to rest whose process ends without ``shutdown``.

A daemon thread that comes back from an operator of torch after the interpreter has ended
is ended by Python in the middle of C++, which aborts the process. So once the program's
own exit hooks have run, nothing more is begun, and what runs is waited for.
"""

from __future__ import annotations

import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpc.agent import Agent

SECONDS_TO_END = 1.0
"""What handlers get to end in, all together. One in an operator for longer aborts its process."""
_SECONDS_FOR_THE_IDLE = 0.1
"""What each kind of thread gets at least, although others needed all of that."""


def await_end(agent: Agent) -> weakref.finalize[[], Agent]:
    """Brings ``agent`` to rest when this process ends; ``detach`` what is returned if it closes.

    By a finalizer, as these run after the program's own exit hooks, which may still call
    and shut down. What a forked child has of its parent's agent is not its to end.
    """
    return weakref.finalize(agent, partial(_process_ends, weakref.ref(agent), os.getpid()))


def _process_ends(agent: weakref.ref[Agent], process: int) -> None:
    running = agent()
    if running is not None and process == os.getpid():
        _bring_to_rest(running, time.monotonic() + SECONDS_TO_END)


def _bring_to_rest(agent: Agent, until: float) -> None:
    """Tells nobody: to the others, this worker is lost."""
    agent.caller.close("the process of this worker ended")  # handlers may wait for calls
    for close in (
        agent.event_loop.close,
        partial(agent.transport.close, 0.0),
        agent.executor.close,
        agent.system_executor.close,
    ):
        close(max(_SECONDS_FOR_THE_IDLE, until - time.monotonic()))
