"""The rules that must hold in every run of the simulator, and the error that ends one.

``ledger`` checks them, for shutdowns ``shutdowns``, for signs of life ``silence``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class Rule(enum.Enum):
    """The rules; the value says each in words."""

    NOT_FREED_IN_USE = "no value is freed while a live fork exists"
    FREED_ONCE = "a value is freed once"
    ALWAYS_FREED = "every value is freed in the end, and nothing kept for it"
    HANDLES_WORK = "a handle that did not fail reaches its value"
    FAILURES_HAVE_CAUSES = "a handle fails only for a cause, and says which"
    COUNTS = "what a worker says that it keeps is what it keeps"
    TOLD_ONCE = "what one message settles is told once, and never to the dead"
    CALLS_END_ONCE = "every call ends exactly once, with a result or one typed error"
    CALLS_END = "every call ends"
    DEADLINES = "a call ends at its deadline, neither before nor after"
    RUNS_ONCE = "a request that is tried again runs once, and all attempts get its result"
    CANCELLED = "a request is cancelled if its caller, and this life of it, said so"
    RIGHT_LIFE = "no call and no reply reaches the wrong incarnation"
    DUPLICATES = "what comes twice is taken once, and what comes once is taken"
    MEMBERS = "a worker knows who is there, and under which incarnation"
    CONVERGENCE = "the membership views of the living converge"
    SHUTDOWN_WAITS = "a shutdown cuts nothing short"
    SHUTDOWN_ENDS = "a shutdown comes to its end"
    FOUND_IN_TIME = "a worker that falls silent is declared lost within the bound"
    NOT_REPORTED = "a worker whose signs of life arrive is not declared lost"
    FENCED = "a worker that was declared lost learns it, and nobody else is"
    ASKED = "who is depended on is asked for signs of life, and nobody else"
    NO_EXCEPTION = "decisions do not raise"
    QUIESCENCE = "a group without work comes to rest"


class RuleBrokenError(AssertionError):
    """A run broke a rule.

    Args:
        rule: which.
        detail: where and how.
    """

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule.value}: {detail}")
        self.rule = rule
        self.detail = detail


def require(holds: bool, rule: Rule, *detail: object) -> None:
    """Ends the run with an error unless ``holds``.

    Args:
        holds: whether the rule is kept.
        rule: which.
        detail: where and how it is not; joined with spaces.
    """
    if not holds:
        raise RuleBrokenError(rule, " ".join(map(str, detail)))


def broken_by(play: Callable[[], None]) -> RuleBrokenError | None:
    """Plays a run; returns the rule that it broke, if it did: that nothing raises is one."""
    try:
        play()
    except RuleBrokenError as error:
        return error
    except Exception as error:
        broken = RuleBrokenError(Rule.NO_EXCEPTION, f"{type(error).__name__}: {error}")
        broken.__cause__ = error
        return broken
    return None
