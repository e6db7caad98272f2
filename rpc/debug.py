"""Counters of a running worker as text, under the names that ``torch.distributed.rpc`` gives them.

For people ``rpc.debug_info()`` says more; these are for programs that read the
original's. Everything is looked up when asked for, nothing is kept up to date.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rpc.calls.extension_set import AUTOGRAD
from rpc.current import current_agent

if TYPE_CHECKING:
    from rpc.agent import Agent

_GIL_SAMPLES = 16


def _get_debug_info() -> dict[str, str]:
    """Everything: references, the agent, distributed autograd."""
    agent = current_agent()
    autograd = agent.extensions.load(AUTOGRAD).debug_info()
    return {
        **_rref_context_get_debug_info(),
        **agent.get_debug_info(),
        **{name: str(count) for name, count in autograd.items()},
    }


def _rref_context_get_debug_info() -> dict[str, str]:
    """How many references of each kind this worker knows."""
    references = current_agent().references
    counts = references.counts()
    return {
        "num_owner_rrefs": str(references.report.shared_values()),
        "num_pending_users": str(counts.num_pending_users),
        "num_pending_futures": str(references.creations_under_way()),
        "num_forks": str(counts.num_forks),
    }


def enable_gil_profiling(flag: bool) -> None:
    """Lets debug info tell how long a thread of this worker waits for the interpreter lock.

    Args:
        flag: True to measure from now on, False to stop.
    """
    current_agent().gil_profiling = flag


def agent_debug_info(agent: Agent) -> dict[str, str]:
    """What an agent's threads and calls are doing."""
    threads = agent.executor.thread_count()
    serving = len(agent.callee.serving())
    info = {
        "agent.thread_pool_size": str(agent.options.num_worker_threads),
        "agent.num_idle_threads": str(max(0, threads - serving)),
        "agent.num_pending_requests": str(len(agent.caller.outstanding())),
        "agent.client_active_calls": str(len(agent.caller.outstanding())),
        "agent.server_active_calls": str(serving),
    }
    if agent.gil_profiling:
        info["agent.gil_average_wait_time_us"] = f"{_gil_wait_seconds() * 1e6:.0f}"
    return info


def _gil_wait_seconds() -> float:
    """How long it takes now to get the interpreter lock back after letting it go."""
    start = time.perf_counter()
    for _ in range(_GIL_SAMPLES):
        time.sleep(0)
    return (time.perf_counter() - start) / _GIL_SAMPLES
