"""Divides pushes and pulls among the shards, and packs the part of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

import rpc
from rpc import extend
from tensorwire.parameter_server.client import splitting
from tensorwire.parameter_server.client.exchange import PendingPull, StepPush
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.messages import TableIds


class Packer:
    """The messages of one worker to the shards.

    Has no lock: views and pulls are the caller's, and what was pulled last is replaced as a whole.

    Args:
        worker: whose memory messages are sent from.
    """

    def __init__(self, worker: extend.Worker) -> None:
        self._worker = worker
        self._last_pull: dict[tuple[str, ...], tuple[splitting.Split, int]] = {}
        """By tables, the split of the last ids that were pulled or pushed, and the pull's number:
        a push of the same ids names that pull, and sends none."""

    def split(self, asked: PendingPull, view: View) -> None:
        """Divides a pull among the shards of a view; what was answered before is forgotten."""
        asked.epoch, asked.slots = view.epoch, view.slots
        asked.missing, asked.answers = set(view.active), {}
        asked.splits = [splitting.split(ids, view.slots, view.epoch) for ids in asked.tables]

    def question(
        self, asked: PendingPull, splits: Sequence[splitting.Split], shard: int, trainer: int
    ) -> messages.Ask:
        """A shard's part of a pull.

        Args:
            asked: the pull.
            splits: its tables, as they were split for the shards of which this is one.
            shard: its number.
            trainer: number of this trainer; -1 if it is none.
        """
        tables = tuple([parted.parts[shard][1] for parted in splits])
        name = self._worker.info.name
        number = -1 if asked.is_aside else trainer
        known = tuple([
            each.at(shard, parted.parts[shard][0])
            for each, parted in zip(asked.known, splits, strict=False)
        ])  # fmt: skip
        return messages.Ask(number, name, asked.number, tables, asked.dense, known)

    def pulled(self, asked: PendingPull) -> None:
        """Notes that a pull was answered; the next push of its ids may name it."""
        for parted in () if asked.is_aside else asked.splits:
            self._last_pull[parted.rows.tables] = (parted, asked.number)

    def forget(self) -> None:
        """Names no pull that was made before now."""
        self._last_pull.clear()

    def split_of(self, rows: TableIds, view: View) -> tuple[splitting.Split, int]:
        """The split by which these very ids were pulled, and the pull's number, or a new one."""
        parted, pulled = self._last_pull.get(rows.tables, (None, -1))
        if parted is not None and parted.rows.ids is rows.ids and parted.epoch == view.epoch:
            return parted, pulled
        parted = splitting.split(rows, view.slots, view.epoch)
        self._last_pull[rows.tables] = (parted, -1)
        return parted, -1

    def gather(self, whole: StepPush, view: View) -> bool:
        """Copies the dense gradients of a push to where they are sent from, before it is sent.

        Returns:
            False if one of them is infinite or not a number; the push may still be given up.
        """
        finite = True
        for shard in view.active if whole.dense else ():
            described = view.shard(shard)
            head = described.head if described is not None and described.chain else None
            pushes = self._dense(whole, view, shard, head)
            whole.gathered[view.epoch, shard, head] = {n: push for n, (push, _) in pushes.items()}
            finite &= all(is_finite for _, is_finite in pushes.values())
        return finite

    def load(self, whole: StepPush, view: View, shard: int, head: Server) -> messages.Load | None:
        """A shard's part of a push; None if it is an empty one."""
        if whole.kind is not PushKind.UPDATE or shard in whole.refused_by:
            return None
        tables, buffers = [], partial(self._buffer, head)
        for each in whole.tables:
            parted, pulled = self.split_of(each.rows, view)
            tables.append(splitting.table_push(each, parted, shard, pulled, buffers))
        dense = whole.gathered.pop((view.epoch, shard, head), None)
        if dense is None:
            again = self._dense(whole, view, shard, head)
            dense = {name: push for name, (push, _) in again.items()}
        return messages.Load(tuple(tables), dense)

    def _dense(
        self, whole: StepPush, view: View, shard: int, head: Server | None
    ) -> dict[str, tuple[messages.DensePush, bool]]:
        """A shard's share of each dense group, and whether it is finite."""
        buffers = partial(self._buffer, head)
        return {
            name: splitting.dense_push(group, view.slots, shard, buffers)
            for name, group in whole.dense.items()
        }

    def _buffer(self, to: Server | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory to send from."""
        with suppress(rpc.RpcError):
            if to is not None:
                return self._worker.send_buffer(to.name, shape, dtype)
        return torch.empty(shape, dtype=dtype)
