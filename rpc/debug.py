"""Counters of a running worker as text, under the names that ``torch.distributed.rpc`` gives them.

For people ``rpc.debug_info()`` says more; these are for programs that read the
original's. Everything is looked up when asked for, nothing is kept up to date.
"""

from __future__ import annotations

import time

from rpc.current import current_agent
from rpc.extensions import AUTOGRAD

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
    """Counts the references of each kind that this worker knows."""
    references = current_agent().references
    counts = references.counts()
    return {
        "num_owner_rrefs": str(references.report.shared_values()),
        "num_pending_users": str(counts.num_pending_users),
        "num_pending_futures": str(references.creations.under_way()),
        "num_forks": str(counts.num_forks),
    }


def enable_gil_profiling(flag: bool) -> None:
    """Lets debug info tell how long a thread of this worker waits for the interpreter lock.

    Args:
        flag: True to measure from now on, False to stop.
    """
    current_agent().report.gil_profiling = flag


def gil_wait_seconds() -> float:
    """Measures how long it takes now to get the interpreter lock back after letting it go."""
    start = time.perf_counter()
    for _ in range(_GIL_SAMPLES):
        time.sleep(0)
    return (time.perf_counter() - start) / _GIL_SAMPLES
