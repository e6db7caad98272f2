"""The facts about a server that whoever watches its job sees, and whom its shards wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.node import Node
    from tensorwire.parameter_server.server.shard import ShardServer


def facts_of(nodes: dict[str, Node]) -> dict[str, object]:
    """Counts of a server's rows, bytes and updates, over all its clusters, as plain data."""
    shards = [shard for node in nodes.values() for shard in list(node.shards.values())]
    heads = [shard for shard in shards if shard.replica.is_head]
    waits_for = {name for node in nodes.values() for name in trainers_behind(node)}
    broken = [f"shard {each.replica.shard}: {each.broken}" for each in shards if each.broken]
    return {
        "clusters": ", ".join(sorted(nodes)),
        "heads": len(heads),
        "backups": len(shards) - len(heads),
        "rows": sum(len(table) for each in heads for table in list(each.state.tables.values())),
        "bytes": sum(each.state.bytes for each in shards),
        "updates": sum(each.state.updates for each in heads),
        "pulls": sum(each.pulled for each in heads),
        "seconds in pushes": round(sum(each.seconds["pushes"] for each in shards), 3),
        "seconds in pulls": round(sum(each.seconds["pulls"] for each in shards), 3),
        "staleness": {name: behind for node in nodes.values() for name, behind in _behind(node)},
        "waits_for": sorted(waits_for),
        **({"broken": broken} if broken else {}),
    }


def trainers_behind(node: Node) -> set[str]:
    """The trainers whose pushes this server's pulls, or pushes of others, wait for."""
    names = _names(node)
    behind: set[str] = set()
    for shard in list(node.shards.values()):
        held = shard.replica.clock.held
        if shard.replica.is_head and (shard.replica.parked or held):
            counts = {t: count for t, count in _counts(shard).items() if t not in held}
            low = min(counts.values(), default=0)
            behind |= {names[t] for t, count in counts.items() if count == low and t in names}
    return behind


def _behind(node: Node) -> list[tuple[str, int]]:
    """The pushes that each trainer is behind the foremost, at the shard where that is most."""
    names, most = _names(node), dict[str, int]()
    for shard in list(node.shards.values()):
        counts = _counts(shard)
        first = max(counts.values(), default=0)
        for trainer, count in counts.items():
            if trainer in names:
                most[names[trainer]] = max(most.get(names[trainer], 0), first - count)
    return sorted(most.items())


def _names(node: Node) -> dict[int, str]:
    return {} if node.view is None else {t.number: t.client.name for t in node.view.trainers}


def _counts(shard: ShardServer) -> dict[int, int]:
    clock = shard.replica.clock
    return {trainer: clock.count(trainer) for trainer in clock.members}
