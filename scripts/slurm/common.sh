# What the job scripts share; they set $repo and source this file.
# The user may set PYTHON (the interpreter; default: .venv of the repository), PROCESSES_PER_NODE
# and OMP_NUM_THREADS.
# Site setup goes into scripts/slurm/site.sh, or the file that SITE names. The job script sources it
# once, and exports reach all processes: `module load cuda`, `conda activate yolo`, PYTHON=python.
# `prefix=(apptainer exec --nv yolo.sif)` puts a command before Python, then the container's.
# A job runs in the folder it was submitted from, or in that of sbatch --chdir.

fail() {
    echo "$1" >&2
    exit 1
}

prefix=()
site=${SITE:-$repo/scripts/slurm/site.sh}
if [[ -f $site ]]; then
    set +u # modules and conda read unset variables
    # shellcheck source=/dev/null
    source "$site" || fail "$site ended with an error. fix: correct it, or SITE=<another file> sbatch ..."
    set -u
elif [[ ${SITE:-} ]]; then
    fail "SITE=$SITE is not a file. fix: correct its path"
fi

# Parallel tasks must not use `uv run`: they would all change one environment on a shared disk.
python=${PYTHON:-$repo/.venv/bin/python}
((${#prefix[@]})) || command -v "$python" >/dev/null || fail "no $python. fix: 'uv sync' in $repo on the login node, or PYTHON=<interpreter> sbatch ..."

# As job_folder_name() in conf/cli/launch.py. The last task of an array shares the
# array's job id, and requeueing that id would requeue the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
cpus_per_task=${SLURM_CPUS_PER_TASK:-1}

# with_resume OPTIONS...: sets `options` to them plus resume=auto, so a requeued job resumes.
with_resume() {
    local option
    options=("$@")
    for option in "$@"; do
        [[ $option != resume=* ]] || return 0
    done
    options+=(resume=auto)
}

set_threads() { # CPUS PROCESSES
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($1 / $2 > 0 ? $1 / $2 : 1))}
}

# print_facts: prints the date, the job, its nodes and the versions.
print_facts() {
    local versions='import sys, importlib.metadata as m
print("python", sys.version.split()[0], *(f"{n} {m.version(n)}" for n in ("torch", "hydra-core", "numpy")))'
    echo "$(date '+%Y-%m-%d %H:%M:%S %z')  job $job${SLURM_RESTART_COUNT:+, restart $SLURM_RESTART_COUNT}"
    echo "nodes: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' '), GPUs on each: $gpus"
    echo "versions: $(srun --version), $("${prefix[@]}" "$python" -c "$versions" 2>/dev/null || echo 'packages not installed'),\
 repository $(git -C "$repo" describe --always --dirty 2>/dev/null || echo 'without git')"
    ((gpus)) || echo "no GPU was requested: this runs on CPUs. For GPUs: sbatch --gpus-per-node=<number> ..."
}

# The GPUs of each node of this job, however they were requested; the same on all nodes.
gpus=${SLURM_GPUS_ON_NODE:-0}
if [[ ${SLURM_GPUS:-} =~ ^([^,]*:)?([0-9]+)$ ]] && ((BASH_REMATCH[2] != gpus * SLURM_JOB_NUM_NODES)); then
    fail "--gpus=$SLURM_GPUS gives the $SLURM_JOB_NUM_NODES nodes different numbers of GPUs. fix: --gpus-per-node=<number>"
fi
# srun would read these as its own options and hide GPUs from torchrun, or bind tasks to them.
asked_per_task=${SLURM_GPUS_PER_TASK:-}
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_GPU_BIND

# gpus_of_step: sets `step_gpus` to the option that shows each node's tasks all of its GPUs.
gpus_of_step() {
    step_gpus=()
    ((gpus == 0)) || step_gpus=(--gpus-per-node="$gpus")
}

# run_tasks PROGRAM ARGUMENTS...: one srun task per rank. Ends the job.
run_tasks() {
    local tasks=${SLURM_TASKS_PER_NODE:-1}
    [[ $tasks =~ ^([0-9]+)(\(x[0-9]+\))?$ ]] ||
        fail "the nodes have different numbers of tasks ($tasks). fix: --ntasks-per-node=<number>"
    tasks=${BASH_REMATCH[1]}
    if [[ $asked_per_task =~ ([0-9]+)$ ]] && ((BASH_REMATCH[1] > 1)); then
        fail "--gpus-per-task=$asked_per_task: a task is one process, which uses one GPU. fix: --gpus-per-task=1"
    fi
    ((gpus == 0 || tasks == gpus)) ||
        fail "$tasks tasks per node do not match its $gpus GPUs: each task needs one. fix: --ntasks-per-node=$gpus"
    set_threads "$cpus_per_task" 1
    gpus_of_step
    run_step "${step_gpus[@]}" --cpus-per-task="$cpus_per_task" "${prefix[@]}" "$python" "$repo/$1" "${@:2}"
}

# run_torchrun PROGRAM ARGUMENTS...: one torchrun per node, with one process per GPU, or per task if
# there is no GPU. Ends the job.
run_torchrun() {
    local tasks=${SLURM_NTASKS_PER_NODE:-1} first_node
    local processes=${PROCESSES_PER_NODE:-$((gpus > 0 ? gpus : tasks))}
    first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    set_threads $((cpus_per_task * tasks)) "$processes"
    gpus_of_step
    run_step "${step_gpus[@]}" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=$((cpus_per_task * tasks)) \
        "${prefix[@]}" "$python" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes" \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
        --rdzv-endpoint="$first_node:$((20000 + SLURM_JOB_ID % 10000))" \
        "$repo/$1" "${@:2}"
}

# run_step SRUN_OPTIONS... COMMAND...: one job step. Forwards USR1 to it, requeues the job if the
# run asks for it, and ends the job with the step's exit code.
run_step() {
    local options=() code interrupted step repeater=
    while [[ $1 == --* ]]; do
        options+=("$1")
        shift
    done
    # The training writes this file when it stops early with its checkpoint on the disk. Exit codes
    # cannot show this: torchrun exits with 1 after SIGTERM, and a failed task gets the rest killed.
    export REQUEUE_FILE=$PWD/runs/.requeue-$job
    { mkdir -p runs && rm -f "$REQUEUE_FILE"; } || fail "cannot write in $PWD/runs. fix: submit from a folder you may write to"
    print_facts
    # USR1 would kill torchrun and orphan its processes, so it is ignored until the training handles
    # it. Without --kill-on-bad-exit the other tasks would wait for one that failed.
    srun --kill-on-bad-exit=1 "${options[@]}" bash -c 'trap "" USR1; exec "$@"' - "$@" &
    step=$!
    trap 'interrupted=1; [[ $repeater ]] || { repeat_usr1 "$step" & repeater=$!; }' USR1
    trap 'interrupted=1' TERM # SLURM sends it to the step, too, which needs time to end
    while :; do
        interrupted=
        wait "$step" # returns early when a trap runs
        code=$?
        [[ $interrupted ]] || break
    done
    [[ ! -e $REQUEUE_FILE ]] || requeue || code=1
    exit "$code"
}

# Repeats the signal, because a process that is still starting ignores it.
repeat_usr1() { # PID
    while kill -USR1 "$1" 2>/dev/null; do
        sleep 5
    done
}

requeue() {
    local facts
    facts=$(scontrol show job "$job")
    rm -f "$REQUEUE_FILE"
    [[ $facts == *JobState=RUNNING* ]] || return 0 # cancelled, or requeued by someone else
    if [[ $facts == *Requeue=0* ]]; then
        echo "job $job stopped early and is not requeued, as it was submitted with --no-requeue"
        return 0
    fi
    echo "job $job stopped early and is requeued"
    scontrol requeue "$job"
}
