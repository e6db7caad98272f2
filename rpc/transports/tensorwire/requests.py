"""Reads the links other workers opened: requests, run by the thread that read them.

One thread at a time holds the *baton*: it polls, reads and delivers. Delivering
a request may run a handler, and the baton stays with its thread as long as that
is quick. It passes to another thread

- before the holder waits for something (:meth:`RequestSide.about_to_block`),
- when the *watch* sees one delivery last for some milliseconds,
- at once, while handlers have been seen to be better run side by side (:class:`Pace`).

A thread that comes back from a handler without the baton queues up for it. So a
quick request costs no hand-off, and a slow or blocked one delays no other by
more than the watch's tick. Where callers on this host crowd its cores they are
served by turns (``turns``).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from rpc.runtime.executor import SECONDS_TO_END, abandon
from rpc.runtime.signals import DEAF_SECONDS, let_in_for_a_moment
from rpc.runtime.threads import Thread
from rpc.transports.tensorwire.busy_polling import BusyPoller, UsualWait
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.main_reader import MainReader
from rpc.transports.tensorwire.replies import ChannelEvents
from rpc.transports.tensorwire.turns import IDLE_SECONDS, Turns, callers_at_once
from rpc.transports.tensorwire.wakeup import WakeUp

_log = logging.getLogger("rpc.transports.tensorwire")

TICK_SECONDS = 0.004
"""Seconds between ticks. Each takes the interpreter lock from a handler; at 1 ms the main job lost
a tenth.
"""
_QUIET_TICKS = 50
_EVENTS = 64
_LONGEST_POLL_SECONDS = 0.0005
"""Longest polling for a request; see ``replies``."""
_IDLE_THREADS = 8
_SWEEP_SECONDS = 0.5
_BATCH = 16

_QUICK_SECONDS = 0.0005
"""Seconds below which work is not measured: reading a thread's processor time takes half a
microsecond.
"""
_LONG_SECONDS = 0.002
_WAITED_SHARE = 0.75

Work = tuple[Callable[[Any], None], Any]
"""A function to call, and its argument."""


class Pace:
    """Decides whether requests should be delivered on several threads at once. Sans-IO.

    While deliveries are quick one thread makes them all: handing them out would cost more than
    they take. That holds for longer ones, too, as long as they compute. An operator of torch
    gives the interpreter lock up and wants it back tens of microseconds later, and who waited
    for it meanwhile has been woken, mostly in vain. Two trainers whose handlers took about a
    millisecond each and ran side by side made their server switch threads 18 times per step of
    the main job; one after the other 2 times, for a sixth less of its processor time and a tenth
    more steps. What computes for longer runs in operators that are worth a core, and what waits
    leaves its core to others: those run side by side.
    """

    def __init__(self) -> None:
        self.apart = False
        """True to deliver each request on a thread of its own."""
        self.looking = False
        """True if deliveries take long enough to measure how much of it they compute."""

    def took(self, seconds: float, computed: float | None) -> None:
        """Notes that a delivery ended.

        Args:
            seconds: how long it took.
            computed: how long its thread had a processor; None if nobody looked.
        """
        self.looking = seconds >= _QUICK_SECONDS
        if not self.looking:
            self.apart = False
        elif computed is not None:
            waited = seconds - computed
            self.apart = computed > _LONG_SECONDS or waited > seconds * _WAITED_SHARE


class _Server:
    """A thread that serves requests; sleeps at its gate until it gets the baton."""

    def __init__(self) -> None:
        self.gate: SimpleQueue[None] = SimpleQueue()
        self.ident = 0


class RequestSide:
    """The reading and delivering of requests.

    Args:
        name: prefix of the threads' names.
        sweep: called now and then while :attr:`sweeping` is set.
        busy_poll_seconds: how long a thread polls before it sleeps.
        turns: of callers on this host; made to suit the cores unless given.

    Attributes:
        holder: has the baton.
    """

    def __init__(
        self,
        name: str,
        sweep: Callable[[], None],
        busy_poll_seconds: float,
        turns: Turns[Work] | None = None,
    ) -> None:
        self._name = name
        self._sweep = sweep
        self.sweeping = False
        with contextlib.ExitStack() as made:  # what is closed if something cannot be made
            self._epoll = made.enter_context(select.epoll())
            usual = UsualWait(_LONGEST_POLL_SECONDS)
            self._poller = BusyPoller(self._epoll, _EVENTS, busy_poll_seconds, usual)
            self._wake_up = made.enter_context(contextlib.closing(WakeUp()))
            self._epoll.register(self._wake_up.descriptor, select.EPOLLIN)
            made.pop_all()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._backlog: deque[Work] = deque()
        self._arrived: deque[Work] = self._backlog
        """Takes what is read: the backlog, or for a moment what a caller is to wait for."""
        self._turns: Turns[Work] = turns or Turns(callers_at_once())
        self._crowd = self._turns.most
        self._local: set[int] = set()
        """Descriptors of callers on this host."""
        self._lock = threading.Lock()
        self.holder: _Server | None = None
        self._delivering = 0
        self._deliveries = 0
        self._idle: list[_Server] = []
        self._warned = False
        self._threads: set[threading.Thread] = set()
        self._pace = Pace()
        self.batching_thread = 0
        self._held: dict[Sender, None] = {}
        self._watch_gate: SimpleQueue[None] = SimpleQueue()
        self._watching = False
        self._closed = False
        self._abandoned = False

    def start(self) -> None:
        """Starts the first reader and the watch."""
        watch = Thread(target=self._watch, name=f"{self._name}-watch", daemon=True)
        watch.start()
        self._threads.add(watch)
        with self._lock:
            server = self._next_holder()
        if server is None:
            raise RuntimeError(f"{self._name} cannot listen: no thread can be started")
        server.gate.put(None)

    def add(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Calls ``handler`` with epoll's events whenever ``sock`` has something to read."""
        self._handlers[sock.fileno()] = handler
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def add_main(self, sock: socket.socket, reader: MainReader, events: ChannelEvents) -> None:
        """Begins to read a main channel; its frames are delivered in turn with others."""

        def handle(ready: int) -> None:
            if ready & select.EPOLLOUT:
                events.writable()
            if not ready & ~select.EPOLLOUT:
                return
            for frame in reader.read():
                self._arrived.append((events.deliver, frame))
            if reader.over:
                self._arrived.append((events.ended, reader.over))
                with contextlib.suppress(OSError, ValueError):  # removed and closed meanwhile
                    self._epoll.unregister(sock.fileno())

        if sock.family == socket.AF_UNIX:
            self._local.add(sock.fileno())
        self.add(sock, handle)

    def watch_writable(self, sock: socket.socket, wanted: bool) -> None:
        """Asks that the channel be told when its socket takes bytes, or not any more."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, sock: socket.socket) -> None:
        """Forgets a socket; to be called before it is closed."""
        self._handlers.pop(sock.fileno(), None)
        self._local.discard(sock.fileno())
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(sock.fileno())

    def push(self, work: Work) -> None:
        """Has the thread with the baton do ``work``, which may run a handler."""
        self._backlog.append(work)
        self._wake_up.set()

    def about_to_block(self) -> None:
        """To be called before waiting: passes the baton on if this thread holds it."""
        holder = self.holder
        if holder is not None and holder.ident == threading.get_ident():
            self._pass_baton(holder)

    def is_batching_here(self) -> bool:
        """True if this thread runs one of several requests that arrived together."""
        return self.batching_thread == threading.get_ident()

    def flush_soon(self, sender: Sender) -> None:
        """Sees to it that what was just queued at ``sender`` is sent.

        Replies to requests that arrived together leave together, unless a handler
        among them is slow.
        """
        if self.is_batching_here():
            self._held[sender] = None
            # Whoever takes the baton ends the batch first, and sends what is held then.
            if self.is_batching_here():
                return
        sender.flush()

    def _flush_held(self) -> None:
        """Sends the replies that were held."""
        self.batching_thread = 0
        while self._held:
            with contextlib.suppress(KeyError):
                self._held.popitem()[0].flush()

    def _pass_baton(self, holder: _Server) -> None:
        self._flush_held()
        with self._lock:
            if self.holder is not holder or self._closed:
                return
            successor = self._next_holder()
        if successor is not None:
            successor.gate.put(None)

    def _next_holder(self) -> _Server | None:
        """Called with the lock held; the result's gate is to be opened after.

        None without a thread for it. Then the baton stays where it is, and the watch tries again.
        """
        server = self._idle.pop() if self._idle else self._new_server()
        if server is not None:
            self._delivering = 0
            self.holder = server
        return server

    def _new_server(self) -> _Server | None:
        server = _Server()
        thread = Thread(
            target=self._serve, args=(server,), name=f"{self._name}-requests", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self._warned:
                _log.warning("%s: nobody can read while a handler runs: %s", self._name, error)
            self._warned = True
            return None
        self._threads.add(thread)
        return server

    def _serve(self, me: _Server) -> None:
        me.ident = threading.get_ident()
        while not self._closed:
            me.gate.get()
            self._flush_held()
            while self.holder is me and not self._closed:
                if self._backlog:
                    self._deliver(me, self._backlog.popleft())
                    if (self._held or self.batching_thread) and len(self._backlog) % _BATCH == 0:
                        self._flush_held()
                else:
                    self._poll()
            if not self._rests(me):
                break
        self._leave()

    def _rests(self, me: _Server) -> bool:
        """Lets the running thread, which passed the baton on, wait for it; False if it ends."""
        with self._lock:
            if self._closed or len(self._idle) >= _IDLE_THREADS:
                return False
            if self.holder is not me:
                self._idle.append(me)
            return True

    def _poll(self) -> None:
        timeout = _SWEEP_SECONDS if self.sweeping else -1
        if self._turns.on:
            timeout = IDLE_SECONDS
        ready = self._poller.wait(timeout)
        if len(ready) > self._crowd or self._turns.on:
            ready = self._take_turns(ready)
        for descriptor, events in ready:
            handler = self._handlers.get(descriptor)
            if handler is not None:
                try:
                    handler(events)
                except BaseException:  # the baton must not die with this thread
                    _log.exception("%s: what arrived was not dealt with", self._name)
            elif descriptor == self._wake_up.descriptor and not self._closed:
                self._wake_up.clear()
        if self.sweeping:
            try:
                self._sweep()
            except BaseException:  # the same
                _log.exception("%s: connections were not looked after", self._name)

    def _take_turns(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Reads for those whose turn it is not, and keeps it; returns the others."""
        turns = self._turns
        local = self._local.intersection(descriptor for descriptor, _ in ready)
        self._backlog.extend(turns.looked(len(local), time.perf_counter()))
        if not turns.on:
            return ready
        return [each for each in ready if each[0] not in local or not self._keep(*each)]

    def _keep(self, descriptor: int, events: int) -> bool:
        """Reads from a caller whose turn it is not, and keeps that; False if it has its turn."""
        handler = self._handlers.get(descriptor)
        if handler is None or self._turns.may_serve(descriptor):
            return False
        self._arrived = deque()
        try:
            handler(events)
        except BaseException:  # as in _poll
            _log.exception("%s: what arrived was not dealt with", self._name)
        finally:
            arrived, self._arrived = self._arrived, self._backlog
        self._turns.keep(descriptor, arrived)
        return True

    def _deliver(self, me: _Server, work: Work) -> None:
        pace = self._pace
        if pace.apart:
            self._pass_baton(me)
        if self.holder is me:
            self._deliveries += 1
            self._delivering = self._deliveries
            if not self._watching:
                self._watching = True
                self._watch_gate.put(None)
            if self._backlog:
                self.batching_thread = me.ident
        computed = time.thread_time() if pace.looking else None
        began = time.perf_counter()
        function, argument = work
        try:
            function(argument)
        except BaseException:  # the baton must not die with this thread
            _log.exception("%s: what arrived was not dealt with", self._name)
        seconds = time.perf_counter() - began
        if seconds >= _QUICK_SECONDS or pace.looking:
            pace.took(seconds, None if computed is None else time.thread_time() - computed)
        if self.holder is me:
            with self._lock:
                if self.holder is me:
                    self._delivering = 0

    def _watch(self) -> None:
        """Takes the baton from a thread that has delivered one request for too long."""
        while True:
            self._watch_gate.get()
            seen, quiet = 0, 0
            while quiet < _QUIET_TICKS and not self._closed:
                try:  # noqa: SIM105 - it would be three functions of Python's each tick
                    self._watch_gate.get(timeout=TICK_SECONDS)
                except Empty:
                    pass
                current = self._delivering
                if current and current == seen:
                    self._retake(current)
                quiet = 0 if self._deliveries != seen or current else quiet + 1
                seen = self._deliveries
            if self._closed:
                self._leave()
                return
            self._watching = False
            # A delivery that began before that saw no need to open the gate.
            if self._delivering:
                self._watching = True
                self._watch_gate.put(None)

    def _retake(self, stuck: int) -> None:
        with self._lock:
            if self._delivering != stuck or self._closed:
                return
            self._pace.apart = True
            successor = self._next_holder()
        if successor is not None:
            successor.gate.put(None)

    def _leave(self) -> None:
        """The running thread ends; the last one that was abandoned tidies up."""
        with self._lock:
            self._threads.discard(threading.current_thread())
            is_last = self._abandoned and not self._threads
        if is_last:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._epoll.close()
        self._wake_up.close()

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Stops reading; joins every thread but the caller's.

        After ``seconds``, threads that handlers still hold are abandoned.
        """
        with self._lock:
            self._closed = True
            servers = [*self._idle, *([self.holder] if self.holder else [])]
            threads = list(self._threads)
        self._wake_up.set()
        self._watch_gate.put(None)
        for server in servers:
            server.gate.put(None)
        began = time.monotonic()
        try:
            for thread in threads:
                if thread is not threading.current_thread():
                    _join(thread, began + seconds)
        finally:
            self._close_or_abandon(began)

    def _close_or_abandon(self, began: float) -> None:
        self._backlog.clear()
        with self._lock:
            stuck = [t for t in self._threads if t.is_alive()]
            stuck = [t for t in stuck if t is not threading.current_thread()]
            self._abandoned = bool(stuck)
        if stuck:  # they may still look at the descriptors
            _log.error("%d handlers do not end, and are abandoned", len(stuck))
            abandon(stuck, began + SECONDS_TO_END)
        else:
            self._close_descriptors()


def _join(thread: threading.Thread, deadline: float) -> None:
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, DEAF_SECONDS))
        let_in_for_a_moment()
