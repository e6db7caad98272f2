"""Finds the agent that the running code belongs to.

Owns the one piece of mutable module state: the process's default agent, set by
``init_rpc`` and cleared by ``shutdown``, and the store that its group met at.
Handlers and callbacks of an agent see that agent, whatever the default is, because
it is in their context.

This lies below all that agents are made of, and so knows nothing of them: who asks for the
current one says what it takes it for.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rpc.errors import NotInitializedError, RpcError
from rpc.runtime import forks as process_forks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_of_context: contextvars.ContextVar[Any] = contextvars.ContextVar("rpc_agent", default=None)
of_context = _of_context.get
"""The agent of the running context; None outside of handlers and callbacks."""


class Process:
    """The process-wide default, and what outlives it."""

    agent: Any = None
    lock = threading.RLock()  # a signal handler may shut down
    joining: bool = False
    """True while a thread is in ``init_rpc``."""
    joined: bool = False
    """True once ``init_rpc`` was called, however it ended."""
    parent: str = ""
    """The worker that this process was forked from."""
    store: Store | None = None
    """The last group's store, which others may still need when this process has left."""


def find_agent() -> Any:
    """The agent of the running context, or else the process's; None without either."""
    agent = _of_context.get()
    return Process.agent if agent is None else agent


def current_agent() -> Any:
    """The agent of the running context, or else the process's.

    Raises:
        NotInitializedError: there is none.
    """
    agent = _of_context.get()
    if agent is None:
        agent = Process.agent
    if agent is None:
        raise NotInitializedError(Process.parent)
    return agent


def set_process_agent(agent: Any) -> None:
    """Makes ``agent`` the process's default; None clears it."""
    Process.agent = agent


@contextmanager
def leaving(agent: Any) -> Iterator[bool]:
    """Clears the process's agent after the block, until which nobody takes its place.

    Yields whether it is ``agent``: if another thread has ended that one's session, this
    process may be in its next by now, which is left alone.
    """
    with Process.lock:
        is_current = Process.agent is agent
        yield is_current
        if is_current:
            Process.agent = None


def forked_from(agent: Any) -> None:
    """Notes that this process is a forked child of the agent's: nothing here belongs to it."""
    _of_context.set(None)
    if Process.agent in (agent, None):
        Process.agent, Process.parent = None, agent.info.name


class _KeptStore(process_forks.ForkAware):
    """The kept store, whose threads a forked child does not have, but would join."""

    def after_fork_in_child(self) -> None:
        """Leaves the store to the parent, and keeps it from being freed here."""
        process_forks.keep_for_good(Process.store)
        Process.store = None


_kept_store = _KeptStore()


def keep_store(store: Store) -> None:
    """Keeps a group's store until the next group's takes its place.

    Its host may leave before the others have, and may meet them there again.
    """
    process_forks.join(_kept_store)
    Process.store = store


@contextmanager
def joining() -> Iterator[None]:
    """Keeps the place of the process's agent for the block, which may fill it.

    Raises:
        RpcError: it is taken, or another thread joins.
    """
    with Process.lock:
        if find_agent() is not None:
            raise RpcError("RPC is already initialized; call rpc.shutdown() first")
        if Process.joining:
            raise RpcError("RPC is being initialized by another thread; once is enough")
        Process.joining = Process.joined = True
    try:
        yield
    finally:
        Process.joining = False


def joined_before() -> bool:
    """True if ``init_rpc`` was called in this process, however it ended."""
    return Process.joined


def enter_agent(agent: Any) -> contextvars.Token[Any]:
    """Makes ``agent`` current in the running context; see :func:`leave_agent`."""
    return _of_context.set(agent)


def leave_agent(token: contextvars.Token[Any]) -> None:
    """Undoes :func:`enter_agent`."""
    _of_context.reset(token)


def context_of(agent: Any) -> contextvars.Context:
    """A fresh context in which ``agent`` is the current one."""
    context = contextvars.Context()
    context.run(_of_context.set, agent)
    return context
