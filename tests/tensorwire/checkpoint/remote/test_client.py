"""A reader's connection: what breaks is begun again, and closing it ends every wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorwire import checkpoint
from tensorwire.checkpoint import ChainServer, NoPublisherError
from tensorwire.checkpoint.remote import messages, mirror
from tensorwire.checkpoint.remote.client import PublishedChain

_KEY = checkpoint.reader_key(b"the key of the group")


def test_a_reader_goes_on_where_a_connection_broke(tmp_path: Path) -> None:
    """The file that came in part is not asked for from its beginning again."""
    checkpoint.publish({"x": torch.zeros(1 << 19)}, tmp_path / "chain").close()
    with ChainServer(tmp_path / "chain", _KEY) as served:
        asked: list[int] = []
        chain = PublishedChain(f"tensorwire://127.0.0.1:{served.port}", _KEY)
        whole = chain.read

        def read(version: Any, name: str, offset: int) -> Iterator[bytes]:
            if name.endswith(".safetensors"):
                asked.append(offset)
            for piece in whole(version, name, offset):
                yield piece
                if len(asked) < 3:
                    chain._socket.close()  # type: ignore[union-attr]

        chain.read = read  # type: ignore[method-assign]
        source = mirror.Mirror(chain, tmp_path / "cache")
        for _ in range(2):
            with pytest.raises(NoPublisherError, match="broke"):
                list(source.route(None))
        assert [each.number for each in source.route(None)] == [0]
        assert asked == sorted(set(asked))
        assert len(asked) == 3
        source.close()


def test_closing_ends_a_wait_for_bytes_that_do_not_come(tmp_path: Path) -> None:
    """A publisher that is stopped in the middle of a file holds no reader up."""
    chain = PublishedChain("tensorwire://localhost:1", _KEY)
    ours, theirs = socket.socketpair()
    chain._socket = ours
    said: list[Exception] = []

    def ask() -> None:
        try:
            chain.way(None)
        except NoPublisherError as error:
            said.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert theirs.recv(messages.REQUEST_HEAD.size, socket.MSG_WAITALL)
    chain.interrupt()
    thread.join()
    assert len(said) == 1
    chain.close()
    theirs.close()
