"""One shard at one server: its replica decides, its lane works on its state in that order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import rpc
from tensorwire.parameter_server.decisions.pushes import Apply, Refusal, Refused, Taken
from tensorwire.parameter_server.decisions.records import (
    Effect,
    NotHead,
    Read,
    Respond,
    Run,
    StartCopy,
)
from tensorwire.parameter_server.decisions.replica import Replica
from tensorwire.parameter_server.messaging.messages import (
    Accepted,
    Ask,
    Broken,
    Denied,
    Elsewhere,
    PullReply,
    Reply,
    Unread,
)
from tensorwire.parameter_server.opaque import Response
from tensorwire.parameter_server.server.lane import Lane
from tensorwire.parameter_server.server.state import ShardState

if TYPE_CHECKING:
    import torch

_logger: Final = logging.getLogger("tensorwire")


class Call:
    """A call that waits for its answer; the first one counts."""

    __slots__ = ("_answered", "_future")

    def __init__(self, future: torch.futures.Future[Response]) -> None:
        self._future = future
        self._answered = False

    def answer(self, answer: object) -> None:
        """Sends an answer."""
        if not self._answered:
            self._answered = True
            self._future.set_result(answer)


class PushCall:
    """The push of an exchange; if there is a pull, that one's answer tells of both.

    Args:
        call: the exchange.
        trainer: who pushes.
        pulls: whether there is a pull.
    """

    __slots__ = ("call", "pulls", "trainer")

    def __init__(self, call: Call, trainer: int, pulls: bool) -> None:
        self.call = call
        self.trainer = trainer
        self.pulls = pulls


class PullCall:
    """The pull of an exchange."""

    __slots__ = ("ask", "call")

    def __init__(self, call: Call, ask: Ask) -> None:
        self.call = call
        self.ask = ask


_EXCHANGE: Final = (PushCall, PullCall)


class ShardServer:
    """One shard at one server.

    Args:
        replica: its decisions.
        state: what it keeps.
        changed: called after each change of the state.
        copy: begins a copy to a new backup; called while the state stands still.
    """

    def __init__(
        self,
        replica: Replica,
        state: ShardState,
        changed: Callable[[ShardServer, object], None],
        copy: Callable[[ShardServer, StartCopy], None],
    ) -> None:
        self.replica = replica
        self.state = state
        self.broken = ""
        self.lane: Lane[Effect] = Lane(self._do)
        self.pulled = 0
        self.room = -1
        self.seconds = {"pushes": 0.0, "pulls": 0.0, "set-up": 0.0}
        self._changed = changed
        self._copy = copy

    def _do(self, effect: Effect) -> None:
        try:
            if isinstance(effect, Respond):
                self._respond(effect.call, effect.answer)
            elif isinstance(effect, Read):
                self._read(effect)
            elif self.broken:
                return
            elif isinstance(effect, Run):
                stage = "pushes" if isinstance(effect.what, Apply) else "set-up"
                with self._timed(stage), self.lane.state_lock:
                    self.state.run(effect.what)
                self._changed(self, effect.what)
            elif isinstance(effect, StartCopy):
                with self.lane.state_lock:
                    self._copy(self, effect)
        except rpc.AgentClosedError as error:  # this worker has left: nobody asks any more
            self.broken = str(error)
        except Exception as error:
            _logger.exception("shard %d of the parameter server is broken", self.replica.shard)
            self.broken = f"{type(error).__name__}: {error}"

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - begin

    def _read(self, effect: Read) -> None:
        asked = effect.pull.ask
        assert isinstance(asked, PullCall)
        if self.broken:
            asked.call.answer(Broken(self.broken))
            return
        safe = self.replica.safe_count(asked.ask.trainer)
        try:
            with self._timed("pulls"), self.lane.state_lock:
                tables, dense, changed = self.state.read(asked.ask, effect.time)
        except rpc.RpcError as error:  # the trainer that asked is gone
            _logger.info("shard %d has nobody to answer a pull to: %s", self.replica.shard, error)
            asked.call.answer(Unread(str(error), safe))
            return
        except Exception as error:  # such as no memory for so many rows: nothing has changed
            if isinstance(error, MemoryError):
                _logger.warning("shard %d has no memory to answer a pull", self.replica.shard)
            else:
                _logger.exception("shard %d could not answer a pull", self.replica.shard)
            asked.call.answer(Unread(f"{type(error).__name__}: {error}", safe))
            return
        self.pulled += 1
        known, deals = (effect.low, effect.version, self.room), self.replica.clock.deals
        asked.call.answer(PullReply(tables, dense, safe, *known, changed, effect.time, deals))

    def _respond(self, call: object, answer: object) -> None:
        if isinstance(call, Call):
            call.answer(answer)
            return
        assert isinstance(call, _EXCHANGE)
        reply = Broken(self.broken) if self.broken else self._reply(call, answer)
        if reply is not None:
            call.call.answer(reply)

    def _reply(self, call: PushCall | PullCall, answer: object) -> Reply | None:
        if isinstance(answer, NotHead):
            return Elsewhere()
        if isinstance(answer, Refused):
            return Denied(answer.reason)
        if isinstance(answer, Refusal):
            return Denied(answer)
        if isinstance(answer, Taken) and isinstance(call, PushCall) and not call.pulls:
            safe = max(self.replica.safe_count(answer.trainer), answer.number + 1)
            replica = self.replica
            return Accepted(safe, replica.version, self.room, replica.clock.deals)
        return None
