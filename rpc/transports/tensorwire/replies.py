"""Reads the links this worker opened: replies, in the thread that waits for one.

At most one waiting thread reads, the *leader*; others sleep in their own way
and are woken by what is delivered to them. While there is no leader, a
background thread reads. It sleeps in an epoll instance of its own, in which the
instance with the channels is an entry; the leader silences that entry as it
comes. So nothing is handed from thread to thread, and nobody is woken in vain.

As a leader goes it restores the entry if a reply is still to come. If none is, the
next leader likely comes soon: the entry stays silent, and whoever sends a request
for which it does not wait restores it (:meth:`ReplySide.attend`). If nobody has led
for some time the background thread does so itself, and so sees a connection end.

Requests that follow each other closely are held and leave together: when there
are enough of them, when replies have been read, before a thread waits, and at
the latest with the background thread's next tick, of which there is one every
millisecond while requests are being held.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rpc.runtime.signals import here, raise_due
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame
from rpc.transports.tensorwire.busy_polling import BusyPoller, UsualWait
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.main_reader import MainReader
from rpc.transports.tensorwire.wakeup import WakeUp

_log = logging.getLogger("rpc.transports.tensorwire")

_EDGE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = 16
_RECHECK_SECONDS = 0.05
"""Seconds after which a leader looks at its ``done()`` even if nobody calls ``wake``."""
_LONGEST_POLL_SECONDS = 0.001
"""Longest polling for a reply. That is due, so this is longer than for requests, which may never
come.
"""
_HELD_AT_MOST = 16
_TICK_SECONDS = 0.001
_QUIET_TICKS = 50
_UNATTENDED_SECONDS = 0.05
"""Seconds for which channels go unread at most."""


@dataclass(frozen=True, slots=True)
class ChannelEvents:
    """Callbacks of a main channel, for the link's owner.

    Args:
        deliver: takes a frame; must not raise.
        writable: the socket takes bytes again.
        ended: nothing more will come, for the given reason; called once.
    """

    deliver: Callable[[Frame], None]
    writable: Callable[[], None]
    ended: Callable[[str], None]


class _Channel:
    """One main channel among the reply side's."""

    def __init__(self, reader: MainReader, events: ChannelEvents) -> None:
        self._reader = reader
        self._deliver = events.deliver
        self._writable = events.writable
        self._ended = events.ended
        self._reading = threading.Lock()
        self._again = False
        self._over = False

    def handle(self, events: int) -> None:
        """Acts on an edge."""
        if events & select.EPOLLOUT:
            self._writable()
        # Reads until nothing is left, unless another thread is doing so: then it will.
        reader, to_the_end = self._reader, bool(events & _GONE)
        while events & ~select.EPOLLOUT:
            if not self._reading.acquire(False):
                self._again = True
                if not self._reading.acquire(False):
                    return
            self._again = False
            try:
                if self._over:
                    return
                frames = reader.read()
                more = reader.more or (to_the_end and not reader.dry)
                over = reader.over
                self._over = bool(over)
            finally:
                self._reading.release()
            for frame in frames:
                self._deliver(frame)
            if over:
                self._ended(over)
                return
            if not (more or self._again):
                return


def _some() -> int:
    """Returns 1: replies may always be to come."""
    return 1


