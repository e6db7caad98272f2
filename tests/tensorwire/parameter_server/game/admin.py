"""Somebody in a game who is no trainer, and asks for things that concern the whole cluster."""

from __future__ import annotations

from typing import Any

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.tasks import Reply
from tensorwire.parameter_server.decisions.views import Server, View
from tests.tensorwire.parameter_server.game.processes import Process
from tests.tensorwire.parameter_server.game.reading import SAMPLER
from tests.tensorwire.parameter_server.game.servers import ServerProcess


class Admin(Process):
    """Asks for snapshots and resizes, and tells the coordinator of servers that came."""

    def lost(self, life: Server) -> None:
        pass

    def see(self, view: View) -> None:
        pass

    def ask(self, what: Any, again: bool) -> None:
        def answered(answer: Any) -> None:
            if again and not isinstance(answer, Reply):
                self.game.later(self, lambda: self.ask(what, again))

        self.call(self.game.view.coordinator, ("request", what), answered)

    def look(self) -> None:
        """Asks how far the samples are; rules look at what it is told."""
        shard = self.game.view.shard(self.game.view.active[0])
        if shard is not None and shard.chain:
            self.call(shard.head, ("account", shard.number, SAMPLER), lambda _: None)

    def snapshot(self, folder: str) -> None:
        self.ask(orders.TakeSnapshot(folder, folder), again=False)

    def resize(self, servers: list[Server]) -> None:
        self.ask(orders.Resize(tuple(servers)), again=False)

    def arrive(self, process: ServerProcess) -> None:
        is_there = process.life in self.game.living
        if is_there and not self.game.over() and not self.game.view.broken:

            def answered(answer: Any) -> None:
                if not isinstance(answer, Reply):
                    self.game.later(self, lambda: self.game.announce(process))

            what = ("request", orders.Arrive(process.life))
            self.call(self.game.view.coordinator, what, answered)
