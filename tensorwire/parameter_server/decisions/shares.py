"""Decides which shards a server keeps when it hears of a view. Sans-IO.

Calls overtake views: a server that slept is sent the copy of a shard, and only then hears of views
that are older than the copy. These do not say what becomes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensorwire.parameter_server.decisions.views import Server, Shard, View


def of(view: View, server: Server) -> dict[int, Shard]:
    """The shards that a server is to keep, by number."""
    return {shard.number: shard for shard in view.shards if server in shard.chain}


def given_up(
    view: View, server: Server, kept: Mapping[int, int], joining: Collection[int]
) -> list[int]:
    """The shards of which a server no longer keeps what it has.

    Args:
        view: of which it hears.
        server: it.
        kept: by number of the shards that it has, the latest version of their chain that it knows.
        joining: of these, the ones that were copied to it; a view names it soon.
    """
    staying = of(view, server)
    return [
        number
        for number, version in kept.items()
        if number not in staying
        and not (number in joining and view.shard(number) is not None)
        and not _is_before(view, number, version)
    ]


def _is_before(view: View, number: int, version: int) -> bool:
    """True if a view is older than that version of a shard's chain."""
    shard = view.shard(number)
    return number >= view.made if shard is None else shard.version < version
