"""The features that not every release of torch that we support has."""

from __future__ import annotations

import pytest
import torch


def _records_all_threads() -> bool:
    try:
        torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return False
    return True


needs_profiles_of_all_threads = pytest.mark.skipif(
    not _records_all_threads(), reason="this torch cannot record the operators of all threads"
)
