"""The snapshots that one coordinator is asked for: their drafts, and who asks for the same one.

All trainers of a program may ask for one snapshot: for the same folder, at the same step. Whoever
asks while it is written, or later, gets that one.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Final

from tensorwire.checkpoint import CheckpointError, Draft
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.tasks import Conclude, Examined
from tensorwire.parameter_server.decisions.views import Client, Snapshot, View
from tensorwire.parameter_server.server.shard import Call
from tensorwire.parameter_server.snapshots.contents import FORMAT, about_samples, part_name
from tensorwire.parameter_server.snapshots.published import saved_at

_logger: Final = logging.getLogger("tensorwire")


@dataclass(slots=True)
class _Wanted:
    """A snapshot that is being written, or was; and who asked for it."""

    order: orders.TakeSnapshot
    draft: Draft | None
    askers: set[Client | None]
    also: list[Call] = field(default_factory=list)

    def is_meant_by(self, what: orders.TakeSnapshot) -> bool:
        return self.order.step == what.step or -1 in (self.order.step, what.step)


@dataclass(frozen=True, slots=True)
class Refused:
    """A snapshot cannot be begun.

    Args:
        reason: the reason.
    """

    reason: str


class Drafts:
    """The snapshots of one coordinator."""

    def __init__(self) -> None:
        self._under_way: dict[int, _Wanted] = {}
        self._done: dict[str, _Wanted] = {}

    def begin(
        self, request: int, call: Call, what: orders.TakeSnapshot, view: View
    ) -> orders.TakeSnapshot | Snapshot | Refused | None:
        """Begins a snapshot that is wanted.

        Returns:
            The order to take it; the snapshot if it was taken for another; ``Refused``; None if it
            is being taken for another, whose answer this call gets as well.
        """
        for each in self._under_way.values():
            if each.order.folder == what.folder:
                return self._join(each, call, what)
        known = self._taken(what, view)
        if known is not None:
            return known
        try:
            draft = Draft.create(what.folder, what.overwrite)
        except (OSError, ValueError, CheckpointError) as error:
            return Refused(str(error))
        order = orders.TakeSnapshot(
            what.folder, str(draft.folder), what.extra, what.overwrite, what.asker, what.step
        )
        self._under_way[request] = _Wanted(order, draft, {what.asker})
        return order

    def _join(self, wanted: _Wanted, call: Call, what: orders.TakeSnapshot) -> Refused | None:
        if not wanted.is_meant_by(what) or wanted.order.extra != what.extra:
            return Refused(
                f"{what.folder!r} is being written with step={wanted.order.step} and "
                f"extra={wanted.order.extra!r}, not step={what.step} and extra={what.extra!r}"
            )
        wanted.askers.add(what.asker)
        wanted.also.append(call)
        return None

    def _taken(self, what: orders.TakeSnapshot, view: View) -> Snapshot | None:
        """The same snapshot, if another has had it taken."""
        began, *_ = view.settings.get("restore", [""])
        earlier = [s for s in view.snapshots if s.folder == what.folder != began]
        if not earlier or what.asker is None or what.step < 0:
            return None
        wanted = self._done.get(what.folder)
        if wanted is None:  # another coordinator's: it is the same if it has all of the asker's
            trainer = view.trainer(what.asker)
            count = -1 if trainer is None else earlier[0].counts.get(trainer.number, -1)
            return earlier[0] if count >= what.step and not what.overwrite else None
        is_new = what.asker not in wanted.askers and wanted.order.extra == what.extra
        if not (is_new and wanted.order.step == what.step):
            return None
        wanted.askers.add(what.asker)
        return earlier[0]

    def end(self, request: int, is_done: bool) -> list[Call]:
        """Ends a request that is answered; returns who else gets that answer."""
        wanted = self._under_way.pop(request, None)
        if wanted is None:
            return []
        if is_done:
            self._done[wanted.order.folder] = wanted
        elif wanted.draft is not None:
            with contextlib.suppress(OSError):
                wanted.draft.discard()
        wanted.draft = None
        return wanted.also

    def close(self) -> list[Call]:
        """Discards all drafts; returns who waits beside those who asked first."""
        return [call for request in list(self._under_way) for call in self.end(request, False)]

    def commit(self, effect: Conclude, view: View) -> bool | str:
        """Writes the manifest of a snapshot; returns True, or why that failed."""
        wanted = [w for w in self._under_way.values() if w.order.folder == effect.snapshot.folder]
        if not wanted or wanted[0].draft is None:
            return "it was given up"
        draft, wanted[0].draft = wanted[0].draft, None  # nobody else ends it from here on
        about = {
            "parameter_server": FORMAT,
            "counts": [list(each) for each in sorted(effect.snapshot.counts.items())],
            "time": effect.snapshot.time,
            "epoch": view.epoch,
            "settings": dict(view.settings),
            "extra": effect.extra,
            **about_samples(view.samplers, effect.snapshot.accounts),
        }
        try:
            draft.commit([part_name(shard) for shard in effect.parts], about)
        except Exception as error:  # whatever it is, somebody waits for an answer
            _logger.error("the snapshot %s was not completed: %s", draft.path, error)
            with contextlib.suppress(OSError):
                draft.discard()
            return f"{type(error).__name__}: {error}"
        return True


def examine(snapshots: tuple[Snapshot, ...]) -> Examined:
    """Reads snapshots until one is whole, and says in the log which are passed over."""
    reasons = []
    for each in snapshots:
        try:
            restored = saved_at(each.folder)
            restored.require_moment(each)
            restored.verify()
        except Exception as error:  # whatever it is, the next one may be whole
            _logger.warning("the snapshot %s is passed over: %s", each.folder, error)
            reasons.append(f"{each.folder!r}: {error}")
        else:
            return Examined(each, "; ".join(reasons))
    return Examined(None, "; ".join(reasons))
