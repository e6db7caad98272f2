"""Workers are asked for signs of life, and count as lost when silent for too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.ids import Life
from rpc.protocol.liveness import (
    Ask,
    Effect,
    Evidence,
    Forget,
    Liveness,
    Part,
    Reach,
    Silent,
    Suspicion,
    fingers,
    neighbour,
)

B, C = Life(1, 1), Life(2, 1)
BOUND = 10.0


def run(
    liveness: Liveness, until: float, watched: set[Life], answering: set[Life]
) -> tuple[float, list[Effect]]:
    """Ticks on time until there is something else to do than to ask."""
    now = 0.0
    while now < until:
        now = liveness.due(now)
        effects = liveness.tick(now, watched)
        other = [effect for effect in effects if not isinstance(effect, Ask)]
        if other:
            return now, other
        for life in answering:
            liveness.answered(life)
    return now, []


class TestSilence:
    def test_a_worker_that_answers_is_asked_again_and_again(self) -> None:
        liveness = Liveness(BOUND)
        assert liveness.tick(0, {B}) == [Ask(B)]
        liveness.answered(B)
        assert liveness.due(0) == 2.0
        assert liveness.tick(2, {B}) == [Ask(B)]
        assert run(liveness, 1000, {B}, {B})[1] == []

    def test_one_that_never_answers_is_declared_lost_in_time(self) -> None:
        now, effects = run(Liveness(BOUND), 100, {B, C}, {C})
        assert now == 6.0
        assert effects == [Silent(B, 6.0)]

    @given(st.floats(0, 100))
    def test_it_is_declared_lost_within_the_bound_after_it_froze(self, froze: float) -> None:
        liveness, now = Liveness(BOUND), 0.0
        while now < 200:
            now = liveness.due(now)
            if any(isinstance(effect, Silent) for effect in liveness.tick(now, {B})):
                break
            if now < froze:
                liveness.answered(B)
        assert froze < now <= froze + 0.8 * BOUND + 1e-6

    def test_it_is_declared_lost_once(self) -> None:
        liveness = Liveness(BOUND)
        run(liveness, 100, {B}, set())
        assert liveness.tick(50, set()) == []

    def test_a_late_answer_counts(self) -> None:
        liveness = Liveness(BOUND)
        for now in (0, 2, 4):
            assert liveness.tick(now, {B}) == [Ask(B)]
        liveness.answered(B)
        for now in (6, 8, 10):
            assert liveness.tick(now, {B}) == [Ask(B)]

    def test_after_a_tick_that_came_late_the_next_is_no_later_than_patience_lasts(self) -> None:
        liveness = Liveness(BOUND)
        liveness.tick(0, {B})
        liveness.tick(3.5, {B, C})
        liveness.tick(5.8, {B, C})
        assert liveness.due(5.8) == 6.0

    def test_while_an_answer_is_late_the_question_is_repeated_more_often(self) -> None:
        """Questions are datagrams, some of which are lost; hardly all of nine are."""
        liveness = Liveness(BOUND)
        liveness.tick(0, {B, C})
        liveness.answered(C)
        asked, now = 0, 0.0
        while Ask(B) in liveness.tick(now := liveness.due(now), {B, C}):
            liveness.answered(C)
            asked += 1
        assert (asked, now) == (8, 6.0)
        assert liveness.due(6.0) == 8.0

    def test_the_time_in_which_this_worker_slept_does_not_count(self) -> None:
        liveness = Liveness(BOUND)
        liveness.tick(0, {B})
        assert liveness.tick(1000, {B}) == [Ask(B)]
        assert liveness.tick(1002, {B}) == [Ask(B)]
        effects = liveness.tick(1004, {B})
        assert [type(effect) for effect in effects] == [Silent]


class TestWatching:
    def test_one_that_could_not_be_asked_is_not_silent(self) -> None:
        liveness = Liveness(5.0)
        assert liveness.tick(0.0, {B}) == [Ask(B)]
        for now in range(1, 10):
            liveness.not_asked(B)
            assert liveness.tick(float(now), {B}) == [Ask(B)]

    def test_one_that_nobody_depends_on_is_not_asked_and_forgotten_in_time(self) -> None:
        liveness = Liveness(BOUND)
        liveness.tick(0, {B})
        assert liveness.tick(2, set()) == []
        assert liveness.tick(8, {C}) == [Ask(C)]
        assert liveness.tick(10, {C}) == [Forget(B), Ask(C)]

    def test_silence_counts_only_while_it_is_watched(self) -> None:
        liveness = Liveness(BOUND)
        liveness.tick(0, {B})
        liveness.tick(2, set())
        for now in (4, 6, 8):
            assert liveness.tick(now, {B}) == [Ask(B)]


class TestRing:
    def test_everybody_has_the_next_one_for_a_neighbour(self) -> None:
        assert [neighbour(me, [0, 3, 7]) for me in (0, 3, 7)] == [3, 7, 0]

    def test_who_is_alone_has_none(self) -> None:
        assert neighbour(3, [3]) is None
        assert fingers(3, [3]) == []

    def test_fingers_are_powers_of_two_away(self) -> None:
        assert fingers(0, range(10)) == [1, 2, 4, 8]
        assert fingers(9, range(10)) == [0, 1, 3, 7]

    @pytest.mark.parametrize("count", [2, 3, 8, 9, 100, 1000])
    def test_news_reach_everybody_in_a_few_hops_at_a_few_messages_each(self, count: int) -> None:
        told, news, hops = {0}, [0], 0
        while news:
            heard = {other for me in news for other in fingers(me, range(count))} - told
            told |= heard
            news, hops = sorted(heard), hops + 1
        assert told == set(range(count))
        assert hops - 1 <= count.bit_length()
        assert len(fingers(0, range(count))) <= count.bit_length()


class TestReach:
    OTHERS = tuple(Life(worker, 0) for worker in range(1, 6))

    def reaching(self, *answered: int) -> Reach:
        reach = Reach()
        assert reach.to_ask(True, self.OTHERS) == [*self.OTHERS]
        for worker in answered:
            reach.answered(Life(worker, 0))
        reach.to_ask(True, self.OTHERS)
        return reach

    @pytest.mark.parametrize(
        ("answered", "part"),
        [((), Part.FEW), ((1,), Part.FEW), ((1, 2), Part.HALF), ((1, 2, 3), Part.MOST)],
    )
    def test_the_part_is_of_all_that_were_asked_with_the_worker_itself(
        self, answered: tuple[int, ...], part: Part
    ) -> None:
        assert self.reaching(*answered).part() is part

    def test_who_has_not_answered_is_asked_again(self) -> None:
        assert self.reaching(1, 4).to_ask(True, self.OTHERS) == [Life(n, 0) for n in (2, 3, 5)]

    def test_who_is_gone_is_not_asked_but_counts_until_no_answer_is_late(self) -> None:
        reach = self.reaching(1, 2)
        assert reach.to_ask(True, self.OTHERS[:3]) == [Life(3, 0)]
        assert (reach.part(), reach.asks) == (Part.HALF, True)
        reach.to_ask(False, self.OTHERS[:3])
        assert not reach.asks

    def test_what_came_since_it_last_asked_does_not_count_yet(self) -> None:
        reach = self.reaching(1)
        for worker in (2, 3, 4):
            reach.answered(Life(worker, 0))
        assert reach.part() is Part.FEW
        reach.to_ask(True, self.OTHERS)
        assert reach.part() is Part.MOST

    def test_nobody_is_asked_while_no_answer_is_late_and_what_was_is_forgotten(self) -> None:
        reach = self.reaching(1)
        assert reach.to_ask(False, self.OTHERS) == []
        reach.answered(Life(2, 0))
        assert reach.to_ask(True, self.OTHERS) == [*self.OTHERS]

    def test_one_that_has_asked_nobody_reaches_everybody_it_knows_of(self) -> None:
        assert Reach().part() is Part.MOST

    def test_of_a_large_group_some_from_all_over_it_are_asked(self) -> None:
        others = [Life(worker, 0) for worker in range(1000)]
        asked = Reach(most=32).to_ask(True, others)
        assert 25 <= len(asked) <= 32
        assert asked[0].worker < 40
        assert asked[-1].worker > 960


class TestSuspicion:
    def test_the_others_are_told_of_a_silent_worker_after_a_moment(self) -> None:
        assert Suspicion(5, BOUND).delay(1, Evidence.SILENT, 0) == 1

    def test_of_two_whose_connection_broke_the_lower_speaks_first(self) -> None:
        assert Suspicion(1, BOUND).delay(2, Evidence.CLOSED, 0) == 1
        assert Suspicion(2, BOUND).delay(1, Evidence.CLOSED, 0) == 10

    def test_who_is_refused_speaks_after_who_refuses_whatever_that_ones_evidence_was(self) -> None:
        mine = Suspicion(0, BOUND).delay(1, Evidence.REFUSED, 0)
        assert mine > Suspicion(1, BOUND).delay(0, Evidence.SILENT, 0)
        assert mine > Suspicion(1, BOUND).delay(0, Evidence.CLOSED, 0)

    def test_what_another_said_is_passed_on_at_once(self) -> None:
        suspicion = Suspicion(1, BOUND)
        assert [suspicion.delay(2, Evidence.TOLD, 0) for _ in range(9)] == [0] * 9
        assert not suspicion.is_cut_off(0, 0)

    def test_who_lost_more_than_it_still_reaches_is_cut_off(self) -> None:
        suspicion = Suspicion(1, BOUND)
        for _ in range(3):
            suspicion.delay(9, Evidence.CLOSED, 0)
        assert [suspicion.is_cut_off(others, 1) for others in (0, 1, 2, 3)] == [
            *(True, True),
            *(False, False),
        ]

    def test_losses_of_long_ago_do_not_count(self) -> None:
        suspicion = Suspicion(1, BOUND)
        for now in (0, 21, 42):
            suspicion.delay(9, Evidence.CLOSED, now)
            assert not suspicion.is_cut_off(0, now)

    def test_the_survivor_of_two_is_not_cut_off(self) -> None:
        suspicion = Suspicion(1, BOUND)
        suspicion.delay(0, Evidence.SILENT, 0)
        assert not suspicion.is_cut_off(0, 0)
