"""A worker knows for how long its group's store has been silent to it."""

from __future__ import annotations

from rpc.group.store_silence import StoreSilence


def silent(*spans: tuple[float, float]) -> StoreSilence:
    """A store that was asked, and answered, at such times."""
    silence = StoreSilence()
    for asked, answered in spans:
        silence.asked(asked)
        silence.answered(answered)
    return silence


def test_a_wait_that_lasts_counts_once_it_is_long_enough() -> None:
    silence = silent()
    silence.asked(100.0)
    assert not silence.lasted(1.5, 5.0, 101.0)
    assert silence.lasted(1.5, 5.0, 101.5)


def test_a_wait_that_is_over_counts_for_as_long_as_is_said() -> None:
    silence = silent((100.0, 102.0))
    assert silence.lasted(1.5, 5.0, 107.0)
    assert not silence.lasted(1.5, 5.0, 107.1)
    assert not silence.lasted(2.5, 5.0, 103.0)


def test_shorter_waits_after_a_long_one_do_not_hide_it() -> None:
    silence = silent((100.0, 102.0), *((102.0 + n / 4, 102.25 + n / 4) for n in range(8)))
    assert silence.lasted(1.5, 5.0, 104.0)


def test_usual_waits_are_not_kept() -> None:
    silence = silent((100.0, 102.0), *((102.0 + n / 100, 102.005 + n / 100) for n in range(200)))
    assert silence.lasted(1.5, 5.0, 104.0)
    assert not silent().lasted(0.0, 5.0, 100.0)
