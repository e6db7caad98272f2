"""A pytest plugin that has threads rest at random lines of our packages, for up to 10 ms.

So what two threads do at the same time happens in orders that a quick machine hardly ever shows.
The cores have room for several processes meanwhile, and what breaks connections every 20 ms would
never get to the end: ``make test ARGS="-p tests.resting_threads -n 5 -k 'not among_breaks'"``.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_SHARE_OF_LINES = 0.003
_MOST_SECONDS = 0.01
_ROOT = Path(__file__).parents[1]
_FOLDERS = tuple(
    f"{_ROOT / package}/" for package in ("rpc", "autograd_dist", "optim_dist", "remote_module")
)
_ONE_THREAD = f"{_ROOT / 'rpc' / '_simulation'}/"


@functools.cache
def _is_ours(file: str) -> bool:
    return file.startswith(_FOLDERS) and not file.startswith(_ONE_THREAD)


def _watch(frame: FrameType, event: str, argument: Any) -> Any:
    """Chooses, as ``sys.settrace`` has it, what sees the lines of a function."""
    return _rest if _is_ours(frame.f_code.co_filename) else None


def _rest(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line" and random.random() < _SHARE_OF_LINES:
        time.sleep(random.random() * _MOST_SECONDS)
    return _rest


def pytest_configure(config: pytest.Config) -> None:
    """Hold up all threads of this process from now on."""
    threading.settrace(_watch)
    sys.settrace(_watch)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop doing so: what runs as the interpreter ends finds no modules any more."""
    threading.settrace(None)
    sys.settrace(None)
