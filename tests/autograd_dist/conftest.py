"""Fixtures that several test files here share."""

from __future__ import annotations

import pytest

from rpc.testing import as_worker, local_group


@pytest.fixture
def workers(make_transport):
    names = ("alice", "bob", "carol")
    with local_group(*names, transport=make_transport) as group, as_worker(group[0]):
        yield group
