"""Mistakes on the command line of a tutorial cost no time: one sentence, before anything starts."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tutorials.jobs import ROOT
from tutorials.digits import arguments

_TRAIN = ROOT / "tutorials" / "digits" / "train.py"
_SET_BY_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "1"}
_ALL_BUT_RANK = "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _SET_BY_TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def _last_line(printed: str) -> str:
    """The last line of what ``train.py`` printed, which must be a usage and a complaint."""
    assert printed.startswith("usage: "), printed
    return printed.rstrip().rpartition("\n")[2].removeprefix("train.py: error: ")


@pytest.fixture
def complaint_about(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs ``train.py`` in this process with arguments that it must refuse."""
    known = {*sys.modules}
    monkeypatch.syspath_prepend(str(_TRAIN.parent))

    def run(*given: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(_TRAIN), *given])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(_TRAIN), run_name="__main__")
        return _last_line(capfd.readouterr().err)

    yield run
    for name in {*sys.modules} - known:  # its neighbours go by short names
        del sys.modules[name]


@pytest.mark.slow
def test_the_main_job_refuses_with_status_2_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, str(_TRAIN), "--epochs", "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert _last_line(done.stderr).startswith("argument --epochs: must be a whole number")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("--epochs x", "argument --epochs: must be a whole number of at least 1, not 'x'"),
        ("--epochs 0", "argument --epochs: must be a whole number of at least 1, not '0'"),
        ("--rank -1", "argument --rank: must be a whole number of at least 0, not '-1'"),
        ("--rank 3 --world-size 3", "rank 3 must be from 0 to 2, as there are 3 processes"),
        ("--rank 3", "rank 3 must be from 0 to 2, as there are 3 processes"),
        ("--world-size 4", "argument --world-size: goes with --rank; give --trainers for"),
        ("--rank 0 --world-size 1", "this takes at least 2 processes, a server and a trainer"),
        ("--trainers 257", "argument --trainers: at most 256 can run on one machine"),
        ("--master-port 99999", "argument --master-port: must be at most 65535, not 99999"),
        ("--backend tensorwire", "argument --backend: there is no backend 'tensorwire'; there are"),
        ("--output /proc/x.png", "argument --output: cannot write /proc/x.png: No such file"),
    ],
)
def test_the_main_job_says_in_a_sentence_what_is_wrong_with(
    given: str, complaint: str, complaint_about: Callable[..., str]
) -> None:
    assert complaint_about(*given.split()).startswith(complaint)


def test_the_main_job_names_the_variables_that_torchrun_would_have_set(
    complaint_about: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"RANK is set in the environment, but not {_ALL_BUT_RANK}; torchrun sets RANK, "
    monkeypatch.setenv("RANK", "0")
    assert complaint_about().startswith(told)


def test_torchrun_names_the_rank_and_how_many_there_are() -> None:
    assert arguments.launched({}) is None
    assert arguments.launched(_SET_BY_TORCHRUN) == (0, 3)
    with pytest.raises(argparse.ArgumentTypeError, match=r"variable RANK: must be .* not 'x'"):
        arguments.launched(_SET_BY_TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("x.foo", r"cannot draw .*/x\.foo, whose name must end in one of \.png \.pdf"),
        ("noext", r"cannot draw .*/noext, whose name must end in"),
        (".png", r"cannot draw .*/\.png, whose name must end in"),
        ("", r"is a folder; name a file in it"),
        ("file/x.png", r"cannot write .*/file/x\.png: Not a directory"),
        ("file/folder/x.png", r"cannot write .*: Not a directory"),
        (f"{'x' * 300}.png", r"cannot write .*: File name too long"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused(
    path: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=f"^argument --output: .*{complaint}"):
        arguments.require_picture(tmp_path / path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_where_a_picture_can_be_written_there_is_none_yet(tmp_path: Path) -> None:
    arguments.require_picture(tmp_path / "new" / "picture.PNG")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_picture_that_is_there_stays_until_it_is_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_text("of the last run")
    arguments.require_picture(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_text() == "of the last run"


def test_matplotlib_draws_all_kinds_of_pictures_that_are_let_through() -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    assert {each[1:] for each in arguments.PICTURES} <= {
        *FigureCanvasBase.get_supported_filetypes()
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_passes_a_name_with_a_space_in_one_piece(tmp_path: Path) -> None:
    (tmp_path / ".tensorwire-ready").touch()
    train = ["make", "--dry-run", "train", f"VENV={tmp_path}", "OUTPUT=my curves.png"]
    printed = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shlex.split(printed)[-2:] == ["--output", "my curves.png"]
