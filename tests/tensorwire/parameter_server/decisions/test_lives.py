"""Lives of servers: which are over, which are trusted, and which calls wait for one."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.lives import Fate, Latest, Lives, Verdict
from tensorwire.parameter_server.decisions.views import Server

_FORMER, _PRESENT, _LATER = (Server("ps0", life) for life in range(3))


class _Heard:
    """News of one name."""

    def __init__(self, latest: Latest | None) -> None:
        self.latest = latest
        self.lives = Lives(lambda name: self.latest)


def test_a_life_is_over_only_if_its_end_or_a_later_life_was_heard_of() -> None:
    heard = _Heard(None)
    assert heard.lives.verdict(_PRESENT) is Verdict.UNHEARD
    heard.latest = Latest(0, False)
    assert heard.lives.verdict(_PRESENT) is Verdict.UNHEARD
    heard.latest = Latest(1, True)
    assert heard.lives.verdict(_PRESENT) is Verdict.LIVING
    assert heard.lives.verdict(_FORMER) is Verdict.OVER
    heard.latest = Latest(1, False)
    assert heard.lives.verdict(_PRESENT) is Verdict.OVER


def test_a_call_that_met_the_former_life_is_made_again_once_the_right_one_is_heard_of() -> None:
    heard = _Heard(Latest(0, True))
    assert heard.lives.failed(_PRESENT, "call", was_heard_of=False) is Fate.KEPT
    heard.latest = Latest(1, True)
    assert heard.lives.came(_PRESENT).again == ("call",)
    assert heard.lives.came(_PRESENT).again == ()


def test_a_call_is_made_again_at_once_if_its_callee_was_heard_of_meanwhile() -> None:
    heard = _Heard(Latest(1, True))
    assert heard.lives.failed(_PRESENT, "call", was_heard_of=False) is Fate.AGAIN
    assert heard.lives.failed(_PRESENT, "call", was_heard_of=True) is Fate.GIVEN_UP


def test_calls_to_a_life_that_is_over_are_given_up() -> None:
    heard = _Heard(Latest(0, False))
    heard.lives.failed(_PRESENT, "call", was_heard_of=False)
    assert heard.lives.lost(_PRESENT) == ["call"]
    assert heard.lives.failed(_PRESENT, "other", was_heard_of=False) is Fate.GIVEN_UP


def test_a_trusted_life_is_over_when_a_later_one_comes_or_nothing_is_heard_of_it() -> None:
    heard = _Heard(Latest(0, False))
    assert heard.lives.trust(_PRESENT)
    assert not heard.lives.trust(_PRESENT)
    assert heard.lives.doubt(_PRESENT)
    heard.latest = Latest(2, True)
    assert heard.lives.came(_LATER).over == (_PRESENT,)
    assert not heard.lives.doubt(_PRESENT)
