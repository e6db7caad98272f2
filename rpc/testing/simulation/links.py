"""The links of the simulated network: connections that break, and others in their place.

Two lives that talk have one link. What they send is numbered and remembered, what arrives
is acknowledged, and connections are replaced as ``resumption`` decides at both ends, wired
as ``tensorwire`` wires it (``channel``, ``main_reader``, ``mender``). A connection is read
in order, up to the packet that is delivered next; what was read is delivered in any order.
Holds ``resumption`` to its promise: nothing is lost, nothing is taken twice.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rpc.ids import Life
from rpc.protocol.resumption import Replacement
from rpc.testing.simulation import steps
from rpc.testing.simulation.packets import Frame, Packet
from rpc.testing.simulation.rules import Rule, require
from rpc.testing.simulation.steps import Move, Name

if TYPE_CHECKING:
    from rpc.testing.simulation.world import World

FOREVER = 1e9
Mending: TypeAlias = steps.Greet | steps.Mend
_SOON = 2
_NOW = 5
_REASON = "the connection was reset"


class _Connection:
    """What each end put on it and the other has not read; nothing more if it is not whole."""

    __slots__ = ("attempt", "whole", "wires")

    def __init__(self, attempt: int, ends: tuple[Life, Life]) -> None:
        self.attempt = attempt
        self.whole = True
        self.wires: dict[Life, deque[Frame]] = {end: deque() for end in ends}

    def tear(self, kept: int) -> None:
        """Breaks it; the first ``kept`` messages of each direction can still be read."""
        self.whole = False
        for wire in self.wires.values():
            while len(wire) > kept:
                wire.pop()


class _Word(enum.Enum):
    """What the ends say to each other about connections."""

    HELLO = "opens a connection"
    ANSWER = "takes it"
    KNOCK = "asks for one"


class _Said(NamedTuple):
    """A word that is under way to one end."""

    word: _Word
    to: Life
    connection: _Connection
    received: int


class _End:
    """One end of a link: its decisions, and the books in which they are checked."""

    def __init__(self, me: Life, connection: _Connection, world: World) -> None:
        machines = world.machines
        self.me = me
        self.connection = connection
        self.sent = 0
        self.received = 0
        self.memory = machines.sent_messages()
        self.receipts = machines.receipts(_SOON, _NOW, self._will_pay)
        self.epoch = machines.epoch()
        self.guest: _Said | None = None
        self.acknowledged = 0
        self.unpaid = 0
        self.pays_late = False
        self.broke_at: float | None = None
        self.newest = 0

    def _will_pay(self) -> None:
        require(not self.pays_late, Rule.LINKS, self.me, "owes twice")
        self.pays_late = True

    def took(self) -> bool:
        """A packet arrived; true if what arrived is to be acknowledged at once."""
        self.unpaid += 1
        self.receipts.owed += 1
        pays = self.receipts.owed >= self.receipts.limit and self.receipts.due()
        require(pays == (self.unpaid >= _NOW), Rule.LINKS, self.me, "owes", self.unpaid)
        late = pays or self.pays_late == (self.unpaid >= _SOON)
        require(late, Rule.LINKS, self.me, "owes", self.unpaid)
        return pays

    def was_acknowledged(self, received: int) -> None:
        """The other end has so many messages."""
        forgotten = [frame.number for frame in self.memory.acknowledged(self.sent, received)]
        right = forgotten == [*range(self.acknowledged, received)]
        require(right, Rule.LINKS, self.me, "forgets", forgotten, "up to", received)
        self.acknowledged = max(self.acknowledged, received)

    def lacking(self, received: int) -> list[Frame]:
        """What to send again to an end that has so many messages."""
        again = self.memory.missing(self.sent, received)
        numbers = [frame.number for frame in again]
        right = numbers == [*range(received, self.sent)]
        require(right, Rule.LINKS, self.me, "sends again", numbers, "of", self.sent)
        return again

    def forget(self) -> list[Frame]:
        """The link is over; returns what the other end did not acknowledge."""
        forgotten = self.memory.forget()
        right = [frame.number for frame in forgotten] == [*range(self.acknowledged, self.sent)]
        nothing = not self.memory.messages
        require(right and nothing, Rule.LINKS, self.me, "forgets", forgotten)
        return forgotten

    def is_out_of_time(self, now: float, patience: float) -> bool:
        """True if its connection is to be given up."""
        left = self.epoch.left(now, patience)
        expected = patience
        if self.broke_at is not None:
            expected = max(0.0, self.broke_at + patience - now)
        right = left == expected
        require(right, Rule.LINKS, self.me, "has", left, "s left of", patience)
        return left <= 0.0

    def broke(self, now: float) -> None:
        """Its connection was read to its end; whoever writes to it may see it, too, later."""
        self.broke_at = now
        self.epoch.broke(now, _REASON)
        self.epoch.broke(now + 1.0, "it was seen again")
        require(self.epoch.reason == _REASON, Rule.LINKS, self.me, self.epoch.reason)

    def joined(self, connection: _Connection) -> None:
        """It goes on with another connection."""
        self.connection = connection
        self.broke_at = None
        self.epoch.joined(connection.attempt)
        require(not self.epoch.reason, Rule.LINKS, self.me, self.epoch.reason)

    def offered(self, attempt: int) -> Replacement:
        """The other end opened a connection; what becomes of it."""
        offer = self.epoch.offered(attempt)
        expected = Replacement.BREAK_FIRST if self.broke_at is None else Replacement.TAKE
        if attempt <= self.newest:
            expected = Replacement.STALE
        require(offer is expected, Rule.LINKS, self.me, offer, "of attempt", attempt)
        self.newest = max(self.newest, attempt)
        return offer


class _Link:
    """Two ends. The first to send opened it, and opens all its connections."""

    def __init__(self, opener: Life, other: Life, links: Links) -> None:
        self._links = links
        self._world = links.world
        self.lives = (opener, other)
        first = _Connection(0, self.lives)
        self.opener = _End(opener, first, self._world)
        self.acceptor = _End(other, first, self._world)
        self.air: dict[int, _Said] = {}
        self._words = 0
        self._tried: _Connection | None = None

    def end(self, me: Life) -> _End:
        """The end at ``me``."""
        return self.opener if me == self.opener.me else self.acceptor

    def other(self, end: _End) -> _End:
        """The end that is not ``end``."""
        return self.acceptor if end is self.opener else self.opener

    @property
    def is_mended(self) -> bool:
        """True if both ends are on one whole connection and nothing else is under way."""
        connection = self.opener.connection
        same = connection is self.acceptor.connection and connection.whole
        return same and not self.air and self.opener.broke_at is None

    # --- Messages

    def send(self, end: _End, packet: Name | None, received: int = 0) -> None:
        """Sends a packet, or an acknowledgement."""
        frame = Frame(end.sent, packet, received)
        end.sent += 1
        end.memory.messages.append(frame)
        self._put(end, frame)

    def _put(self, end: _End, frame: Frame) -> None:
        connection = end.connection
        if connection.whole:
            connection.wires[end.me].append(frame)
        is_read = connection.whole and self.other(end).connection is connection
        if frame.packet is not None and frame.packet in self._links.unread:
            self._links.hold(frame.packet, held=not is_read)

    def read(self, end: _End) -> bool:
        """Reads one message; false if there is none."""
        other = self.other(end)
        wire = end.connection.wires[other.me]
        if not wire:
            return False
        frame = wire.popleft()
        due = end.received
        require(frame.number == due, Rule.LINKS, end.me, "reads", frame, "where", due, "is due")
        end.received += 1
        if frame.packet is None:
            end.was_acknowledged(frame.received)
            return True
        self._links.unread.discard(frame.packet)
        if end.took():
            self.pay(end)
        return True

    def read_to_its_end(self, end: _End) -> None:
        """Reads all that can be read."""
        while self.read(end):
            pass

    def pay(self, end: _End) -> None:
        """Acknowledges what arrived."""
        end.receipts.paid()
        end.unpaid = 0
        end.pays_late = False
        self.send(end, None, end.received)

    # --- Connections

    def tear(self, kept: int) -> bool:
        """The newest connection breaks; without ``kept``, what is said of others is lost."""
        connection = self.acceptor.connection
        if not (connection.whole or self.air):
            return False
        connection.tear(kept)
        if not kept:
            self.air.clear()
        for end in (self.opener, self.acceptor):
            if end.connection is connection:
                self._find_what_is_held(end)
        return True

    def _find_what_is_held(self, end: _End) -> None:
        """Of what is to come to an end: only what is on its connection can be read there."""
        other = self.other(end)
        readable = {frame.packet for frame in end.connection.wires[other.me]}
        for frame in other.memory.messages:
            if frame.packet is not None and frame.packet in self._links.unread:
                self._links.hold(frame.packet, held=frame.packet not in readable)

    def possible(self, end: _End, move: Move) -> bool:
        """True if an end may do something."""
        if move is Move.NOTICE:
            return end.broke_at is None and not end.connection.whole
        return end.broke_at is not None and (move is Move.OPEN) == (end is self.opener)

    def notice(self, end: _End) -> None:
        """An end reads its connection to its end, and takes in who waits for that."""
        self.read_to_its_end(end)
        end.broke(self._world.now)
        guest, end.guest = end.guest, None
        if guest is not None:
            self._take_in(end, guest)

    def open(self, end: _End) -> None:
        """The opener opens another connection, and gives up what it opened before."""
        attempt = end.epoch.next_attempt()
        end.newest += 1
        require(attempt == end.newest, Rule.LINKS, end.me, "opens", attempt)
        if self._tried is not None:
            self._tried.whole = False
        self._tried = _Connection(attempt, self.lives)
        self._say(_Said(_Word.HELLO, self.acceptor.me, self._tried, end.received))

    def knock(self, end: _End) -> None:
        """The other end asks for a new connection."""
        self._say(_Said(_Word.KNOCK, self.opener.me, end.connection, 0))

    def _say(self, said: _Said) -> None:
        self._words += 1
        self.air[self._words] = said

    def hear(self, number: int) -> None:
        """A word arrives."""
        said = self.air.pop(number)
        if said.word is _Word.HELLO:
            self._offered(self.acceptor, said)
        elif said.word is _Word.KNOCK:
            self._knocked(self.opener, said.connection.attempt)
        elif said.connection is self._tried:
            self._join(self.opener, said)

    def _offered(self, end: _End, hello: _Said) -> None:
        offer = end.offered(hello.connection.attempt)
        if offer is Replacement.TAKE:
            self._take_in(end, hello)
        elif offer is Replacement.BREAK_FIRST:
            end.guest = hello
            end.connection.whole = False

    def _take_in(self, end: _End, hello: _Said) -> None:
        received = end.received
        self._join(end, hello)
        self._say(_Said(_Word.ANSWER, self.opener.me, hello.connection, received))

    def _join(self, end: _End, said: _Said) -> None:
        again = end.lacking(said.received)
        end.joined(said.connection)
        self._find_what_is_held(end)
        for frame in again:
            self._put(end, frame)
        if again:
            end.memory.sent_again()

    def _knocked(self, end: _End, attempt: int) -> None:
        breaks = end.epoch.reconnect_requested(attempt)
        expected = end.broke_at is None and end.connection.attempt == attempt
        require(breaks == expected, Rule.LINKS, end.me, "is knocked at for", attempt)
        if breaks:
            end.connection.whole = False

    def is_out_of_time(self, end: _End, patience: float) -> bool:
        """True if an end gives the link up instead of trying to mend it."""
        return end.is_out_of_time(self._world.now, patience)

    def check_at_rest(self) -> None:
        """Everything arrived, and no connection is missed."""
        self.read_to_its_end(self.opener)
        self.read_to_its_end(self.acceptor)
        self.read_to_its_end(self.opener)
        for end in (self.opener, self.acceptor):
            other = self.other(end)
            right = self.is_mended and end.sent == other.received
            require(right, Rule.LINKS, end.me, "sent", end.sent, "and", other.received, "came")
            require(not end.is_out_of_time(self._world.now, 1.0), Rule.LINKS, end.me, "gives up")


class Links:
    """All links of a world.

    Args:
        world: the network, the clock and the machines.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.unread: set[Name] = set()
        self._held: set[Name] = set()
        self._all: dict[frozenset[Life], _Link] = {}
        self._torn: dict[frozenset[Life], _Link] = {}

    def hold(self, packet: Name, *, held: bool) -> None:
        """Notes whether a packet must wait until its link is mended."""
        (self._held.add if held else self._held.discard)(packet)

    def holds(self, packet: Packet) -> bool:
        """True if a packet cannot be read before its link is mended."""
        return packet.name in self._held

    def carry(self, packet: Packet) -> None:
        """Sends a packet on the link to its receiver."""
        pair = frozenset((packet.source, packet.to))
        link = self._all.get(pair)
        if link is None:
            if packet.source == packet.to:
                return
            link = self._all[pair] = _Link(packet.source, packet.to, self)
        self.unread.add(packet.name)
        link.send(link.end(packet.source), packet.name)

    def read(self, packet: Packet) -> None:
        """Reads a link up to a packet, if that was not read already."""
        if packet.name not in self.unread:
            return
        link = self._all[frozenset((packet.source, packet.to))]
        end = link.end(packet.to)
        while packet.name in self.unread:
            require(link.read(end), Rule.LINKS, packet, "is lost")

    def pay(self) -> None:
        """Acknowledges everywhere what is still to be."""
        for link in self._all.values():
            for end in (link.opener, link.acceptor):
                if end.pays_late:
                    link.pay(end)

    def tear(self, one: Life, other: Life, kept: int) -> bool:
        """A connection breaks while both ends live; false if there is none to break."""
        pair = frozenset((one, other))
        link = self._all.get(pair)
        if link is None or not link.tear(kept):
            return False
        self._torn[pair] = link
        return True

    @property
    def are_broken(self) -> bool:
        """True if one is being mended."""
        return bool(self._torn)

    def pairs(self) -> list[tuple[Life, Life]]:
        """All links, by their ends."""
        return [link.lives for link in self._all.values()]

    def acts(self, patience: float) -> Iterator[Mending]:
        """What may happen to broken links; always doing the first mends them all."""
        for link in self._torn.values():
            if self.world.divides(*link.lives):
                continue
            for number in link.air:
                yield steps.Greet(*link.lives, number)
            for move in Move:
                for end in (link.opener, link.acceptor):
                    if link.possible(end, move):
                        yield steps.Mend(end.me, link.other(end).me, move, patience)

    def greet(self, act: steps.Greet) -> bool:
        """A word about connections arrives."""
        link = self._torn.get(frozenset((act.one, act.other)))
        if link is None or act.number not in link.air or self.world.divides(*link.lives):
            return False
        link.hear(act.number)
        self._look_at(link)
        return True

    def mend(self, act: steps.Mend) -> bool:
        """An end sees to its broken connection."""
        link = self._torn.get(frozenset((act.by, act.other)))
        end = link and link.end(act.by)
        if not link or not end or not link.possible(end, act.move):
            return False
        if act.move is Move.NOTICE:
            link.notice(end)
        elif link.is_out_of_time(end, act.patience):
            self.world.give_up(*link.lives)
        elif act.move is Move.OPEN:
            link.open(end)
        else:
            link.knock(end)
        self._look_at(link)
        return True

    def _look_at(self, link: _Link) -> None:
        if link.is_mended:
            self._torn.pop(frozenset(link.lives), None)

    def end(self, one: Life, other: Life) -> None:
        """A link is over: what can be read is read, the rest is lost."""
        pair = frozenset((one, other))
        self._torn.pop(pair, None)
        link = self._all.pop(pair, None)
        if link is None:
            return
        for end in (link.opener, link.acceptor):
            if end.me in self.world.living:
                link.read_to_its_end(end)
        for end in (link.opener, link.acceptor):
            for frame in end.forget():
                if frame.packet in self._held:
                    self._held.discard(frame.packet)
                    self.world.network.pop(frame.packet, None)

    def end_all(self, life: Life) -> None:
        """A life is over."""
        for one, other in [lives for lives in self.pairs() if life in lives]:
            self.end(one, other)

    def keeps(self, life: Life) -> bool:
        """True if something that ``life`` sent waits until its link is mended."""
        network = self.world.network
        return any(network[name].source == life for name in self._held if name in network)

    def check_at_rest(self) -> None:
        """Nothing is under way."""
        for link in self._all.values():
            link.check_at_rest()
        lost = self._held & self.world.network.keys()
        require(not lost, Rule.LINKS, "held for ever:", lost)
