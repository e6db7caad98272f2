"""Which agent the code that is running belongs to.

Owns the one piece of mutable module state: the process's default agent, set by
``init_rpc`` and cleared by ``shutdown``, and the store that its group met at.
Handlers and callbacks of an agent see that agent, whatever the default is, because
it is in their context.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rpc.errors import NotInitializedError, RpcError
from rpc.runtime import forks as process_forks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rpc.agent import Agent

_of_context: contextvars.ContextVar[Agent | None] = contextvars.ContextVar(
    "rpc_agent", default=None
)


class _Process:
    """The process-wide default, and what outlives it."""

    agent: Agent | None = None
    lock = threading.RLock()  # a signal handler may shut down
    joining: bool = False
    """A thread is in ``init_rpc``."""
    joined: bool = False
    """``init_rpc`` was called, however it ended."""
    parent: str = ""
    """The worker that this process was forked from."""
    store: Store | None = None
    """The last group's store, which others may still need when this process has left."""


def find_agent() -> Agent | None:
    """The agent of the running context, or else the process's; None without either."""
    agent = _of_context.get()
    return _Process.agent if agent is None else agent


def current_agent() -> Agent:
    """The agent of the running context, or else the process's.

    Raises:
        NotInitializedError: there is none.
    """
    agent = _of_context.get()
    if agent is None:
        agent = _Process.agent
    if agent is None:
        raise NotInitializedError(_Process.parent)
    return agent


def set_process_agent(agent: Agent | None) -> None:
    """Makes ``agent`` the process's default; None clears it."""
    _Process.agent = agent


@contextmanager
def leaving(agent: Agent) -> Iterator[bool]:
    """Clears the process's agent after the block, until which nobody takes its place.

    Yields whether it is ``agent``: if another thread has ended that one's session, this
    process may be in its next by now, which is left alone.
    """
    with _Process.lock:
        is_current = _Process.agent is agent
        yield is_current
        if is_current:
            _Process.agent = None


def forked_from(agent: Agent) -> None:
    """This process is a forked child of the agent's: here nothing belongs to it any more."""
    _of_context.set(None)
    if _Process.agent in (agent, None):
        _Process.agent, _Process.parent = None, agent.info.name


class _KeptStore(process_forks.Member):
    """The kept store, whose threads a forked child does not have, but would join."""

    def after_fork_in_child(self) -> None:
        """It is the parent's, also after the parent has left its group."""
        process_forks.keep_for_good(_Process.store)
        _Process.store = None


_kept_store = _KeptStore()


def keep_store(store: Store) -> None:
    """Keeps a group's store until the next group's takes its place.

    Its host may leave before the others have, and may meet them there again.
    """
    process_forks.join(_kept_store)
    _Process.store = store


@contextmanager
def joining() -> Iterator[None]:
    """Keeps the place of the process's agent for the block, which may fill it.

    Raises:
        RpcError: it is taken, or another thread joins.
    """
    with _Process.lock:
        if find_agent() is not None:
            raise RpcError("RPC is already initialized; call rpc.shutdown() first")
        if _Process.joining:
            raise RpcError("RPC is being initialized by another thread; once is enough")
        _Process.joining = _Process.joined = True
    try:
        yield
    finally:
        _Process.joining = False


def joined_before() -> bool:
    """True if ``init_rpc`` was called in this process, however it ended."""
    return _Process.joined


def enter_agent(agent: Agent) -> contextvars.Token[Agent | None]:
    """Makes ``agent`` current in the running context; see :func:`leave_agent`."""
    return _of_context.set(agent)


def leave_agent(token: contextvars.Token[Agent | None]) -> None:
    """Undoes :func:`enter_agent`."""
    _of_context.reset(token)


def context_of(agent: Agent) -> contextvars.Context:
    """A fresh context in which ``agent`` is the current one."""
    context = contextvars.Context()
    context.run(_of_context.set, agent)
    return context
