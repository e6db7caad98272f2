"""Follows parts of files from the loader to the push that they become part of.

Beside what ``tracking`` does for batches it knows of each file how many pushes have trained parts
of it, so that servers can tell whether a part begins where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tensorwire.parameter_server.client.assignment import Assignment
from tensorwire.parameter_server.client.file_loading import FileLoader
from tensorwire.parameter_server.client.file_reading import FileToRead, Mark
from tensorwire.parameter_server.client.tracking import Ticket, Tracked
from tensorwire.parameter_server.decisions.files import Part, checksum
from tensorwire.parameter_server.opaque import UserValue

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

Source = Callable[[int], tuple[int, UserValue]]
"""The epoch of a file, and the file, by its number."""


class TrackedFiles(Tracked):
    """The batches of a loader that reads files.

    Args:
        cluster: see :class:`Tracked`.
        name: likewise.
        assigned: finds out which files are this trainer's.
        window: the numbers of the files that this is about.
        reader: reads files with the loader.
        source: finds files.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        assigned: Assignment,
        window: tuple[int, int],
        reader: FileLoader,
        source: Source,
    ) -> None:
        super().__init__(cluster, name, assigned, ())
        self._window = window if assigned.shares else (0, 0)
        self._reader = reader
        self._source = source
        self._files: tuple[FileToRead, ...] = ()
        self._unread: list[int] = []
        self._places: dict[int, bytes | None] = {}
        self._ended: dict[int, bytes | None] = {}
        """The places at which files were found to end whose end is not part of the state yet."""
        self._ends: list[int] = []
        """Files whose ends no ticket has told of yet."""
        self._pushes: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        """By file, the checksum of the position at which its next part begins."""
        self._in_push: dict[int, bytes | None] = {}
        """By file, the position that the next push reaches."""

    # --- what the loader is to read

    def _fill(self) -> bool:
        """See :class:`Tracked`."""
        while not self._files:
            numbers = self._unread or self._next_numbers(self._reader.at_once)
            self._unread = []
            if not numbers:
                return False
            files = [self._file(number) for number in numbers]
            self._ends += [each.number for each in files if self._has_ended(each)]
            self._files = tuple(each for each in files if not self._has_ended(each))
        return True

    def _file(self, number: int) -> FileToRead:
        begun = self._assigned.begun.get(number)
        epoch, source = self._source(number)
        return FileToRead(number, epoch, source, None if begun is None else begun.position)

    def _has_ended(self, file: FileToRead) -> bool:
        return file.number in self._ended and self._ended[file.number] == file.position

    # --- what the loader has read

    def next_batch(self) -> tuple[UserValue, Ticket]:
        """See :class:`Tracked`."""
        while True:
            if self._batches is None:
                if not self._fill():
                    raise StopIteration
                self._places = {}
                self._batches = self._reader.read(self._files)
            try:
                batch, marks = next(self._batches)
            except StopIteration:
                self._read_all()
                continue
            self._note(marks)
            ends, self._ends = self._ends, []
            return batch, self._ticket((*((number, None) for number in ends), *marks))

    def _note(self, marks: tuple[Mark, ...]) -> None:
        """Notes that a batch reaches these places."""
        held = {each.number for each in self._files}
        for number, position in marks:
            if number not in held:
                raise RuntimeError(
                    f"sampler {self._name!r}: the loader has told a position in file "
                    f"{self._source(number)[1]!r}, which was not given to it"
                )
            self._places[number] = position

    def _ticket(self, marks: tuple[Mark, ...]) -> Ticket:
        parts = tuple(Part(number, 0, position) for number, position in marks)
        deal, (rollbacks, _) = self._assigned.deal, self._assigned.seen
        return Ticket(self._name, (), deal, self._turn, rollbacks, parts, self._window)

    def _read_all(self) -> None:
        """Ends a reading: files that the loader has not looked at come once more."""
        files, self._files, self._batches = self._files, (), None
        for each in files:
            if self._places and each.number not in self._places:
                self._unread.append(each.number)
                continue
            position = self._places.get(each.number, each.position)
            if position is None and each.number in self._places:
                continue  # a ticket has told of its end
            self._ended[each.number] = position
            self._ends.append(each.number)

    # --- turns

    def give(self, ticket: Ticket) -> bool:
        """See :class:`Tracked`."""
        if not len(self._cluster.given):
            self._pushes |= {number: self._pushes_of(number) + 1 for number in self._in_push}
            self._begins |= {number: checksum(at) for number, at in self._in_push.items()}
            self._in_push.clear()
        ticket = self._numbered(ticket)
        if not super().give(ticket):
            return False
        self._in_push |= {part.file: part.position for part in ticket.parts}
        for part in ticket.parts:
            if part.position is None:
                self._ended.pop(part.file, None)
        return True

    def _numbered(self, ticket: Ticket) -> Ticket:
        """Returns the parts with the pushes before each."""
        parts = [
            replace(part, pushes=self._pushes_of(part.file), begins=self._begin_of(part.file))
            for part in ticket.parts
        ]
        return replace(ticket, parts=tuple(parts))

    def _begin_of(self, number: int) -> int:
        if number not in self._begins:
            begun = self._assigned.begun.get(number)
            self._begins[number] = checksum(None if begun is None else begun.position)
        return self._begins[number]

    def _pushes_of(self, number: int) -> int:
        if number not in self._pushes:
            begun = self._assigned.begun.get(number)
            self._pushes[number] = 0 if begun is None else begun.pushes
        return self._pushes[number]

    def _look(self) -> bool:
        self._batches, self._files, self._unread, self._ends = None, (), [], []
        self._pushes.clear()
        self._begins.clear()
        self._in_push.clear()
        return super()._look()

    def _settles(self) -> bool:
        if not self._ends:
            return False
        self._give_ends()
        self._cluster.pass_step()
        return True

    def _waits_for_a_push(self) -> bool:
        waits = super()._waits_for_a_push()
        if waits and self._ends:
            self._give_ends()
        return waits

    def _give_ends(self) -> None:
        """Has the next push tell of files that have ended."""
        ends, self._ends = self._ends, []
        self._cluster.given.add(self._numbered(self._ticket(tuple((n, None) for n in ends))))
