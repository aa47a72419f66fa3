"""The place of this process among the ranks, the ranks that it starts, versions, its job, its end.

The launcher is torch's, SLURM's ``srun`` with one task per process, or none.
"""

import ctypes
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser

from conf import REPOSITORY, ConfigError, DistributedError, first_line
from conf.options import Words
from conf.schema import TrainConfig
from data.config import must_fit
from data.output import STDERR, STDOUT

PR_SET_PDEATHSIG = 1  # of prctl(2)
SHELL_STEPS = 0xFFFFFFF0  # step ids from here are of shells: salloc's interactive step, sbatch's script
PACKAGES = "torch torchvision hydra-core numpy opencv-python-headless pycocotools".split()
OF_A_BUCKET = re.compile(r"(AWS|AZURE_STORAGE)_(?!.*(FILE|PATH|PROFILE)$).*")  # others may have any letters
# Of OpenMPI, MPICH and Intel, MVAPICH, IBM, Flux; the ranks would each train alone.
UNKNOWN_LAUNCHERS = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE"
LAUNCHER_SECONDS = 4.0  # within which the launcher ends this rank, once one of another node has failed
EXIT_SECONDS = 30  # for a rank that has said why it fails: one that hangs as it ends is left to the launcher
STARTED = time.time() - time.process_time()  # of this process: another rank may fail while this one imports
VARIED: list[str] = []  # of a job of a multirun: what names its folder, such as optim.lr-0.01


class Launch(NamedTuple):
    """The place of this process among those that the launcher started."""

    launcher: str  # "torchrun", "srun" or "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on its node
    url: str = "env://"  # where the ranks meet
    attempt: int = 0  # where it finds torchrun's store of the last one, with its keys
    store: tuple[str, int] | None = None  # host and port; None if this process opens it


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launch; torch's variables win, since torchrun may run under srun.

    Raises DistributedError if variables are missing, or if this process belongs to a SLURM job of
    several tasks but srun did not start it: it would silently train alone.
    """
    try:
        if "RANK" in environment:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            is_alone = environment.get("LOCAL_WORLD_SIZE", "1") == "1"  # on its node, as in a pod
            local_rank = int(environment.get("LOCAL_RANK", "0") if is_alone else environment["LOCAL_RANK"])
            # Each node counts its own failures; without torchrun's store each start has a new one.
            is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_shared else 0
            opens = rank == 0 and not is_shared
            store = None if opens else (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
            return Launch("torchrun", rank, size, local_rank, attempt=attempt, store=store)
        if int(environment.get("SLURM_STEP_ID", SHELL_STEPS)) < SHELL_STEPS:
            # Every rank derives the same port; steps of one job, and jobs, may share a node.
            job = int(environment["SLURM_JOB_ID"])
            port = 20000 + (job + 1009 * int(environment["SLURM_STEP_ID"])) % 10000
            # The first host: gpu08 of gpu[08-11,20],cpu1.
            host = re.sub(r"\[(\d+)[^\[\]]*\]", r"\1", environment["SLURM_STEP_NODELIST"]).partition(",")[0]
            host, port = environment.get("MASTER_ADDR", host), int(environment.get("MASTER_PORT", port))
            names = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID".split()
            rank, size, local_rank = (int(environment[name]) for name in names)
            store = (host, port) if rank else None
            return Launch("srun", rank, size, local_rank, f"tcp://{host}:{port}", store=store)
    except (KeyError, ValueError) as error:
        fix = "start with torchrun (--node-rank=$RANK for one process a pod) or srun"
        raise DistributedError(f"the launcher's variables are missing or not numbers ({error})", fix) from error
    if "SLURM_JOB_ID" in environment and environment.get("SLURM_NTASKS", "1") not in ("", "1"):
        raise DistributedError(
            f"this SLURM job has SLURM_NTASKS={environment['SLURM_NTASKS']}, but this process was not started by "
            "srun and would run alone",
            "srun python ... (scripts/slurm), or srun --ntasks=1 python ... for one process",
        )
    for name in UNKNOWN_LAUNCHERS:
        if environment.get(name, "1") not in ("", "1"):
            fix = "torchrun --nproc-per-node=<processes> train.py ..., on each node"
            raise DistributedError(f"{name}={environment[name]} is of a launcher that is not known here", fix)
    return Launch("none")


def check_credentials(environment: MutableMapping[str, str] = os.environ) -> None:
    """Strip line ends from a bucket's variables. Raises ConfigError for what no request can hold.

    obstore would panic, or show the value.
    """
    for name in [name for name in environment if OF_A_BUCKET.fullmatch(name)]:
        value = environment[name] = environment[name].strip()
        is_place = "ENDPOINT" not in name or re.fullmatch(r"(https?://\S+)?", value)
        if not (is_place and value.isascii() and value.isprintable()):
            fix = "set it anew, an end point as http://host or https://host"
            raise ConfigError(f"the variable {name} holds what no request to a bucket can", fix)


def job_folder_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """A run folder name that survives restarts: ``slurm-<job>`` or ``torchrun-<run id>``.

    The latter needs a torchrun that may restart the run and knows its id (``--rdzv-id``).
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"slurm-{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" in environment:
        return f"slurm-{environment['SLURM_JOB_ID']}"
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run in ("", "none") or allowed_restarts(environment) == 0:
        return None
    return f"torchrun-{re.sub(r'[^0-9A-Za-z_.-]', '_', run)}"


