"""Rules of ``--exit-codes`` for the ends of workers."""

from __future__ import annotations

import pytest

from tensorwire.launch.exits import ExitCodesError, ExitRules, parse_exit_codes


def test_codes_and_signals_have_verdicts_and_others_none() -> None:
    rules = parse_exit_codes("retry:137,139;fail:2")
    assert [rules.verdict(code) for code in (-9, 137, -11, 2, 1)] == [True, True, True, False, None]
    assert parse_exit_codes("") == ExitRules()
    assert parse_exit_codes("fail:*;retry:137").verdict(1) is False
    assert parse_exit_codes("retry:*;fail:2").verdict(1) is True


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("137", "give retry:CODES or fail:CODES"),
        ("again:1", "give retry:CODES"),
        ("retry:1;retry:2", "give retry:CODES"),
        ("retry:0", "'0' is none of 1 to 255"),
        ("fail:256", "'256' is none of"),
        ("fail:", "'' is none of"),
        ("fail:x", "'x' is none of"),
        ("fail:-9", "'-9' is none of"),
        ("retry:1;fail:1", "1 is there twice"),
    ],
)
def test_mistakes_are_named(text: str, wanted: str) -> None:
    with pytest.raises(ExitCodesError) as caught:
        parse_exit_codes(text)
    assert str(caught.value).startswith(f"--exit-codes={text}: ")
    assert wanted in str(caught.value)
