"""A trainer in a game under SSP or async: trains the batches that it has on lease."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tensorwire.parameter_server.decisions.consistency import Async
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.decisions.samples import Account, Deal, LeaseAsked, Leased
from tests.tensorwire.parameter_server.game.reading import SAMPLER, Work

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.trainers import TrainerProcess

_UNKNOWN = -1


class Leasing:
    """The batches that one trainer may train.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: TrainerProcess) -> None:
        self._trainer = trainer
        self._game = trainer.game
        self._batches: list[int] = []
        self._deal = _UNKNOWN
        self._deals = _UNKNOWN
        self._account = Account()
        """The positions of files that are begun, as far as it knows."""
        self._asked = 0

    def forget(self) -> None:
        """Nothing that it was given is its own any more."""
        self._batches, self._deal, self._deals = [], _UNKNOWN, _UNKNOWN

    def train(self) -> None:
        """Pushes what is next, or asks for more; may forget what it was given, as a loop does."""
        trainer, dice = self._trainer, self._game.random
        if self._deals not in (_UNKNOWN, trainer.deals_heard) and dice.random() < 0.9:
            self.forget()  # else it has not looked at what it heard
        if dice.random() < 0.03:
            self.forget()
        if self._batches:
            few = self._batches[: dice.choice([1, 1, 1, 2])]
            work = trainer.work_on(few, self._account)
            self._account = self._account.trained(trainer.number, work.batches)
            self._batches = [n for n in self._batches if n not in work.batches.numbers]
            is_empty = not work.units or dice.random() < 0.1
            self._push(PushKind.SKIP if is_empty else PushKind.UPDATE, work)
        else:
            self._ask()

    def _push(self, kind: PushKind, work: Work | None) -> None:
        trainer = self._trainer
        self._game.works[trainer.number, trainer.next] = work
        trainer.push(trainer.next, kind)
        trainer.next += 1
        if kind is PushKind.FINISH:
            trainer.phase = "finish"
        else:
            trainer.pull()

    def _ask(self) -> None:
        trainer, at = self._trainer, self._place()
        self._asked += 1
        asked = LeaseAsked(
            trainer.number, SAMPLER, self._asked, 0, self._game.plan.batches, trainer.next,
            self._deal == _UNKNOWN,
        )  # fmt: skip

        self._send(asked, at)

    def _send(self, asked: LeaseAsked, at: tuple[int, int]) -> None:
        """Asks whoever gives leases by now; under the same number until there is an answer."""
        trainer = self._trainer
        assert trainer.view is not None
        shard = trainer.view.shard(trainer.view.active[0])

        def is_open() -> bool:
            return at == self._place() and trainer.phase == "work" and asked.number == self._asked

        def answered(answer: Any) -> None:
            if not is_open():
                return
            if isinstance(answer, Leased):
                self._take(asked, answer)
            else:
                self._game.later(trainer, again)

        def again() -> None:
            trainer.look()
            if is_open():
                self._send(asked, at)

        if shard is None or not shard.chain:
            self._game.later(trainer, again)
        else:
            trainer.call(shard.head, ("lease", shard.number, asked), answered)

    def _place(self) -> tuple[int, int]:
        return self._trainer.generation, self._trainer.next

    def _take(self, asked: LeaseAsked, answer: Leased) -> None:
        if self._deal not in (_UNKNOWN, answer.deal):
            self.forget()
            self._ask()
            return
        self._deal, self._deals = answer.deal, max(answer.deals, self._trainer.deals_heard)
        self._trainer.deals_heard = self._deals
        self._batches = list(range(answer.begin, answer.end))
        self._account = Account(deal=Deal(answer.deal), begun=answer.begun)
        is_behind = self._trainer.next < answer.time
        if answer.is_done:
            self._push(PushKind.FINISH, None)
        elif self._batches:
            self.train()
        elif not is_behind or isinstance(self._game.plan.consistency, Async):
            self._game.later(self._trainer, partial(self._wait, self._place()))
        else:
            self._push(PushKind.SKIP, None)

    def _wait(self, at: tuple[int, int]) -> None:
        """Others train what is left."""
        self._trainer.look()
        if self._trainer.phase == "work" and at == self._place():
            self._ask()
