# Sourced by the job scripts beside it, which set $repo: what they share.
# From the user: PYTHON (the interpreter; else .venv of the repository), PROCESSES_PER_NODE, OMP_NUM_THREADS.
# A job works in the folder where it was submitted (or sbatch --chdir), as any command does.

fail() {
    echo "$1" >&2
    exit 1
}

# Parallel tasks must not run `uv run`: on a shared disk they would change one environment at the same time.
python=${PYTHON:-$repo/.venv/bin/python}
command -v "$python" >/dev/null || fail "no $python. fix: 'uv sync' in $repo on the login node, or PYTHON=<interpreter> sbatch ..."

# As slurm_job_name() in train_utils/launch_environment.py. The number of an array's last task is the array's as well:
# a requeue by it would mean the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
cpus_per_task=${SLURM_CPUS_PER_TASK:-1}

# with_resume OPTIONS...: sets `options` to them and resume=auto, by which a requeued job goes on in its own folder.
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

# run_tasks PROGRAM ARGUMENTS...: one srun task for each process. Ends the job.
run_tasks() {
    set_threads "$cpus_per_task" 1
    run_step --cpus-per-task="$cpus_per_task" "$python" "$repo/$1" "${@:2}"
}

# run_torchrun PROGRAM ARGUMENTS...: one torchrun on each node, with a process for each GPU, or where there is none for
# each task of a node. Ends the job.
run_torchrun() {
    local tasks=${SLURM_NTASKS_PER_NODE:-1} gpus=${SLURM_GPUS_ON_NODE:-0} first_node
    local processes=${PROCESSES_PER_NODE:-$((gpus > 0 ? gpus : tasks))}
    first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    set_threads $((cpus_per_task * tasks)) "$processes"
    run_step --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=$((cpus_per_task * tasks)) \
        "$python" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes" \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
        --rdzv-endpoint="$first_node:$((20000 + SLURM_JOB_ID % 10000))" \
        "$repo/$1" "${@:2}"
}

# run_step SRUN_OPTIONS... COMMAND...: one job step. Hands USR1 on to it, requeues the job if the run asks for that,
# and ends the job with the step's exit code.
run_step() {
    local options=() code interrupted step
    while [[ $1 == --* ]]; do
        options+=("$1")
        shift
    done
    # The training writes this file after an early stop with its checkpoint on the disk. Exit codes cannot say it:
    # torchrun ends with 1 after SIGTERM, and the first task that ends with another code than 0 has the others killed.
    export REQUEUE_FILE=$PWD/runs/.requeue-$job
    mkdir -p runs && rm -f "$REQUEUE_FILE" || fail "cannot write in $PWD/runs. fix: submit from a folder you may write to"
    # torchrun would die of USR1 and leave its processes alone; these replace the ignored signal once they can answer.
    # Without --kill-on-bad-exit the others would wait for a task that failed.
    srun --kill-on-bad-exit=1 "${options[@]}" bash -c 'trap "" USR1; exec "$@"' - "$@" &
    step=$!
    trap 'interrupted=1; [[ ${repeater:-} ]] || { repeat_usr1 "$step" & repeater=$!; }' USR1
    trap 'interrupted=1' TERM # SLURM sends it to the step as well, which is then to have the time to end
    while :; do
        interrupted=
        wait "$step" # ends early when a trap runs
        code=$?
        [[ $interrupted ]] || break
    done
    [[ ! -e $REQUEUE_FILE ]] || requeue || code=1
    exit "$code"
}

# Again and again, since a process that is still starting ignores it.
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
