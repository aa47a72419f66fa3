"""The sbatch scripts with stand-ins for srun and scontrol: the step for each GPU request."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "slurm"
SRUN = """#!/bin/bash
[[ $1 != --version ]] || { echo slurm 99.1; exit; }
printf '<%s>' "$@"; echo
env | grep '^SLURM_.*GPU'
echo "threads $OMP_NUM_THREADS"
exit ${CODE:-0}
"""
SCONTROL = """#!/bin/bash
if [[ $2 == hostnames ]]; then printf 'n%s\\n' $(seq "$SLURM_JOB_NUM_NODES"); else echo "JobState=RUNNING"; fi
"""
PYTHON = "#!/bin/bash\necho python 3.99 torch 9\n"
TORCHRUN, SRUN_TASKS = "train.sbatch", "train_srun.sbatch"
# What SLURM sets for each request: two nodes, and GPUs or none on each; test_slurm.py has more.
CASES = {
    "gpus": (TORCHRUN, {"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, 4),
    "none": (TORCHRUN, {}, 1),
    "uneven": (TORCHRUN, {"SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"}, "fix: --gpus-per-node="),
    "tasks: gpus-per-node": (SRUN_TASKS, {"SLURM_GPUS_ON_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
    "tasks: none": (SRUN_TASKS, {"SLURM_TASKS_PER_NODE": "3(x2)"}, 0),
    "tasks: more than GPUs": (
        SRUN_TASKS, {"SLURM_GPUS_ON_NODE": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}, "fix: --ntasks-per-node=2",
    ),
    "tasks: two GPUs each": (
        SRUN_TASKS,
        {"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_TASKS_PER_NODE": "2(x2)"},
        "fix: --gpus-per-task=1",
    ),
}  # fmt: skip


def start(script: str, folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("stand-in", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    slurm = {
        "SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2",
        "PATH": f"{tools}:{os.environ['PATH']}", "REPO": str(SCRIPTS.parent.parent), "PYTHON": f"{tools}/stand-in",
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        cwd=folder, env=outside | slurm | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_ask_for_gpus_starts_a_process_for_each_or_ends_with_a_sentence(case: str, tmp_path: Path) -> None:
    script, environment, expected = CASES[case]
    done = start(script, tmp_path, environment)
    if isinstance(expected, str):
        assert done.returncode == 1 and expected in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert "<" not in done.stdout, "a step was started"
        return
    assert done.returncode == 0, done.stderr
    step = next(line for line in done.stdout.splitlines() if line.startswith("<"))
    gpus = environment.get("SLURM_GPUS_ON_NODE", "0")
    assert (f"<--gpus-per-node={gpus}>" in step) == (gpus != "0"), step
    assert script == SRUN_TASKS or f"<--nproc-per-node={expected}>" in step, step
    inherited = [line for line in done.stdout.splitlines() if line.startswith("SLURM_")]
    assert all(line.startswith("SLURM_GPUS_ON_NODE") for line in inherited), "srun would take these for its options"


@pytest.mark.parametrize(
    ("script", "cpus", "tasks", "expected"),
    [(TORCHRUN, 16, 1, 4), (TORCHRUN, 16, 2, 8), (TORCHRUN, 2, 1, 1), (SRUN_TASKS, 16, 4, 16)],
)
def test_processes_share_the_cores_and_a_failed_one_ends_the_others(script, cpus, tasks, expected, tmp_path) -> None:
    slurm = {"SLURM_GPUS_ON_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS_PER_NODE": str(tasks)}
    slurm |= {"SLURM_CPUS_PER_TASK": str(cpus)}
    ports = []
    for job in ("123", "124"):
        done = start(script, tmp_path, slurm | {"SLURM_JOB_ID": job, "OMP_NUM_THREADS": ""})
        assert f"\nthreads {expected}\n" in done.stdout and "<--kill-on-bad-exit=1>" in done.stdout
        of_step = cpus * tasks if script == TORCHRUN else cpus  # torchrun is the one task of its node
        assert f"<--cpus-per-task={of_step}>" in done.stdout
        ports += re.findall(r"<--rdzv-endpoint=n1:(\d+)>", done.stdout)
    assert len(set(ports)) == (2 if script == TORCHRUN else 0) and all(1024 < int(port) < 32768 for port in ports)


WORDS = ["a=[1, 2]", 'b={x: 1, y: "q r"}', "", "$HOME *", "c='d'"]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("train_srun.sbatch", WORDS, [*WORDS, "resume=auto"]),
        ("train.sbatch", ["resume=x y"], ["resume=x y"]),
        ("eval.sbatch", ["ckpt=a b"], ["ckpt=a b"]),
        ("array.sbatch", ["a=b c"], ["a=b c", "train.seed=1", "resume=auto"]),
        ("array.sbatch", ["a=1", "b='c  d' $HOME", "--", "e f"], ["e f", "b=c  d", "$HOME", "resume=auto"]),
        ("array.sbatch", ["a=1", "--", "e f"], None),
    ],
)
def test_arguments_reach_the_programs_as_they_were_written_and_an_exit_code_is_the_job_s(
    script: str, arguments: list[str], expected: list[str] | None, tmp_path: Path
) -> None:
    done = start(script, tmp_path, {"SLURM_ARRAY_TASK_ID": "1", "CODE": "7"}, *arguments)
    if expected is None:
        assert done.returncode == 1 and "task 1 has no options" in done.stderr
    else:
        program = SCRIPTS.parent.parent / ("eval.py" if script == "eval.sbatch" else "train.py")
        words = "".join(f"<{word}>" for word in [program, *expected])
        assert done.returncode == 7 and f"{words}\n" in done.stdout, done.stdout


def test_a_site_file_comes_before_python_and_a_prefix_in_front_of_it(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text('echo loads $unset_by_modules\nPYTHON=python3.in.image\nprefix=(env "A=b c")\n')
    for script in (TORCHRUN, SRUN_TASKS):
        done = start(script, tmp_path, {"SITE": str(site)})
        assert done.returncode == 0 and done.stdout.startswith("loads\n"), done.stderr
        assert "<env><A=b c><python3.in.image>" in done.stdout
    for environment, message in (
        ({"SITE": "nowhere"}, "SITE=nowhere is not a file. fix: correct its path"),
        ({"PYTHON": "nowhere"}, "no nowhere. fix: 'uv sync'"),
    ):
        done = start(TORCHRUN, tmp_path, environment)
        assert done.returncode == 1 and message in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    files = [str(path) for path in sorted(SCRIPTS.iterdir()) if path.suffix in (".sbatch", ".sh")]
    done = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", "-s", "bash", *files], capture_output=True, text=True, cwd=SCRIPTS
    )
    assert done.returncode == 0, done.stdout