def begin_job(job: Any, asked: list[str]) -> None:
    """Note in VARIED those options of Hydra's ``job`` for which ``asked`` has several values.

    Lines of jobs that run side by side begin with the number of the job.
    """
    swept = {word.key_or_group for word in OverridesParser.create().parse_overrides(asked) if word.is_sweep_override()}
    chosen = [word for word in job.overrides.task if word.partition("=")[0] in swept]
    VARIED[:] = [re.sub(r"[^\w.-]+", "-", word, flags=re.ASCII)[:60] for word in chosen]
    if job.runtime.choices["hydra/launcher"] != "basic" and "num" in job.job:  # a single run has none
        STDOUT.prefix = STDERR.prefix = f"#{job.job.num} "


def requeues() -> int:
    """How often SLURM has requeued this job; 0 elsewhere."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def allowed_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun may restart this run (``--max-restarts``); 0 elsewhere."""
    return int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def ask_for_requeue(reason: str) -> None:
    """Ask SLURM's job script to requeue, which ends the job; nothing if it does not offer that."""
    if file := os.environ.get("REQUEUE_FILE"):
        Path(file).write_text(f"{reason}\n", encoding="utf-8")


def versions() -> list[str]:
    """The versions of this project, its libraries and Python, and the commit if there is one."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"{project['name']} {project['version']}", *(f"{name} {version(name)}" for name in PACKAGES)]
    lines.append(f"Python {platform.python_version()}")
    here = ["git", "-C", str(REPOSITORY), "--git-dir=.git"]  # not that of a folder around an unpacked archive
    command = [*here, "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # without git or a repository, or with a slow disk
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        lines.append(f"commit {told.stdout.strip()}")
    return lines


def chose_allocator() -> bool:
    """Whether the user set options of CUDA's memory allocator."""
    return not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ)


def compiler() -> str | None:
    """The path of the C++ compiler that torch.compile uses on Linux; None if it is missing."""
    return shutil.which(os.environ.get("CXX", "g++"))


