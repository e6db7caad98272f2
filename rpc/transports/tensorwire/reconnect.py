"""Sees to the broken connections of one peer, until each is replaced or the peer given up.

The end that opened a link opens its connections again; the other end asks for
that by knocking at the peer's door, which also shows whether anybody is in. A
thread does so while something is broken. Which connection takes the place of
which is for ``resumption.Seam`` to decide; what a given-up peer means, for ``peer``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from rpc.protocol.resumption import CannotResumeError, Offer
from rpc.runtime.text import says
from rpc.runtime.threads import Thread
from rpc.transports.tensorwire.acceptor import Proven
from rpc.transports.tensorwire.connection import PASSING, Strand
from rpc.transports.tensorwire.connector import Connector, GoneError, Road, Target

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_KNOCK_EVERY_SECONDS = 0.2
_LEAST_TRIES = 4
_ENOUGH_FOR_A_TRY_SECONDS = 1.0

_log = logging.getLogger("rpc.transports.tensorwire")


class Mender:
    """The mending of one peer's links.

    Args:
        target: how to connect to the peer.
        seconds: how long a connection may be broken; 0 if it may not.
        give_up: takes a strand that cannot be mended, and why.
    """

    def __init__(
        self, target: Target, seconds: float, give_up: Callable[[Strand, str], None]
    ) -> None:
        self._name = f"tensorwire-mend-{target.name}"
        self._connector = Connector(target)
        self._seconds = seconds
        # One that is not answered must leave time for another, and for other strands.
        self._seconds_a_try = max(seconds / _LEAST_TRIES, _ENOUGH_FOR_A_TRY_SECONDS)
        self._give_up = give_up
        self._changed = threading.Condition()
        self._broken: list[Strand] = []
        self._thread: threading.Thread | None = None
        self._serving = False
        self._closed = False

    def broke(self, strand: Strand, reason: str) -> bool:
        """Takes charge of a strand whose connection was read to its end; False if it does not."""
        if not self._seconds or strand.reader.garbled or strand.sender.fault:
            return False
        strand.sender.stop()
        with self._changed:
            if self._closed:
                return False
            strand.seam.broke(time.monotonic(), reason)
            guest, strand.guest = strand.guest, None
            if guest is None and not self._begin_to_serve(strand):
                return False
        if guest is not None:
            self._take_in(strand, guest)
        return True

    def _begin_to_serve(self, strand: Strand) -> bool:
        """Called with the lock held; False if no thread can be started for it."""
        self._broken.append(strand)
        self._changed.notify_all()
        if self._serving:
            return True
        thread = Thread(target=self._serve, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: a connection cannot be opened again: %s", self._name, error)
            self._broken.remove(strand)
            return False
        self._thread = thread
        self._serving = True
        return True

    def offered(self, strand: Strand, guest: Proven) -> None:
        """The peer opened a connection in place of a strand's."""
        with self._changed:
            offer = strand.seam.offered(guest.hello.attempt)
            if self._closed or not self._seconds:
                offer = Offer.STALE
            former: Proven | None = guest
            if offer is not Offer.STALE:
                former, strand.guest = strand.guest, guest
            ready = offer is not Offer.STALE and self._take_out(strand)
            if ready:
                strand.guest = None
        if former is not None:
            former.reject("another connection took its place")
        if ready:
            self._take_in(strand, guest)
        elif offer is not Offer.STALE:
            strand.sender.shutdown()

    def _take_out(self, strand: Strand) -> bool:
        """Called with the lock held: whoever takes a strand out is the one to go on with it."""
        if self._closed or strand not in self._broken:
            return False
        self._broken.remove(strand)
        self._changed.notify_all()
        return True

    def _take_in(self, strand: Strand, guest: Proven) -> None:
        said = guest.hello
        self._put_in_place(strand, guest.sock, said.received, said.attempt, guest.reject)

    def _put_in_place(
        self,
        strand: Strand,
        sock: socket.socket,
        received: int,
        attempt: int,
        refuse: Callable[[str], object],
    ) -> None:
        """For a strand that was taken out, and so is in nobody else's charge.

        Args:
            strand: which.
            sock: the connection, which ends here, or with the strand.
            received: how many frames have arrived at the peer.
            attempt: the connection's number.
            refuse: ends it if nothing can take the broken one's place.
        """
        reason = strand.seam.reason
        try:
            strand.replace(sock, received, attempt)
        except PASSING as error:
            sock.close()
            self._try_again(strand, error)
        except Exception as error:
            refuse(says(error))
            self._give_up(strand, f"{reason}, and cannot be resumed: {says(error)}")
        else:
            self._look_again(strand)

    def _try_again(self, strand: Strand, error: Exception) -> None:
        """Breaks a connection that nobody reads: until its time is over, another may be."""
        strand.problem = says(error)
        if not self.broke(strand, strand.seam.reason):
            self._give_up(strand, f"{strand.seam.reason}, and cannot be resumed: {says(error)}")

    def _look_again(self, strand: Strand) -> None:
        """Breaks a connection that is not wanted any more now that it is in place."""
        with self._changed:
            unwanted = self._closed or strand.guest is not None
        if unwanted:
            strand.sender.shutdown()

    def _serve(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                broken = list(self._broken)
                if not broken or self._closed:
                    self._serving = False
                    return
            for strand in broken:
                self._mend(strand)
            with self._changed:
                if self._broken and not self._closed:
                    self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _mend(self, strand: Strand) -> None:
        now = time.monotonic()
        left = strand.seam.left(now, self._seconds)
        try:
            if left <= 0:
                problem = f": {strand.problem}" if strand.problem else ""
                raise GoneError(f"it was not opened again within {self._seconds:g} s{problem}")
            if strand.road is not None:
                self._open_again(strand, strand.road, min(left, self._seconds_a_try))
            elif now >= strand.knock_at:
                self._knock(strand, min(left, self._seconds_a_try))
        except (GoneError, CannotResumeError) as error:
            self._abandon(strand, f"{strand.seam.reason}, and {error}")
        except Exception as error:  # the next try may do; without it nobody would ever give up
            strand.problem = says(error)

    def _open_again(self, strand: Strand, road: Road, seconds: float) -> None:
        attempt = strand.seam.next_attempt()
        token, number, received = strand.token, strand.number, strand.reader.received
        sock, theirs = self._connector.replace(road, token, number, attempt, received, seconds)
        with self._changed:
            wanted = self._take_out(strand)
        if not wanted:
            sock.close()
            return
        self._put_in_place(strand, sock, theirs, attempt, lambda _: sock.close())

    def _knock(self, strand: Strand, seconds: float) -> None:
        self._connector.knock(
            local=strand.sender.sock.family == socket.AF_UNIX,
            token=strand.token,
            channel=strand.number,
            attempt=strand.seam.attempt,
            seconds=seconds,
        )
        strand.knock_at = time.monotonic() + _KNOCK_EVERY_SECONDS

    def _abandon(self, strand: Strand, reason: str) -> None:
        with self._changed:
            mine = self._take_out(strand)
        if mine:
            self._give_up(strand, reason)

    def withdraw(self, strand: Strand) -> None:
        """Lets go of a strand that is not wanted any more."""
        with self._changed:
            self._take_out(strand)

    def close(self) -> list[Strand]:
        """Gives up; returns what was still broken. Does not wait, see :meth:`join`."""
        with self._changed:
            self._closed = True
            broken, self._broken = self._broken, []
            self._changed.notify_all()
        self._connector.cancel()
        return broken

    def join(self) -> None:
        """Waits for the thread to end, which it does soon after :meth:`close`."""
        with self._changed:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
