"""The image, the devcontainer and the Kubernetes examples: what they name exists, and pods train.

No image is built here; docs/machines/container.md says what was built, and how.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from conf.entry import compose
from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from tests.runs.process_group import free_port
from tests.test_docs import check, own_files  # noqa: F401  (a fixture)
from tests.train_utils.test_distributed import clean_environment

REPOSITORY = Path(__file__).resolve().parent.parent
KUBERNETES = REPOSITORY / "scripts" / "kubernetes"
Pod = dict[str, Any]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined: (``RUN``, its text)."""
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(words[0], words[2]) for line in text.splitlines() if (words := line.partition(" "))[0]]


def pod_of(operator: str) -> tuple[int, Pod, list[str]]:
    """Machines, pod and command of an example."""
    documents = list(yaml.safe_load_all((KUBERNETES / f"{operator}.yaml").read_text()))
    job = documents[-1]
    if operator == "trainjob":
        assert job["spec"]["runtimeRef"]["name"] == documents[0]["metadata"]["name"]
        (replicated,) = documents[0]["spec"]["template"]["spec"]["replicatedJobs"]
        trainer = job["spec"]["trainer"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        return trainer["numNodes"], pod, trainer["command"] + trainer["args"]
    master, worker = (job["spec"]["pytorchReplicaSpecs"][kind] for kind in ("Master", "Worker"))
    assert master["template"] == worker["template"], "all ranks need the same options"
    pod = master["template"]["spec"]
    (container,) = pod["containers"]
    return master["replicas"] + worker["replicas"], pod, container["command"] + container["args"]


def environment_of(operator: str, node: int, nodes: int, port: int) -> dict[str, str]:
    """What the operator sets in pod ``node`` of a job with one process in each, on this machine.

    Sources: kubeflow/trainer 2.3, pkg/runtime/framework/plugins/torch/torch.go;
    kubeflow/training-operator 1.9, pkg/controller.v1/pytorch/envvar.go and master.go.
    """
    torchrun = {
        "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
    }  # fmt: skip
    if operator == "trainjob":
        return torchrun
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nodes), "RANK": str(node)}
    return torchrun | master | {"PYTHONUNBUFFERED": "1"}


def test_each_stage_of_the_image_is_made_of_what_is_here() -> None:
    found = instructions()
    stages = [words.split()[-1] for name, words in found if name == "FROM"]
    assert [words.split()[0] for name, words in found if name == "FROM"] == ["${BASE}", *stages[:-1]]
    copied = [[word for word in words.split() if not word.startswith("--")] for name, words in found if name == "COPY"]
    assert copied == [["pyproject.toml", "./"], [".", "./"]], "packages must not be installed anew for each change"
    assert [words for name, words in found if name == "USER"][-1] == "yolo", "it must not run as root"
    command = json.loads(next(words for name, words in found if name == "CMD"))
    assert command[0] == "python" and (REPOSITORY / command[1]).exists()
    devcontainer = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    assert devcontainer["build"]["target"] in stages
    assert (REPOSITORY / ".devcontainer" / devcontainer["build"]["dockerfile"]).resolve() == REPOSITORY / "Dockerfile"
    assert f"useradd --create-home --uid 1000 --shell /bin/bash {devcontainer['remoteUser']}" in str(found)


def test_what_git_ignores_stays_out_of_the_image() -> None:
    left_out = {line.strip("/").removeprefix("**/") for line in (REPOSITORY / ".dockerignore").read_text().splitlines()}
    for line in (REPOSITORY / ".gitignore").read_text().splitlines():
        name = line.strip("/")
        covered = {name, re.sub(r"^\.\w+_cache$", ".*_cache", name)}
        assert line.startswith("#") or covered & left_out, f".dockerignore lacks {name}"


def test_the_commands_of_the_page_are_taken(own_files: Path) -> None:  # noqa: F811
    page = (REPOSITORY / "docs" / "machines" / "container.md").read_text()
    commands = re.findall(r"^    docker run .*? yolo (.+)$", page.replace("\\\n", ""), re.M)
    assert len(commands) >= 4
    for command in commands:
        check(command, own_files)
    files = re.findall(r"kubectl apply -f (\S+)", page)
    assert files and all((REPOSITORY / path).exists() for path in files)
    given = {words.partition("=")[0] for name, words in instructions() if name == "ARG"}
    assert given == set(re.findall(r"`([A-Z_]+)`", page)) - {"PET_NNODES"}, "the page lists the build arguments"


@pytest.mark.parametrize("operator", ["trainjob", "pytorchjob"])
def test_pods_of_the_examples_suit_the_image_and_the_options(operator: str) -> None:
    nodes, pod, (launcher, program, *options) = pod_of(operator)
    assert (launcher, program, options.pop(), nodes) == ("torchrun", "train.py", "resume=auto", 2)
    config = compose("train", TrainConfig, options)
    (container,) = pod["containers"]
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    home = Path(next(words for name, words in instructions() if name == "WORKDIR"))
    for path in (config.run_dir, config.data.root, config.data.index_dir):
        assert path is not None and mounts.keys() & set((home / path).parents), f"{path} would be lost with the pod"
    memory = next(volume for volume in pod["volumes"] if volume["name"] == mounts[Path("/dev/shm")])
    assert memory["emptyDir"]["medium"] == "Memory"
    assert pod["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("operator", ["trainjob", "pytorchjob"])
def test_torchrun_reads_the_variables_of_each_operator(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, _, (_, *command) = pod_of(operator)
    for name, value in environment_of(operator, 1, nodes, 29500).items():
        monkeypatch.setenv(name, value)
    launch, _, started = config_from_args(get_args_parser().parse_args(["--no-python", *command]))
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (2, 2, 1)
    assert (launch.rdzv_backend, launch.rdzv_endpoint, launch.rdzv_configs["rank"]) == ("static", "127.0.0.1:29500", 1)
    assert started == command[1:]


@pytest.mark.slow
def test_two_pods_train_together(tmp_path: Path) -> None:
    """Each is a torchrun of its own that knows nothing but the variables of a PyTorchJob: those of
    a TrainJob and single processes' ones, which torchrun must replace.
    """
    nodes, _, (_, program, _, *options) = pod_of("pytorchjob")
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=8, val_images=2, image_size=64, seed=0))
    tiny = [
        "data=shapes", "data.root=shapes", "data.index_dir=index", "data.workers=0",
        "data.shapes={train_images: 8, val_images: 2, image_size: 64, seed: 0}", "model=yolov3-tiny",
        "model.width=0.125", "train.image_size=64", "train.batch_size=4", "train.epochs=2", "train.device=cpu",
        "evaluate.every=0", "logger.pictures=false",
    ]  # fmt: skip
    port = free_port()
    pods = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", str(REPOSITORY / program), *options, *tiny], cwd=tmp_path,
            env=clean_environment(**environment_of("pytorchjob", node, nodes, port)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(nodes)
    ]  # fmt: skip
    try:
        outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "yolo-coco" and (run / "checkpoints" / "last.pt").exists()
    assert "2 process(es) on cpu" in (run / "train.log").read_text()