class ReplySide:
    """The reading of replies.

    Args:
        name: of the background thread.
        busy_poll_seconds: how long a thread polls before it sleeps.
        outstanding: how many replies are still to come, if it is known who waits for none
            of them (see :meth:`attend`).
    """

    def __init__(
        self, name: str, busy_poll_seconds: float, outstanding: Callable[[], int] = _some
    ) -> None:
        self._name = name
        self._outstanding = outstanding
        self.attended = True
        """True if the background thread sees what arrives; changed by the leader."""
        self._to_be_attended = False
        self._looks_after = False
        """True if the background thread looks now and then whether anybody leads."""
        self._leads = 0
        with contextlib.ExitStack() as made:  # what is closed if something cannot be made
            self._epoll = made.enter_context(select.epoll())
            usual = UsualWait(_LONGEST_POLL_SECONDS)
            self._poller = BusyPoller(self._epoll, _EVENTS, busy_poll_seconds, usual)
            self._wake_up = made.enter_context(contextlib.closing(WakeUp()))
            self._epoll.register(self._wake_up.descriptor, select.EPOLLIN)
            self._background = made.enter_context(select.epoll())
            self._background.register(self._epoll.fileno(), select.EPOLLIN)
            self._tick = made.enter_context(contextlib.closing(WakeUp()))
            self._background.register(self._tick.descriptor, select.EPOLLIN | select.EPOLLET)
            made.pop_all()
        self._held: dict[Sender, None] = {}
        self._ticking = False
        self._channels: dict[int, _Channel] = {}
        self._leading = threading.Lock()
        self._leader_done: Callable[[], object] | None = None
        self._leader_thread = 0
        self._background_thread = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self) -> None:
        """Starts the background reader."""
        thread = Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException:  # there is no room for another; one that never ran is not joined
            self._threads.remove(thread)
            raise

    def add_main(self, sock: socket.socket, reader: MainReader, events: ChannelEvents) -> None:
        """Begins to read a channel."""
        self._channels[sock.fileno()] = _Channel(reader, events)
        self._epoll.register(sock.fileno(), _EDGE)

    def watch_writable(self, sock: socket.socket, wanted: bool) -> None:
        """Asks that the channel be told when its socket takes bytes, or not any more."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(sock.fileno(), _EDGE | (select.EPOLLOUT if wanted else 0))
        if wanted:
            self.attend()

    def remove(self, sock: socket.socket) -> None:
        """Forgets a channel; to be called before its socket is closed."""
        self._channels.pop(sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(sock.fileno())

    def is_reading_here(self) -> bool:
        """True on a thread that reads for others, which therefore must not wait."""
        return threading.get_ident() in (self._leader_thread, self._background_thread)

    def flush_soon(self, sender: Sender) -> None:
        """Sees to it that what was just queued at ``sender`` is sent; see the module."""
        if sender.queued() >= _HELD_AT_MOST:
            sender.flush()
            return
        self._held[sender] = None
        if not self._ticking:
            self._ticking = True
            self._tick.set()

    def flush_held(self) -> None:
        """Sends the requests that were held."""
        while self._held:
            with contextlib.suppress(KeyError):
                self._held.popitem()[0].flush()

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Reads until ``done()``, or calls ``block`` if another thread does already."""
        held, here.held = here.held, True
        try:
            if self._held:
                self.flush_held()
            if self._leading.acquire(False):
                self._lead(done)
            elif self._leader_thread == threading.get_ident():
                self._lead_within(done)
            else:
                self.attend()  # when that thread has what it waits for
                if threading.get_ident() == self._background_thread:
                    self.start()
        finally:
            here.held = held
            if here.due and not held:
                raise_due()
        if not done():
            block()

    def _lead(self, done: Callable[[], object]) -> None:
        """Reads for all, with the leadership taken, which it gives back."""
        self._leader_thread = threading.get_ident()
        self._leader_done = done
        try:
            if not self._closed:
                self._leads += 1
                if self.attended:
                    self.attended = False
                    self._background.modify(self._epoll.fileno(), 0)
                try:
                    self._read_until(done)
                finally:
                    # Before the background thread reads again, which must see no leader to
                    # wake: it would wake one that has what it waited for, find the wake-up
                    # itself, and leave it to that leader to silence: over and over, until
                    # that gets the interpreter.
                    self._leader_done = None
                    self._leader_thread = 0
                    if self._to_be_attended or self._outstanding():
                        self._restore()
                    elif not self._looks_after:
                        self._looks_after = True
                        self._tick.set()
        finally:
            self._leader_done = None
            self._leader_thread = 0
            self._leading.release()
        if self._to_be_attended:
            self.attend()

    def _restore(self) -> None:
        """Lets the background thread see what arrives. Needs the leadership."""
        self.attended, self._to_be_attended = True, False
        # As ``contextlib.suppress`` would, which is three functions of Python's.
        try:  # noqa: SIM105
            self._background.modify(self._epoll.fileno(), select.EPOLLIN)
        except ValueError:  # a reply's callback closed us
            pass

    def attend(self) -> None:
        """Sees to it that a reply is read for which no thread will wait, or an edge."""
        if self.attended:
            return
        self._to_be_attended = True  # before the try: who leads looks again when it has left
        while self._to_be_attended and self._leading.acquire(False):
            try:
                if not self.attended:
                    self._restore()
                self._to_be_attended = False
            finally:
                self._leading.release()

    def _lead_within(self, done: Callable[[], object]) -> None:
        """Reads on the leading thread, for a call that a signal handler makes while it waits."""
        outer, self._leader_done = self._leader_done, done
        try:
            self._read_until(done)
        finally:
            self._leader_done = outer

    def _read_until(self, done: Callable[[], object]) -> None:
        try:
            while not (done() or self._closed):
                if here.due:
                    raise_due()
                held, here.held = here.held, False
                try:
                    ready = self._poller.wait(_RECHECK_SECONDS)
                finally:
                    here.held = held
                    if here.due and not held:
                        raise_due()
                self._dispatch(ready)
        except BaseException:
            self._look_at_all()
            raise

    def _look_at_all(self) -> None:
        """Looks at all channels after a failure: what was ready says so only once."""
        for channel in list(self._channels.values()):
            try:
                channel.handle(select.EPOLLIN | select.EPOLLOUT)
            except BaseException:  # the other channels must be read
                _log.exception("%s: what arrived was not dealt with", self._name)

    def wake(self) -> None:
        """Makes the leader look at its ``done()`` again; after what it delivers, it does anyway."""
        if self._leader_thread == threading.get_ident():
            return  # a wake-up that nobody waits for would wake the background thread
        done = self._leader_done
        if done is not None and done():
            self._wake_up.set()

    def _serve(self) -> None:
        me = threading.get_ident()
        self._background_thread = me
        quiet, leads = 0, -1
        while not self._closed and self._background_thread == me:
            seconds = _UNATTENDED_SECONDS if self._looks_after else -1
            ready = self._background.poll(_TICK_SECONDS if self._ticking else seconds, 1)
            if self._looks_after:
                leads = self._look_after(leads)
            if ready:
                try:
                    self._dispatch(self._epoll.poll(0, _EVENTS))
                except BaseException:  # nobody else reads
                    _log.exception("%s: what arrived was not dealt with", self._name)
                    self._look_at_all()
                self.wake()
            elif self._held:
                quiet = 0
                self.flush_held()
            else:
                quiet += 1
                # Whoever holds a request just now saw no need to ring the alarm.
                self._ticking = quiet < _QUIET_TICKS
                self._ticking = self._ticking or bool(self._held)

    def _look_after(self, leads: int) -> int:
        """Reads again if nobody has led since it was ``leads`` times; returns how often now."""
        if leads == self._leads and self._leader_thread == 0:
            self._looks_after = False
            self.attend()
        return self._leads

    def _dispatch(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            channel = self._channels.get(descriptor)
            if channel is not None:
                channel.handle(events)
            elif descriptor == self._wake_up.descriptor:
                self._clear_wake_up()
        if self._held:
            self.flush_held()

    def _clear_wake_up(self) -> None:
        """Clears the wake-up, unless it rings for another thread that leads, or for all to end."""
        if self._leader_thread in (0, threading.get_ident()) and not self._closed:
            self._wake_up.clear()

    def close(self) -> None:
        """Stops reading; joins the background reader."""
        self._closed = True
        self._wake_up.set()
        self._tick.set()
        try:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
        finally:
            here = self._leader_thread == threading.get_ident()
            with contextlib.nullcontext() if here else self._leading:
                self._background.close()
                self._epoll.close()
                self._wake_up.close()
                self._tick.close()
