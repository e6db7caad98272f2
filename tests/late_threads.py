"""A pytest plugin that has every thread begin its work late, by up to 50 ms.

So a test that counts on a thread's being quick fails here and now, and not one day on a busy
machine: ``make test ARGS="-p tests.late_threads -m 'not slow'"``.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

_MOST_SECONDS = 0.05

_run = threading.Thread.run


def _run_late(thread: threading.Thread) -> None:
    time.sleep(random.random() * _MOST_SECONDS)
    _run(thread)


def pytest_configure(config: pytest.Config) -> None:
    """Hold up every thread of this process that starts from now on."""
    threading.Thread.run = _run_late  # type: ignore[assignment, method-assign]
