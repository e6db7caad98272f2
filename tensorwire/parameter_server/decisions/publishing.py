"""Decides how a version of the state is taken and becomes published, among other changes.

A trainer publishes: it names a draft, has the shards write what they have at a cut into it, commits
the version, and then says so. Only then do shards forget what they had to write. If anybody is lost
in between, the next version holds it once more. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from functools import partial
from typing import Final

from tensorwire.parameter_server.decisions import orders, view_changes
from tensorwire.parameter_server.decisions.pushes import Reached
from tensorwire.parameter_server.decisions.tasks import (
    WENT_BACK,
    AskAll,
    Edit,
    Effect,
    Fail,
    Others,
    Reply,
    Steps,
    Tasks,
    Wait,
)
from tensorwire.parameter_server.decisions.views import KEPT, Publisher, View
from tensorwire.parameter_server.opaque import Resumed

_DECLARED: Final = "a table was declared while the version was written"


class Publishing(Tasks):
    """The part of a coordinator that publishes versions."""

    def _cut(
        self, joins: Collection[int] = (), action: object = None, samplers: tuple[str, ...] = ()
    ) -> Generator[Wait, Resumed, Reached]:
        """Brings all shards to one cut."""
        raise NotImplementedError

    def _take_version(self, request: int, what: orders.TakeVersion) -> Steps:
        other = self._other_publisher(what)
        if other:
            self._effects.append(Fail(request, other))
            return
        folder = what.draft.rpartition("/")[0]
        publisher = Publisher(what.asker, folder, what.version.chain)
        yield Edit(lambda view: view_changes.with_publisher(view, publisher))
        generation, kept = self.view.generation, _undeclared(self.view)
        since = what.since
        if since is not None and (since.generation, since.kept) != (generation, kept):
            self._effects.append(Reply(request, None))
            return
        left = frozenset(each.number for each in self.view.left)
        reached = yield from self._cut(action=orders.Freeze(what.version))
        cut = reached.cut
        shards = [shard.number for shard in self.view.shards]
        yield Others()
        draft = f"{what.draft}/{cut.change}"
        answers = yield AskAll({shard: orders.Write(cut.change, draft) for shard in shards})
        parts = [answers.get(shard) for shard in shards]
        if any(isinstance(part, orders.Unmarked) for part in parts):
            self._effects.append(Reply(request, None))
            return
        missing = [why_not_written(s, part) for s, part in zip(shards, parts, strict=True)]
        if generation != self.view.generation:
            missing = [WENT_BACK]
        elif kept != _undeclared(self.view):
            missing = [_DECLARED]
        if any(missing):
            self._effects.append(Fail(request, "; ".join(filter(None, missing))))
            return
        written = tuple(part for part in parts if isinstance(part, orders.Written))
        at = orders.CutOfVersion(cut.change, cut.vector, cut.time, left, reached.accounts)
        self._effects.append(
            Reply(request, orders.VersionTaken(draft, at, orders.Since(generation, kept), written))
        )

    def _other_publisher(self, what: orders.TakeVersion) -> str:
        """The reason for which this trainer may not publish; empty if it may."""
        known = self.view.publisher
        if known is None or known.client == what.asker or self.view.trainer(known.client) is None:
            return ""
        name, folder = known.client.name, known.folder
        if name == what.asker.name and known.client.incarnation < what.asker.incarnation:
            return ""  # its former life, of whose end nobody has heard yet
        return f"trainer {name!r} publishes this cluster already, into {folder!r}"

    def publisher_lost(self, name: str, incarnation: int) -> list[Effect]:
        """Takes note that a worker is gone, which may have published, or asked to."""
        self._line_up(lambda: self._end_publishing_of(name, incarnation))
        return self._flush()

    def _end_publishing_of(self, name: str, incarnation: int) -> Steps:
        publisher = self.view.publisher
        if publisher is not None:
            client = publisher.client
            if (client.name, client.incarnation) == (name, incarnation):
                yield from self._end_publishing(publisher.chain)

    def _stop_publishing(self, request: int, what: orders.EndPublishing) -> Steps:
        """Ends a chain, as no more versions follow."""
        yield from self._end_publishing(what.chain)
        self._effects.append(Reply(request, None))

    def _end_publishing(self, chain: str) -> Steps:
        """Has shards note no longer what changes, unless it is noted for another chain by now."""
        publisher = self.view.publisher
        if publisher is not None and publisher.chain == chain:
            yield from self._cut(action=orders.EndMarks(chain))
            yield Edit(lambda view: view_changes.with_publisher(view, None))

    def _publish(self, request: int, what: orders.Commit) -> Steps:
        """Lets shards forget what a whole version holds; the cluster can go back to it."""
        if what.since.generation != self.view.generation:
            self._effects.append(Fail(request, WENT_BACK))
            return
        if what.snapshot is not None:
            keep = partial(view_changes.published, snapshot=what.snapshot, without=what.at.left)
            yield Edit(keep)
        yield AskAll({s.number: orders.Published(what.at.change) for s in self.view.shards})
        self._effects.append(Reply(request, None))


def _undeclared(view: View) -> frozenset[str]:
    """The names that a restored snapshot has and nobody has declared yet."""
    return frozenset(name for name, text in view.declared.items() if text.startswith(KEPT))


def why_not_written(shard: int, answer: object) -> str:
    """The reason for which a shard wrote no part of what it was told to; empty if it did.

    Args:
        shard: its number.
        answer: the shard's; a text says what went wrong, None that nobody was left to answer.
    """
    if answer is None:
        return f"the servers of shard {shard} that knew its rows at that point were lost meanwhile"
    return f"shard {shard} could not write its part: {answer}" if isinstance(answer, str) else ""
