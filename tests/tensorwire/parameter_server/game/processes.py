"""A life of a worker in a game: how it calls others, and hears who came and who was lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorwire.parameter_server.decisions.confirmation import Confirmation, named_in
from tensorwire.parameter_server.decisions.lives import CUT_OFF, Latest, Verdict, verdict
from tensorwire.parameter_server.decisions.views import Server, View

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game


class Process:
    """A life of a worker."""

    def __init__(self, game: Game, name: str, incarnation: int) -> None:
        self.game = game
        self.name = name
        self.life = Server(name, incarnation)
        self.calls: dict[int, Callable[[Any], None]] = {}
        self.callees: dict[int, Server] = {}
        self.heard: dict[str, Latest] = {}
        self.asleep = False
        self.fell_asleep = 0.0
        self.behind = 0.0
        """Seconds by which its clock is behind, as it stood still while it slept."""
        self.expelled = False
        """The others took it for lost."""
        self.knows = False
        """It has heard of that: to it, all others are gone."""

    def latest(self, name: str) -> Latest | None:
        """The latest life of a name that it has heard of, as a group tells one of its members."""
        if self.knows and name != self.name:
            return CUT_OFF
        return self.heard.get(name)

    def takes_for_lost(self, life: Server) -> bool:
        latest = self.latest(life.name)
        return latest is not None and (
            latest.incarnation > life.incarnation
            or (latest.incarnation == life.incarnation and not latest.lives)
        )

    def learn(self) -> None:
        """It hears that the others took it for lost: its calls fail, now and from now on."""
        if self.knows:
            return
        self.knows = True
        for number in list(self.callees):
            self.answered(number, None)
        self.lost(self.life)

    def call(self, to: Server, what: Any, then: Callable[[Any], None]) -> None:
        """Calls; ``then`` gets the answer, or None if the callee is lost."""
        game = self.game
        game.numbers += 1
        number = game.numbers
        self.calls[number], self.callees[number] = then, to
        gone = to not in game.living or game.cut_off(self.life, to) or self.takes_for_lost(to)
        if gone or not self.has_heard_of(to):
            game.network.append((to, self.life, ("lost", number)))
        else:
            game.send(self.life, to, ("call", number, what))

    def confirm(self, then: Callable[[View], None]) -> None:
        """A newcomer reads the view, and asks servers for theirs before it acts on it."""
        read, new = self.game.shown_to_newcomer(), set[Server]()
        confirmation = Confirmation(read)

        def ask() -> None:
            lives = named_in(read or self.game.first_view, self._latest_incarnation)
            asked = confirmation.to_ask(filter(self._may_know, lives - {self.life}))
            for each in asked:
                Process.call(self, each, ("latest",), partial(told, each))
            if not asked:
                decide()

        def told(by: Server, answer: Any) -> None:
            if answer == "none":
                new.add(by)
            if by not in confirmation.waiting:
                return
            if answer is None and self._may_know(by):
                confirmation.missed(by)
            else:
                confirmation.answered(by, answer if isinstance(answer, View) else None)
            if not confirmation.waiting:
                self.game.later(self, ask)

        def decide() -> None:
            view = confirmation.view
            if view is None:  # it was deleted, and nobody knows it; somebody will write it again
                self.game.later(self, lambda: self.confirm(then))
            elif not self.knows:
                if not confirmation.is_confirmed:
                    self.game.rules.check_unconfirmed(self, view, new)
                then(view)

        ask()

    def _latest_incarnation(self, name: str) -> int:
        found = self.heard.get(name)
        return 0 if found is None else found.incarnation

    def _may_know(self, life: Server) -> bool:
        return verdict(life, self.latest(life.name)) is not Verdict.OVER

    def answered(self, number: int, answer: Any) -> None:
        then = self.calls.pop(number, None)
        self.callees.pop(number, None)
        if then is not None:
            then(answer)

    def knows_of(self, life: Server) -> bool:
        """It has heard of that life, and not of its end."""
        return self.has_heard_of(life) and not self.takes_for_lost(life)

    def has_heard_of(self, life: Server) -> bool:
        """A call to a life that came back meets the one before, which is dead."""
        latest = self.heard.get(life.name)
        return latest is not None and latest.incarnation >= life.incarnation

    def hear_came(self, life: Server) -> None:
        """Lives that came and went between two looks into the store are never heard of."""
        if life.name == self.name and life.incarnation > self.life.incarnation:
            self.learn()
        if self.has_heard_of(life) or (life in self.game.dead and life not in self.game.islands):
            return
        former = self.heard.get(life.name)
        if former is not None and former.lives:
            self.hear_lost(Server(life.name, former.incarnation))
        self.heard[life.name] = Latest(life.incarnation, True)
        self.came(life)

    def came(self, life: Server) -> None:
        pass

    def hear_lost(self, life: Server, is_proven: bool = False) -> None:
        if not self.has_heard_of(life):
            return
        if self.heard[life.name].incarnation == life.incarnation:
            self.heard[life.name] = Latest(life.incarnation, False, is_proven)
        for number, to in list(self.callees.items()):
            if to == life:
                self.answered(number, None)
        self.lost(life)

    def lost(self, life: Server) -> None:
        raise NotImplementedError

    def handle(self, sender: Server, number: int, what: Any) -> None:
        raise NotImplementedError
