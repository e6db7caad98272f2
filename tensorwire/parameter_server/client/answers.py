"""Puts together what the shards have answered to one pull."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from tensorwire.parameter_server.client.exchange import Answer, PendingPull, ShardChanges
from tensorwire.parameter_server.client.splitting import Split, joined_rows, joined_values
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Packed
from tensorwire.parameter_server.messaging.messages import Changed
from tensorwire.parameter_server.opaque import Unpickled


def joined(asked: PendingPull, specs: Mapping[str, Unpickled]) -> Answer:
    """The answer to a pull of which all parts are there.

    Args:
        asked: the pull.
        specs: the declarations of tables and dense groups, by name.
    """
    answers = asked.answers
    rows: list[Tensor] = []
    changes: list[list[ShardChanges]] = []
    for place, parted in enumerate(asked.splits):
        spec = specs[parted.rows.tables[0]]
        packed = {shard: each.tables[place] for shard, each in answers.items()}
        if asked.known:
            changed = {shard: each.changed[place] for shard, each in answers.items()}
            changes.append(_joined_changes(spec, parted, packed, changed))
        else:
            rows.append(joined_rows(spec, parted, packed))
    dense: dict[str, list[Tensor] | None] = {}
    for name in asked.dense:
        values = {shard: each.dense[name] for shard, each in answers.items()}
        known = {shard: each for shard, each in values.items() if each is not None}
        whole = len(known) == len(values)
        dense[name] = joined_values(specs[name], asked.slots, known) if whole else None
    low = min((each.low for each in answers.values()), default=0)
    times = [each.time for each in answers.values()] or [0]
    return Answer(rows, dense, low, changes, (min(times), max(times)))


def _joined_changes(
    spec: TableSpec, parted: Split, packed: Mapping[int, Packed], changed: Mapping[int, Changed]
) -> list[ShardChanges]:
    """The answers of shards about rows that this trainer keeps."""
    changes = []
    for shard, (places, ids) in parted.parts.items():
        about = changed[shard]
        which = np.unpackbits(about.which.numpy(), count=len(ids.ids)).view(bool)
        rows = spec.wire.pull.unpack(packed[shard], spec.dim)
        changes.append(ShardChanges(shard, about.life, about.number, places, which, rows))
    return changes
