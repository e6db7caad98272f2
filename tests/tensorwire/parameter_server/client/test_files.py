"""Files as worker processes of a loader get them."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from tensorwire.parameter_server.client.file_reading import FileToRead, Marking, Reading
from tensorwire.parameter_server.client.files import Files
from tensorwire.parameter_server.declarations.samplers import SamplerSpec


def test_a_spawned_worker_has_one_copy_of_what_is_read() -> None:
    """Its files and what makes its batches come in one pickle, without the cluster."""
    cluster: Any = threading.Lock()  # which cannot be pickled
    files = Files(cluster, SamplerSpec("a", 3, 1), ["a", "b", "c"])
    with pytest.raises(RuntimeError, match=r"iterate over data.track\(loader\)"):
        pickle.dumps(files)
    reading = Reading((FileToRead(1, 0, "b", None),), "a")
    files._offer(reading)
    read, marking = pickle.loads(pickle.dumps((files, Marking(reading, list))))
    for file in read:
        assert file.source == "b"
        file.position = 1
    batch, marks = marking(["a record"])
    assert (batch, list(marks)) == (["a record"], [(1, None)])