def keep_compiled(folder: Path) -> None:
    """Let torch.compile keep its code in ``folder`` if it can be made; the user's choice wins."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def fix_cublas_workspace() -> None:
    """Fix the size of cuBLAS's workspace for reproducible sums; call this before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def ranks_to_start(config: Any) -> int:
    """The number of processes that ``devices`` asks for; 1 if a launcher has started them.

    Raises ConfigError for more than GPUs or cores, DataError for a batch that they cannot share.
    """
    devices = getattr(config, "devices", None)
    if devices in (None, 1) or read_launch().launcher != "none":
        return 1
    import torch

    from data.io import usable_cores

    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    count = max(1, gpus) if devices == "auto" else int(devices)
    if 0 < gpus < count:
        fix = "devices=auto for all of them, or device=cpu"
        raise ConfigError(f"devices={count} needs {count} GPUs, and torch finds {gpus} here", fix)
    if gpus == 0 and count > (most := max(2, len(usable_cores()))):  # two to try it out on any machine
        raise ConfigError(f"devices={count} is more than the cores that compute here", f"devices={most}")
    if isinstance(config, TrainConfig):
        images = config.train.batch_size
        must_fit(images, config.train.micro_batch_size or images, count)
    return count


def start_ranks(count: int, arguments: Words) -> NoReturn:
    """Become torchrun, which starts the same command ``count`` times."""
    from data.io import usable_cores  # imports numpy

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // count)))
    # As a script, __main__.py of a clone would not find its package.
    script = ["-m", "hydra_yolov3_spp"] if os.path.basename(sys.argv[0]) == "__main__.py" else sys.argv[:1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    STDOUT.write("")
    os.execv(sys.executable, [*torchrun, *script, *arguments])


def end_with_torchrun() -> None:
    """Let Linux send TERM to this rank once its torchrun is gone: nobody else would end it.

    It may be gone already: then no process above this one has loaded torch.
    """
    if sys.platform != "linux" or "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    above = os.getppid()
    while above:
        try:
            if "libtorch" in Path(f"/proc/{above}/maps").read_text(encoding="utf-8", errors="replace"):
                return
        except OSError:  # of another user: perhaps a torchrun, but not what adopts orphans
            if above != 1:
                return
        try:
            status = Path(f"/proc/{above}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        above = int(status.rpartition(")")[2].split()[1])
    os.kill(os.getpid(), signal.SIGTERM)


def leave_out_current_folder() -> None:
    """Let Python processes that start below import this project, and no file beside the data."""
    folders = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.update(PYTHONPATH=os.pathsep.join(dict.fromkeys(folders)), PYTHONSAFEPATH="1")


@cache
def claim_error() -> bool:
    """Whether this rank prints the error that ends it: of those of a node that fail, the first.

    It locks a file in the name of its group until it has ended. The others wait for that: the
    launcher ends all ranks once one has ended, and that must be the one that prints. What the file
    holds tells those that fail later, unless it is of an earlier group of the same shell.
    """
    if {"RANK", "SLURM_STEP_ID"}.isdisjoint(os.environ):
        return True
    port = re.sub(r"\W", "", os.environ.get("MASTER_PORT", ""))  # one shell may start two groups by hand
    path = Path(tempfile.gettempdir(), f"hydra-yolov3-spp-{os.getuid()}-{os.getppid()}-{port}.lock")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        signal.alarm(EXIT_SECONDS)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        signal.alarm(0)
        said = os.fstat(descriptor)
        if said.st_size > 0 and said.st_mtime > STARTED:
            return False
        os.pwrite(descriptor, b"said", 0)
    except OSError:  # better twice than never
        signal.alarm(0)
    return True


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether torch raised this because another rank ended or hangs."""
    dist = sys.modules.get("torch.distributed")
    # gloo raises a RuntimeError that starts with a source line, NCCL sometimes one that names it.
    line = str(error).partition("\n")[0]
    by_backend = isinstance(error, RuntimeError) and re.search(r"gloo/|\bNCCL\b", line)
    return bool(by_backend) or (dist is not None and isinstance(error, dist.DistError))


def explain_lost_peer(error: BaseException) -> BaseException:
    """A DistributedError for what torch raises if another rank ended or hangs; else ``error``.

    It waits first: if the other rank failed and said why, the launcher ends this one.
    """
    if not is_lost_peer(error):
        return error
    time.sleep(LAUNCHER_SECONDS)
    fix = "look for the first error of all ranks; resume=<the run folder> continues from the last checkpoint"
    return DistributedError(f"lost another rank ({first_line(error)})", fix)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
