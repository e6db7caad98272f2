"""Decides which ends of a worker's process are worth a restart. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CODE = re.compile(r"\d{1,3}")
_WORDS = ("retry", "fail")
_OTHERS = "*"
_FORM = "give retry:CODES or fail:CODES, or both with ';' between, such as retry:137,139;fail:2"


class ExitCodesError(ValueError):
    """A rule of ``--exit-codes`` is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class ExitRules:
    """Says of exit codes whether they are worth a restart.

    Args:
        retry: codes that always are, as long as there are restarts left.
        fail: codes that never are.
        others: what holds for all others; None for what else speaks for and against it.
    """

    retry: frozenset[int] = frozenset()
    fail: frozenset[int] = frozenset()
    others: bool | None = None

    def verdict(self, exit_code: int) -> bool | None:
        """True if it is worth a restart, False if not, None if nothing was said of it.

        Args:
            exit_code: negative for a signal.
        """
        code = 128 - exit_code if exit_code < 0 else exit_code
        if code in self.fail:
            return False
        return True if code in self.retry else self.others


def parse_exit_codes(text: str) -> ExitRules:
    """Reads ``retry:137,139;fail:2``; 128 + N is an end by signal N, and ``*`` all other codes.

    Raises:
        ExitCodesError: it is of another form, or says two things of one code.
    """
    said: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        word, colon, codes = part.strip().partition(":")
        if word not in _WORDS or not colon or word in said:
            raise ExitCodesError(f"--exit-codes={text}: {_FORM}")
        for code in codes.split(","):
            is_known = code == _OTHERS or (_CODE.fullmatch(code) and 0 < int(code) < 256)
            if not is_known:
                raise ExitCodesError(f"--exit-codes={text}: {code!r} is none of 1 to 255 or *")
            if code in said:
                raise ExitCodesError(f"--exit-codes={text}: {code} is there twice")
            said[code] = word
        said[word] = word
    numbers = {code: word for code, word in said.items() if code.isdecimal()}
    retry, fail = ({int(c) for c, word in numbers.items() if word == each} for each in _WORDS)
    others = None if _OTHERS not in said else said[_OTHERS] == "retry"
    return ExitRules(frozenset(retry), frozenset(fail), others)
