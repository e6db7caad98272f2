"""The job files of the page on clusters are well formed, and their command lines run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tensorwire.launch.flags import parse
from tests.free_ports import free_port
from tests.tensorwire.launch.jobs import FORKED, LIGHT, Job, job

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
ROLES = ("ps:4/job,service", "trainer:8,max_restarts=3")
_RECORDER = """#!/bin/bash
printf '%s\\0' "$@" > "$RECORDED"
"""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the Job."""
    service, jobs = yaml.safe_load_all(block("yaml"))
    return service, jobs


def of_kubernetes() -> list[str]:
    _, jobs = manifest()
    (container,) = jobs["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["rpcrun"]
    return [str(word) for word in container["args"]]


def of_slurm(folder: Path) -> list[str]:
    """The command that the batch file has srun start, on the first of two nodes."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {
        "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n',
        "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n"$@"\n',
        "rpcrun": _RECORDER,
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script, recorded = folder / "train.sbatch", folder / "recorded"
    script.write_text(block("bash"))
    told = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RECORDED": str(recorded),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    subprocess.run(["bash", "-eu", str(script)], env=os.environ | told, check=True, timeout=30)
    return recorded.read_text().split("\0")[:-1]


def test_the_batch_file_starts_an_agent_on_each_node(tmp_path: Path) -> None:
    wishes = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", block("bash"), re.MULTILINE))
    assert wishes["ntasks-per-node"] == "1"
    command = parse(of_slurm(tmp_path))
    said = command.arguments
    assert (said.nnodes, said.rdzv_endpoint, said.rdzv_id) == ("1:2", "n1:29400", "4711")
    assert said.shutdown_timeout < int(wishes["signal"].partition("@")[2])
    assert (said.training_script, said.training_script_args) == ("train.py", ["--lr", "0.1"])


def test_the_pods_find_each_other_and_servers_have_time_to_end() -> None:
    service, jobs = manifest()
    pod, said = jobs["spec"]["template"], parse(of_kubernetes()).arguments
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], jobs["spec"]["completionMode"]) == ("None", "Indexed")
    first = f"{jobs['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert said.rdzv_endpoint == f"{first}:29400"
    assert said.nnodes == f"1:{jobs['spec']['completions']}"
    assert said.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]
    mounts = {
        each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]
    }
    assert said.group_key_file == f"{mounts['key']}/key"
    assert said.log_dir == mounts["logs"]
    (secret,) = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert secret["defaultMode"] == 0o400


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("system", ["slurm", "kubernetes"])
def test_their_command_lines_run_on_two_nodes(system: str, work: Job) -> None:
    words = of_slurm(work.folder) if system == "slurm" else of_kubernetes()
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    (work.folder / "train.py").write_text(
        f"import runpy, sys\nsys.argv = [{LIGHT!r}, {str(work.folder)!r}]\n"
        f"runpy.run_path({LIGHT!r}, run_name='__main__')\n"
    )
    text = json.dumps(words)
    for here, there in [
        (r"(n1|train-0\.train):29400", f"localhost:{free_port()}"),
        (r"[^\"=]*/(\.train-key|train/key)", str(key)),
        (r"=/logs", f"={work.folder}/logs"),
        (r"trainer:8,", "trainer:2,"),  # sixteen processes of 1 s each show no more than four
    ]:
        text = re.sub(here, there, text)
    slurm = [{"SLURM_PROCID": str(n), "SLURM_JOB_NUM_NODES": "2"} for n in range(2)]
    kubernetes = [{"JOB_COMPLETION_INDEX": str(n), "HOSTNAME": f"train-{n}"} for n in range(2)]
    agents = [
        work.start(*FORKED, *json.loads(text), **variables)
        for variables in (slurm if system == "slurm" else kubernetes)
    ]
    names = [f"ps:{n}" for n in range(4)] + [f"trainer:{n}" for n in range(4)]
    seen = [work.life(name).environment for name in names]
    assert {each["GROUP_RANK"] for each in seen[4:]} == {"0", "1"}
    assert {each["RPC_GROUP_KEY_FILE"] for each in seen} == {str(key)}
    if system == "kubernetes":
        ready = manifest()[1]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
        probe = [word.replace("/logs", f"{work.folder}/logs") for word in ready["exec"]["command"]]
        assert subprocess.run(probe, stdout=subprocess.DEVNULL, check=False).returncode == 0
    work.end()
    assert [agent.wait() for agent in agents] == [0, 0]
