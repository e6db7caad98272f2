"""A part of PyTorch's own RPC tests passes, and the way they are run would notice if not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("conformance"), pytest.mark.timeout(900)]


def _run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_HERE), "--output", str(output), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("subject", ["tensorpipe", "tensorwire"])
def test_a_part_of_torchs_tests_passes(subject: str, tmp_path: Path):
    done = _run(tmp_path, subject, "--part", "--shards", "1")  # another test has the other core
    noteworthy = "\n".join(line for line in done.stdout.splitlines() if "] passed " not in line)
    assert done.returncode == 0, noteworthy
    passed = re.search(r"^(\d+) passed, 0 failed", done.stdout, re.MULTILINE)
    assert passed is not None, noteworthy
    assert int(passed[1]) > 12


def test_calls_that_reach_genuine_torch_are_noticed(tmp_path: Path):
    options = ("-k", r"RpcTest\.test_scalar_add$", "--sabotage", "genuine-calls")
    done = _run(tmp_path, "tensorwire", *options)
    assert done.returncode == 1
    assert "0 passed, 1 failed" in done.stdout
    assert "GENUINE TORCH RPC WAS USED: rpc_sync" in done.stdout


def test_spawned_workers_get_our_names_too_and_wrong_results_are_noticed(tmp_path: Path):
    options = ("-k", r"RemoteModuleTest\.test_forward_sync$", "--start", "spawn")  # only two
    done = _run(tmp_path, "tensorwire", *options, "--sabotage", "wrong-results")
    assert done.returncode == 1
    assert "None is not ('3', " in done.stdout  # what a sabotaged call of ours returns


def test_a_run_that_would_test_nothing_is_refused(tmp_path: Path):
    done = _run(tmp_path, "--failed")
    assert done.returncode == 2
    assert "nothing to do: name what to test" in done.stdout


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules that need no torch."""
    monkeypatch.syspath_prepend(str(_HERE))
    from torch_suite import cli, exemptions, native_stacks, report, results, setup

    class Modules:
        pass

    Modules.cli, Modules.exemptions, Modules.report = cli, exemptions, report
    Modules.results, Modules.setup = results, setup
    Modules.native_stacks = native_stacks
    yield Modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_suite"]:
        del sys.modules[name]


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_the_stacks_of_a_process_that_keeps_pythons_lock_are_shown(
    suite: Any, capfd: pytest.CaptureFixture[str]
):
    hang = "import ctypes; print(flush=True); ctypes.PyDLL(None).pause()"
    with subprocess.Popen([sys.executable, "-c", hang], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def is_shown() -> bool:
            suite.native_stacks.show([process.pid], 30.0)
            shown = capfd.readouterr().out
            if "ptrace: " in shown:
                pytest.skip(f"gdb may not look here: {shown}")
            return re.search(r"^#\d+ .*\bpause\b", shown, re.MULTILINE) is not None

        try:
            until(is_shown)
        finally:
            process.kill()


def test_every_exemption_is_used_and_nothing_failed_when_the_report_was_made(suite: Any):
    text = (_HERE / "EXPECTED.md").read_text()
    tests = re.findall(r"^- `([\w.]+)`", text, re.MULTILINE)
    for each in suite.exemptions.EXEMPTIONS:
        backends = each.backends or ("TENSORPIPE", "TENSORWIRE")
        assert any(each.covers(test, backend) for test in tests for backend in backends), each
    assert text.endswith("## Failed without a reason\n\nNone.\n")


def test_every_test_reported_as_exempt_has_its_reason(suite: Any):
    text = (_HERE / "EXPECTED.md").read_text()
    exempt = text.partition("## Exempt")[2].partition("## Skipped")[0]
    tests = re.findall(r"^- `([\w.]+)`", exempt, re.MULTILINE)
    assert tests
    for test in tests:
        found = [suite.exemptions.exemption(test, name) for name in ("TENSORPIPE", "TENSORWIRE")]
        assert any(found), test
        assert all(each.shown_by in exempt for each in found if each is not None), test


def test_our_tests_that_exemptions_name_exist(suite: Any):
    for each in suite.exemptions.EXEMPTIONS:
        _assert_is_a_test(each.shown_by)


def test_our_tests_that_the_migration_page_names_exist():
    text = (_ROOT / "docs" / "migrating.md").read_text()
    for name in re.findall(r"`(tests/\S+?::\S+?)`", text):
        _assert_is_a_test(name)
    lines = [line for line in text.splitlines() if line.startswith(("- ", "| `"))]
    assert lines
    assert [line for line in lines if "`tests/" not in line] == []


def _assert_is_a_test(name: str) -> None:
    """By the name that pytest knows it by: of a test in a class, with that."""
    path, *inside, function = name.split("::")
    body: Any = ast.parse((_ROOT / path).read_text()).body
    for each in inside:
        body = next(node.body for node in body if getattr(node, "name", "") == each)
    assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in body), name


def test_a_failure_with_a_reason_is_exempt_and_any_other_is_not(suite: Any):
    Result, Outcome, Subject = suite.results.Result, suite.results.Outcome, suite.setup.Subject
    with_reason = Result("RpcTest.test_non_cont_tensors", Outcome.FAILED, 1.0, "contiguous")
    judged = suite.cli.judged
    assert judged(with_reason, Subject.TENSORWIRE).outcome is Outcome.EXEMPT
    assert judged(with_reason, Subject.TORCH).outcome is Outcome.FAILED
    without = Result("RpcTest.test_add", Outcome.FAILED, 1.0, "3 != 4")
    assert judged(without, Subject.TENSORWIRE) == without


def test_a_table_counts_each_class(suite: Any):
    Result, Outcome, Subject = suite.results.Result, suite.results.Outcome, suite.setup.Subject
    ours = [Result("A.x", Outcome.PASSED, 1), Result("A.y", Outcome.EXEMPT, 1, "because")]
    torch = [Result("A.x", Outcome.PASSED, 1), Result("A.y", Outcome.FAILED, 1, "why")]
    lines = suite.report.table({Subject.TORCH: torch, Subject.TENSORPIPE: ours}).splitlines()
    assert lines[2] == "| A | 1 | 1 | 1 | 1 | 0 | 0 |"
    assert lines[3] == "| **all** | **1** | **1** | **1** | **1** | **0** | **0** |"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback:\n  x\nValueError: no\n\nTo execute this test\n", "ValueError: no"),
        ("torch.X.MyError: 1\nother\n", "torch.X.MyError: 1"),
        ("RuntimeError:\nonly this\n", "only this"),
        ("", "unknown"),
    ],
)
def test_the_reason_is_the_line_that_names_the_error(suite: Any, text: str, reason: str):
    assert suite.results.last_line(text) == reason
