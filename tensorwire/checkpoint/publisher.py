"""``python -m tensorwire.checkpoint.publisher FOLDER``: gives a chain's versions to readers.

Also the program of a role of rpcrun, which then takes its options from the environment::

    TENSORWIRE_PUBLISHER="folder/model --host 10.0.0.1 --port 7000 --write-key reader.key" \\
        rpcrun --role publisher:1,service=tensorwire.checkpoint.publisher ...

It joins no group.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rpc import BringUpError, TlsOptions
from rpc.extend import KEY_FILE, read_group_key
from tensorwire.checkpoint.errors import CheckpointError, NoCheckpointError
from tensorwire.checkpoint.remote.keys import read_reader_key, reader_key, write_reader_key
from tensorwire.checkpoint.remote.objects import ChainCopier
from tensorwire.checkpoint.remote.server import ChainServer

VARIABLE: Final = "TENSORWIRE_PUBLISHER"
"""Names the variable with the arguments of a publisher that is given none."""
_PROGRAM: Final = "python -m tensorwire.checkpoint.publisher"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Gives the versions of a model to readers, over the network or by copying "
        f"them into an object store. Without arguments it takes those in {VARIABLE}.",
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="in which versions are published")
    add("--host", default="127.0.0.1", help="address to listen at; default this machine's own")
    add("--port", type=int, default=7000, help="port to listen at; default 7000")
    add(
        "--group-key-file",
        help="derive the reader key from the group's key in this file; default the job's",
    )
    add("--key-file", help="take the reader key in this file instead")
    add("--write-key", metavar="FILE", help="write the reader key into a file for readers")
    add("--max-readers", type=int, default=256, help="connections at a time; default 256")
    add("--copy-to", metavar="URL", help="copy versions there with fsspec, and do not listen")
    add("--every", type=float, default=1.0, help="seconds between two looks to copy; default 1")
    for name in ("certificate", "private-key", "ca"):
        add(f"--{name}", help="PEM file; the three together turn TLS on")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the process's exit status: 0 if all is well, else 1."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given or shlex.split(os.environ.get(VARIABLE, "")))
    if options.folder is None and options.write_key is None:
        parser.error("name a folder, or --write-key FILE")
    try:
        return _run(options)
    except (CheckpointError, BringUpError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.copy_to is not None:
        return _until_told(lambda told: _copy(options, told))
    key = _key(options)
    if options.write_key is not None:
        write_reader_key(options.write_key, key)
    if options.folder is None:
        return 0
    return _until_told(lambda told: _serve(options, key, told))


def _key(options: argparse.Namespace) -> bytes:
    if options.key_file is not None:
        return read_reader_key(options.key_file)
    path = options.group_key_file
    group_key = read_group_key({KEY_FILE: path} if path else os.environ)
    if not group_key:
        raise ValueError("there is no group key here: give --group-key-file or --key-file")
    return reader_key(group_key)


def _tls(options: argparse.Namespace) -> TlsOptions | None:
    given = (options.certificate, options.private_key, options.ca)
    if not any(given):
        return None
    if not all(given):
        raise ValueError("TLS needs all of --certificate, --private-key and --ca")
    return TlsOptions(certificate=given[0], private_key=given[1], ca=given[2])


def _until_told(run: Callable[[threading.Event], None]) -> int:
    """Runs until SIGTERM or SIGINT comes."""
    told = threading.Event()
    before = {
        each: signal.signal(each, lambda *_: told.set()) for each in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        run(told)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


def _serve(options: argparse.Namespace, key: bytes, told: threading.Event) -> None:
    with ChainServer(
        options.folder,
        key,
        host=options.host,
        port=options.port,
        tls=_tls(options),
        max_readers=options.max_readers,
    ) as server:
        print(f"versions of {server.folder} at tensorwire://{options.host}:{server.port}")
        sys.stdout.flush()
        told.wait()


def _copy(options: argparse.Namespace, told: threading.Event) -> None:
    copier = ChainCopier(options.folder, options.copy_to)
    said = ""
    while True:
        try:
            count, problem = copier.copy(), ""
        except NoCheckpointError:
            count, problem = 0, ""
        except (CheckpointError, OSError) as error:
            count, problem = 0, f"{type(error).__name__}: {error}"
        if count:
            print(f"{count} version(s) of {options.folder} copied to {options.copy_to}", flush=True)
        if problem and problem != said:
            print(f"versions were not copied, and will be: {problem}", file=sys.stderr, flush=True)
        said = problem
        if told.wait(options.every):
            return


if __name__ == "__main__":
    sys.exit(main())
