"""Decides which push of which trainer a shard applies when, and when a cut is reached.

A clock is a deterministic machine: its inputs are a log, and two clocks that were given one log
are in one state. So a backup runs the same clock on the same log (see ``replication``).

Pushes of a trainer are numbered from its start. ``counts[w]`` is how many of trainer ``w`` were
taken; push ``q`` is held until it is its turn: under BSP when all trainers have pushed ``q``,
otherwise when ``counts[w] == q``. Calls overtake each other and are sent again, so a push may
come early or twice; it is taken once, in order.

A *cut* is one point in the pushes of all trainers that is the same on every shard. ``hold`` stops
the clock and reports its counts; the coordinator takes the maximum of all shards', which every
trainer has sent to all of them; ``cut`` lets the clock go on up to that point, where an action
runs, and from there freely. A cut may change the *epoch*, which numbers the maps from slots to
shards. A push was split by the map of one epoch: what lies before the cut is valid under the old
one, what lies behind it under the new one. So every shard decides alike which is refused. Rows
that move at a cut arrive later; a shard that awaits some reaches no further cut before they are
here, as what is done there (a snapshot, the next move) needs them.

Under BSP a step is on all shards or on none, even if a trainer dies while it pushes: a shard that
has all pushes of its next step tells the others (``Ready``), and takes the step once all have told
it the same. A push of a lost trainer that only some shards got was applied by none. So it is with
each push under SSP and async as soon as samples are counted: an account of what was trained would
not be the same on all shards otherwise, and no cut could say what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorwire.parameter_server.decisions.consistency import BSP, Consistency
from tensorwire.parameter_server.decisions.pushes import (
    Apply,
    Cut,
    Effect,
    Push,
    PushKind,
    Reached,
    Ready,
    Refusal,
    Refused,
    Status,
    Taken,
)
from tensorwire.parameter_server.decisions.samples import (
    Account,
    Batches,
    LeaseAsked,
    Leased,
    NoLessor,
)


class Clock:
    """The clock of one shard.

    Args:
        shard: its number.
        consistency: when pushes are applied.
    """

    def __init__(self, shard: int, consistency: Consistency) -> None:
        self.epoch = 0
        self._shard = shard
        self._together = isinstance(consistency, BSP)
        self._counts: dict[int, int] = {}
        self._members: set[int] = set()
        self._held: dict[tuple[int, int], Push] = {}
        self._holding: int | None = None
        self._cut: Cut | None = None
        self._last: Cut | None = None
        self._awaited: set[int] = set()
        self._silenced: set[int] = set()
        self._limits: dict[int, int] = {}
        self._time = 0
        self._others: frozenset[int] = frozenset()
        self._heard: dict[int, Ready] = {}
        self._told: Ready | None = None
        self._taken: dict[int, int] = {}
        self._accounts: dict[str, Account] = {}
        self._accounts_at_cut: dict[str, Account] = {}

    @property
    def accounts(self) -> Mapping[str, Account]:
        """The accounts of samples as they are now, by the name of the sampler."""
        return self._accounts

    @property
    def accounts_at_cut(self) -> Mapping[str, Account]:
        """The accounts of samples as they were at the last cut that was reached."""
        return self._accounts_at_cut

    @property
    def deals(self) -> int:
        """A number that changes whenever samples are given out anew."""
        return sum([each.deal.number for each in self._accounts.values()])

    @property
    def low(self) -> int | None:
        """Pushes taken of the slowest trainer; None if there is no trainer."""
        return min((self._counts[each] for each in self._members), default=None)

    @property
    def time(self) -> int:
        """Pushes taken of the fastest trainer there ever was; the age of rows is counted in it."""
        return self._time

    @property
    def told(self) -> Ready | None:
        """The last that the other shards were to know; None if nothing in this epoch."""
        return self._told

    @property
    def is_open(self) -> bool:
        """False while rows of other shards are still to come."""
        return not self._awaited

    @property
    def members(self) -> tuple[int, ...]:
        """The trainers that are waited for, in order."""
        return tuple(sorted(self._members))

    @property
    def held(self) -> frozenset[int]:
        """The trainers of which a push is here that waits for pushes of others."""
        return frozenset(trainer for trainer, _ in self._held)

    def count(self, trainer: int) -> int:
        """The number of a trainer's pushes that were taken."""
        return self._counts.get(trainer, 0)

    def status(self) -> Status:
        """The status that a coordinator must know to go on from here."""
        latest = self._cut or self._last
        return Status(
            dict(self._counts),
            self._time,
            self.epoch,
            self._holding,
            latest,
            self._cut is None,
            frozenset(self._awaited),
            frozenset(self._members),
        )

    # --- trainers

    def push(self, push: Push) -> list[Effect]:
        """Takes a push that came, for the first time or again."""
        trainer, number = push.trainer, push.number
        if number < max(self._counts.get(trainer, 0), self._taken.get(trainer, 0)):
            return [Taken(trainer, number)]
        if push.epoch < self.epoch:
            return [Refused(trainer, number, push.epoch, Refusal.MOVED)]
        if trainer not in self._members or trainer in self._silenced:
            return [Refused(trainer, number, push.epoch, Refusal.UNKNOWN)]
        known = self._held.get((trainer, number))
        effects: list[Effect] = []
        if known is not None:
            if known.epoch >= push.epoch:
                return []
            effects.append(Refused(trainer, number, known.epoch, Refusal.MOVED))
        self._held[trainer, number] = push
        return effects + self._advance()

    def silence(self, trainer: int) -> int | None:
        """Takes nothing more of a trainer that was lost.

        Returns:
            How many of its pushes are here, without a gap; None if it is unknown here.
        """
        self._silenced.add(trainer)
        return self._reach(trainer) if trainer in self._counts else None

    def settle(self, trainer: int, keep: int) -> list[Effect]:
        """Counts the first ``keep`` pushes of a lost trainer, which is not waited for then."""
        if trainer not in self._members:
            return []
        self._silenced.add(trainer)
        limit = min(keep, self._reach(trainer))
        self._limits[trainer] = limit
        for key in [key for key in self._held if key[0] == trainer and key[1] >= limit]:
            del self._held[key]
        self._dismiss_settled()
        return self._advance()

    def _reach(self, trainer: int, epoch: int | None = None) -> int:
        """The number of a trainer's pushes that are here without a gap, applied or held.

        Those that are held only if they were split by the map of ``epoch``, if one is given.
        """
        number = self._counts.get(trainer, 0)
        while (held := self._held.get((trainer, number))) is not None:
            if epoch is not None and held.epoch != epoch:
                break
            number += 1
        return number

    def _dismiss_settled(self) -> None:
        for trainer, limit in list(self._limits.items()):
            if self._counts[trainer] >= limit:
                self._dismiss(trainer)

    def _dismiss(self, trainer: int) -> None:
        self._members.discard(trainer)
        self._limits.pop(trainer, None)
        self._accounts = {name: each.forgetting(trainer) for name, each in self._accounts.items()}

    # --- samples

    def lease(self, asked: LeaseAsked) -> Leased | NoLessor:
        """Gives a trainer batches, at the shard with the lowest number of all."""
        account, trainer = self._accounts.get(asked.sampler), asked.trainer
        is_lessor = self.is_open and all(self._shard < other for other in self._others)
        is_here = trainer in self._members and trainer not in self._silenced
        if account is None or not is_lessor or not is_here:
            return NoLessor()
        if asked.is_first and self._counts[trainer] < asked.pushes:
            return NoLessor()  # it cannot be told yet what it has trained
        account, given = account.lease(asked, len(self._members))
        self._accounts[asked.sampler] = account
        is_done = account.is_done(asked.begin, asked.end)
        begun = account.begun_in(*given)
        return Leased(*given, account.deal.number, self.deals, self.time, is_done, begun)

    # --- cuts

    def hold(self, change: int) -> None:
        """Stands still until a cut is named or the change is given up."""
        if change > self._last_change and self._cut is None:
            self._holding = change

    def release(self, change: int) -> list[Effect]:
        """Goes on as if there had been no ``hold``: the change was given up."""
        if self._holding is None or self._holding > change:
            return []
        self._holding = None
        return self._advance()

    def cut(self, cut: Cut) -> list[Effect]:
        """Goes on up to the cut, runs its action there, and goes on."""
        if self._cut is not None or cut.change <= self._last_change:
            return []
        self._holding = None
        self._cut = cut
        return self._advance()

    @property
    def _last_change(self) -> int:
        return self._last.change if self._last else -1

    def awaits(self, source: int) -> bool:
        """True if the rows of that shard must arrive before this one goes on."""
        return source in self._awaited

    def imported(self, source: int, accounts: Mapping[str, Account] | None = None) -> list[Effect]:
        """Takes the rows, and the accounts of samples at the cut, that a shard had to send."""
        self._accounts = {**(accounts or {}), **self._accounts}
        self._awaited.discard(source)
        return self._advance()

    # --- other shards

    @property
    def _is_whole(self) -> bool:
        """True if what is pushed is on all shards or on none."""
        return self._together or bool(self._accounts)

    def heard(self, source: int, ready: Ready) -> list[Effect]:
        """Notes how many pushes another shard has; calls overtake each other."""
        known = self._heard.get(source)
        if known is not None and known.epoch == ready.epoch:
            reach = {
                trainer: max(known.reach.get(trainer, 0), ready.reach.get(trainer, 0))
                for trainer in {*known.reach, *ready.reach}
            }
            self._heard[source] = Ready(ready.epoch, reach)
        elif known is None or known.epoch < ready.epoch:
            self._heard[source] = ready
        return self._advance()

    def _tell(self, step: tuple[Push, ...]) -> list[Effect]:
        """Tells the other shards that all pushes of a step are here, unless a cut says so."""
        if not self._is_whole or not self._others or not step or self._cut is not None:
            return []
        reach = {each: self._reach(each, self.epoch) for each in self._counts}
        ready = Ready(self.epoch, reach, self._others)
        if ready == self._told:
            return []
        self._told = ready
        return [ready]

    def _is_everywhere(self, step: tuple[Push, ...]) -> bool:
        """True if each shard has these pushes; what lies before a cut, one has even applied."""
        if not self._is_whole or self._cut is not None:
            return True
        for other in self._others:
            ready = self._heard.get(other)
            if ready is None or ready.epoch != self.epoch:
                return False
            if any(ready.reach.get(push.trainer, 0) <= push.number for push in step):
                return False
        return True

    # --- going on

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        while True:
            if self._is_at_cut():
                effects += self._pass_cut()
                continue
            step = self._next_step()
            effects += self._tell(step)
            if not step or not self._is_everywhere(step):
                return effects
            effects += self._take(step)

    def _next_step(self) -> tuple[Push, ...]:
        """The pushes that are next, as one update, if they are all here."""
        if self._holding is not None or self._awaited:
            return ()
        ready = [push for each in self.members if (push := self._due(each)) is not None]
        if self._together:
            leaving = [push for push in ready if push.kind is PushKind.FINISH]
            if leaving:
                return (leaving[0],)
            return tuple(ready) if ready and len(ready) == len(self._members) else ()
        return tuple(([p for p in ready if self._is_everywhere((p,))] or ready)[:1])

    def _due(self, trainer: int) -> Push | None:
        """The next push of a trainer, if it is here and may be taken."""
        number = self._counts[trainer]
        push = self._held.get((trainer, number))
        if push is None or push.epoch != self.epoch:
            return None
        if self._cut is not None and number >= self._cut.vector.get(trainer, 0):
            return None
        return push

    def _take(self, step: tuple[Push, ...]) -> list[Effect]:
        for push in step:
            del self._held[push.trainer, push.number]
            self._counts[push.trainer] = push.number + 1
            self._time = max(self._time, push.number + 1)
            if push.kind is PushKind.FINISH:
                self._dismiss(push.trainer)
        self._dismiss_settled()
        counted = self._account(step) if self._accounts else step
        updates = tuple(push for push in counted if push.kind is PushKind.UPDATE)
        effects: list[Effect] = [Apply(updates, self._time)] if updates else []
        return effects + [Taken(push.trainer, push.number) for push in step]

    def _account(self, step: tuple[Push, ...]) -> tuple[Push, ...]:
        """Enters the batches of a step; returns it without pushes whose batches are others' now."""
        if step[0].kind is PushKind.FINISH:
            return step
        counted = []
        for push in step:
            if not self._refuses(push.batches):  # by what was entered of this step, too
                self._enter(push)
                counted.append(push)
        if self._together:
            members = [push.trainer for push in step]
            for name, account in self._accounts.items():
                taken = [p.batches for p in counted if p.batches and p.batches.sampler == name]
                self._accounts[name] = account.stepped(taken, members)
        return tuple(counted)

    def _enter(self, push: Push) -> None:
        """Enters the batches of a push."""
        if push.batches is not None:
            name = push.batches.sampler
            self._accounts[name] = self._accounts[name].trained(push.trainer, push.batches)

    def _refuses(self, batches: Batches | None) -> bool:
        if batches is None:
            return False
        account = self._accounts.get(batches.sampler)
        return account is None or account.refuses(batches)

    def _is_at_cut(self) -> bool:
        if self._cut is None or self._awaited:
            return False
        return all(
            self._counts[trainer] >= number
            for trainer, number in self._cut.vector.items()
            if trainer in self._members
        )

    def _pass_cut(self) -> list[Effect]:
        cut = self._cut
        assert cut is not None
        self._cut, self._last = None, cut
        self._taken |= self._counts  # also of who has finished: their pushes may come again
        self._counts = {each: self._counts[each] for each in self._members}
        self._admit(cut.joins)
        begun = dict.fromkeys(cut.samplers, Account()) | self._accounts
        self._accounts = {name: self._at_cut(each, cut) for name, each in begun.items()}
        self._accounts_at_cut = {n: each.without_leases() for n, each in self._accounts.items()}
        effects: list[Effect] = [Reached(cut, self._accounts_at_cut)]
        if cut.epoch is not None:
            self.epoch = cut.epoch
            self._others, self._told = frozenset(cut.awaited) - {self._shard}, None
            self._awaited = set(cut.awaited.get(self._shard, ()))
            effects += self._refuse_moved()
            if self._shard not in cut.awaited:  # it keeps nothing any more
                self._counts, self._members, self._accounts = {}, set(), {}
        return effects

    def _at_cut(self, account: Account, cut: Cut) -> Account:
        if self._together:
            return account.at_cut(cut.trainers, cut.joins)
        return account if cut.epoch is None else account.free()

    def _admit(self, starts: Mapping[int, int]) -> None:
        for trainer, start in starts.items():
            if trainer not in self._silenced:
                self._counts[trainer] = start
                self._members.add(trainer)

    def _refuse_moved(self) -> list[Effect]:
        old = [push for push in self._held.values() if push.epoch < self.epoch]
        for push in old:
            del self._held[push.trainer, push.number]
        for trainer in list(self._limits):  # it cannot split them again
            self._limits[trainer] = self._reach(trainer)
        self._dismiss_settled()
        return [Refused(p.trainer, p.number, p.epoch, Refusal.MOVED) for p in old]

    # --- handing over

    def prime(
        self,
        counts: Mapping[int, int],
        time: int,
        epoch: int,
        awaited: Iterable[int] = (),
        active: Iterable[int] = (),
        accounts: Mapping[str, Account] | None = None,
    ) -> None:
        """Begins where the other shards are, as a shard that is made at a cut, or restored.

        Args:
            counts: by trainer, how many of its pushes are in the state.
            time: see :attr:`time`.
            epoch: of the map that is valid.
            awaited: shards whose rows must arrive first.
            active: the shards that keep anything in this epoch.
            accounts: of samples, by the name of the sampler.
        """
        self._accounts = dict(accounts or {})
        self._admit(counts)
        self._time = time
        self.epoch = epoch
        self._others, self._told = frozenset(active) - {self._shard}, None
        self._awaited = set(awaited)

    def dump(self) -> dict[str, object]:
        """Everything that a new backup must know."""
        return dict(self._state())

    def load(self, state: Mapping[str, object]) -> None:
        """Becomes what another clock was when it was dumped."""
        for name, value in state.items():
            setattr(self, name, value)

    def _state(self) -> list[tuple[str, object]]:
        return [
            ("epoch", self.epoch),
            ("_counts", dict(self._counts)),
            ("_members", set(self._members)),
            ("_held", dict(self._held)),
            ("_holding", self._holding),
            ("_cut", self._cut),
            ("_last", self._last),
            ("_awaited", set(self._awaited)),
            ("_silenced", set(self._silenced)),
            ("_limits", dict(self._limits)),
            ("_time", self._time),
            ("_others", self._others),
            ("_heard", dict(self._heard)),
            ("_told", self._told),
            ("_taken", dict(self._taken)),
            ("_accounts", dict(self._accounts)),
            ("_accounts_at_cut", dict(self._accounts_at_cut)),
        ]
