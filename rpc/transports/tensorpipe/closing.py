"""How a TensorPipe transport leaves its group, and takes leave of peers that do.

``tensorpipe_links`` knows when two workers have parted; this says and answers the
farewells, and waits. Which peers there are, and who hears of their loss, is the
transport's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.peers import SHUT_DOWN

if TYPE_CHECKING:
    from rpc.transports.tensorpipe.answers import Answers
    from rpc.transports.tensorpipe.caller import Caller
    from rpc.transports.tensorpipe.ledger import AnswerFuture
    from rpc.transports.tensorpipe.links import Link
    from rpc.transports.tensorpipe.peers import Roster

_SENDERS_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Exit:
    """Where whoever closes a transport waits until nobody else is in its way.

    Args:
        lock: guards what is waited for; waiting lets it go meanwhile.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._in_the_way = 0
        self._waiting = False

    def hold(self) -> None:
        """Keeps the exit shut: this thread is about to send. Needs the lock."""
        self._in_the_way += 1

    def release(self) -> None:
        """This thread has sent."""
        with self._lock:
            self._in_the_way -= 1
            self.look()

    def look(self) -> None:
        """Something changed that may be waited for. Needs the lock."""
        if self._waiting:
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Waits for a change that makes it so, at most until then. Needs the lock.

        Args:
            holds: what is waited for.
            deadline: seconds of the monotonic clock.

        Returns:
            Whether it is so.
        """
        self._waiting = True
        try:
            return self._changed.wait_for(holds, max(0.0, deadline - time.monotonic()))
        finally:
            self._waiting = False

    def wait_for_senders(self) -> None:
        """Waits until nobody holds the exit, which takes no time. Needs the lock."""
        deadline = time.monotonic() + _SENDERS_SECONDS
        if not self.wait_until(lambda: self._in_the_way == 0, deadline):
            _log.error("%d messages are still being sent; leaving all the same", self._in_the_way)


class Handlers(NamedTuple):
    """Those on torch's threads: the answer to a call leaves with its thread, and a peer that
    waits for one does not part.

    Args:
        until: how long they are waited for, in seconds of the monotonic clock.
        run: whether there are some.
    """

    until: float
    run: Callable[[], object]


class Parting:
    """Farewells, said and taken.

    Args:
        worker_id: this worker's.
        lock: the transport's.
        exit_: the transport's.
        answers: gives what peers wait for.
        caller: says our own farewell.
        report: takes a peer that has parted.
    """

    def __init__(
        self,
        worker_id: int,
        lock: threading.Lock,
        exit_: Exit,
        answers: Answers,
        caller: Caller,
        report: Callable[[Link], None],
    ) -> None:
        self._worker_id = worker_id
        self._lock = lock
        self._exit = exit_
        self._answers = answers
        self._caller = caller
        self._report = report

    def leave(self, roster: Roster, deadline: float, handlers: Handlers) -> None:
        """Answers everything, says farewell, and waits until nobody reads from us.

        Args:
            roster: whom to leave; it takes nobody in any more.
            deadline: how long to wait, in seconds of the monotonic clock.
            handlers: those on torch's threads.
        """
        with self._lock:
            asked = [(each[0], each[2]) for each in roster.early if each[2] is not None]
            links = roster.everyone()
            asked += [each for link in links for each in link.take_asked()]
            for link in roster.sendable():
                if link.route is None:
                    link.break_off("its connection broke, and this worker leaves")
            parting = [link for link in roster.sendable() if link.watched]
            for link in parting:
                link.say_farewell()
        self._answers.give_asked(asked, wire.REFUSED, SHUT_DOWN)
        for link in parting:
            self._caller.say_farewell(link)
        with self._lock:
            self._await_partings(links, deadline, handlers)
            itself = [link for link in links if link.peer.info.id == self._worker_id]
            self._exit.wait_until(lambda: not any(own.calls.under_way for own in itself), deadline)
            lifelines = [lifeline for link in links for lifeline in link.take_lifelines()]
        self._end_lifelines(lifelines, wire.LEFT)
        with self._lock:
            self._exit.wait_for_senders()
        self._answers.wait(deadline)

    def _await_partings(self, links: list[Link], deadline: float, handlers: Handlers) -> None:
        """Needs the lock."""

        def have_parted() -> bool:
            return all(link.is_finished() for link in links)

        early = self._exit.wait_until(have_parted, min(deadline, handlers.until))
        if not (early or handlers.run()):
            self._exit.wait_until(have_parted, deadline)

    def take_farewell(self, link: Link | None, announced: int, future: AnswerFuture) -> None:
        """A peer leaves: sends it nothing more, and confirms that once all of its is taken.

        Args:
            link: the peer; None if it is not known any more.
            announced: how many frames it sent.
            future: confirms.
        """
        with self._lock:
            if link is not None:
                link.lose(SHUT_DOWN)
                if link.mending is not None:
                    link.abandon_pipe()
                link.farewell, link.announced = future, announced
                asked, lifelines = link.take_asked(), link.take_lifelines()
            self._exit.hold()
        try:
            if link is None:
                self._answers.give_visibly(future, wire.FAREWELL, b"")
            else:
                self._answers.give_asked(asked, wire.DONE)
                self._answers.give(lifelines, wire.LIFELINE)
                self.settle(link)
        finally:
            self._exit.release()

    def confirmed(self, link: Link, message: bytes) -> None:
        """A peer confirmed our farewell."""
        with self._lock:
            link.farewell_confirmed(message)
            lifelines = link.take_lifelines()
            self._exit.hold()
        try:
            self._end_lifelines(lifelines, wire.LIFELINE)
            self.settle(link)
        finally:
            self._exit.release()

    def settle(self, link: Link) -> None:
        """Confirms a peer's farewell, and reports its loss, if now is the time."""
        with self._lock:
            due = link.take_due_confirmation()
            if due is not None:
                self._exit.hold()
            self._exit.look()
        if due is not None:
            future, message = due
            try:
                self._answers.give_visibly(future, wire.FAREWELL, message)
            finally:
                self._exit.release()
            self._report(link)

    def _end_lifelines(self, lifelines: list[AnswerFuture], kind: int) -> None:
        for lifeline in lifelines:
            self._answers.give_visibly(lifeline, kind, SHUT_DOWN.encode())
