"""Letters come in any order, and a step that is called off wakes up whoever waits in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorwire.pipeline import StepAbortedError
from tensorwire.pipeline.inbox import Inbox
from tensorwire.pipeline.letters import Address, Content

_FIRST = Address(0, Content.ACTIVATION, 0, 1, 0)
_SECOND = Address(1, Content.ACTIVATION, 0, 1, 0)


def test_letters_of_a_step_to_come_are_kept_and_those_of_one_that_is_over_dropped() -> None:
    inbox = Inbox()
    inbox.put(_SECOND, "second")
    inbox.put(_FIRST, "first")
    inbox.begin(0)
    assert inbox.take(_FIRST) == "first"
    inbox.abort(0, "no more")
    inbox.put(_FIRST, "late")
    with pytest.raises(StepAbortedError, match="step 0 was called off: no more"):
        inbox.take(_FIRST)
    inbox.fail(0, "no more")
    inbox.begin(1)
    assert inbox.take(_SECOND) == "second"


def test_a_step_that_was_called_off_is_over_only_when_its_worker_has_cleared_it_up() -> None:
    inbox = Inbox()
    inbox.begin(0)
    inbox.abort(0, "no more")
    assert not inbox.wait_until_idle(0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.wait_until_idle, 30.0)
        inbox.fail(0, "cleared up")
        assert waiting.result(30.0)
