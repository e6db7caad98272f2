"""The fixtures that several tests of pipelines need."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tqdm, which torch's tracer uses as well, from starting a thread that stays."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
