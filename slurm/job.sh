# shellcheck shell=bash
# What every job sources: the Python to run, torchrun over all nodes of the job, and what follows when Slurm asks it to stop.
#
# MTPTRAIN_CHECKOUT  the checkout; the folder of submission unless given (Slurm runs a copy of the script, elsewhere)
# MTPTRAIN_PYTHON    its Python; else that of the activated environment, of .venv in the checkout, or on PATH
# NPROC              ranks per node; one per GPU that Slurm gives unless set, and an error where there is none. NPROC_hidden_states
#                    and so on for one stage: 1 where a rank takes all GPUs

set -euo pipefail

# The signal that asked the job to stop: USR1 comes to this shell alone, ahead of the time limit, and is passed on to the step, where
# there is one yet; TERM Slurm sends to every process.
asked=
step=
trap 'asked=USR1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null || true' USR1
trap 'asked=TERM' TERM

checkout=${MTPTRAIN_CHECKOUT:-${SLURM_SUBMIT_DIR:-$PWD}}
max_futile_restarts=5 # of a job that is asked to stop again and again before it has finished anything

find_python() {
    if [ -n "${MTPTRAIN_PYTHON:-}" ]; then
        echo "$MTPTRAIN_PYTHON"
    elif [ -n "${VIRTUAL_ENV:-}" ]; then
        echo "$VIRTUAL_ENV/bin/python"
    elif [ -x "$checkout/.venv/bin/python" ]; then
        echo "$checkout/.venv/bin/python"
    else
        command -v python || command -v python3 || true
    fi
}

python=$(find_python)
if ! [ -x "$(command -v "$python")" ]; then
    echo "MTPTRAIN_PYTHON: must be a Python with mtptrain's dependencies, but is '$python', which does not run; set it, activate an" \
        "environment, or run make setup in $checkout" >&2
    exit 1
fi
PATH=$(dirname "$(command -v "$python")"):$PATH # DeepSpeed looks for ninja there
PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} # from any folder, installed or not
export PATH PYTHONPATH

# run_on_all_nodes MODULE [OVERRIDES]: torchrun on every node of the job. Leaves `code`, the exit code.
run_on_all_nodes() {
    local rendezvous=(--standalone) ranks=NPROC_${1##*.}
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
        local head_node head_address
        head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        head_address=$(sinfo --noheader --nodes "$head_node" --format %o | head -n 1)
        rendezvous=(--nnodes "$SLURM_JOB_NUM_NODES" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d
            --rdzv-endpoint "$head_address:$((20000 + SLURM_JOB_ID % 10000))")
    fi
    # A step has one core per task unless told otherwise. torchrun kills ranks that have not ended so many seconds after a signal.
    srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --cpus-per-task "$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 \
        "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${!ranks:-${NPROC:-gpu}}" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 100 -m "$@" &
    step=$!
    [ -z "$asked" ] || kill -USR1 "$step" 2>/dev/null || true # asked while it was being started
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    code=0
    wait "$step" || code=$?
}

# run_and_requeue FINISHED MODULE [OVERRIDES]: the same, and where the job is asked to stop before it is done, back into the queue.
# FINISHED is a pattern for files of the stage that outlive a stop: where the job stops again and again without a new one, that ends.
run_and_requeue() {
    local pattern=$1 module=$2 plan stage_dir before code=75
    shift 2
    plan=$("$python" "$checkout/slurm/stages.py" "$@")
    stage_dir=${plan%%$'\n'*}/${module##*.}
    before=$(finished "$stage_dir" "$pattern")
    if [ -z "$asked" ]; then run_on_all_nodes "$module" "$@"; fi
    [ -n "$asked" ] || ! is_preempted || asked=preemption
    if [ "$code" = 0 ] || [ -z "$asked" ]; then
        exit "$code"
    elif [ "$asked" = TERM ]; then
        echo "$module: stopped by TERM; Slurm puts it back into the queue, or it has been cancelled"
    elif [ "$before" = "$(finished "$stage_dir" "$pattern")" ] && [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_futile_restarts" ]; then
        echo "$module: stopped by $asked with nothing finished since it started, after $SLURM_RESTART_COUNT restarts: not put back" \
            "into the queue; give it a longer --time" >&2
    else
        echo "$module: stopped by $asked, put back into the queue; it goes on with what $stage_dir holds"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 75 # stopped, not failed: a RequeueExit=75 of slurm.conf takes it likewise
}

finished() { # DIRECTORY PATTERN
    find "$1" -name "$2" -printf '%p %s\n' 2>/dev/null | sort || true
}

# Where preemption grants a time of grace, its TERM comes to the steps of a job, not to this shell.
is_preempted() {
    [[ "$(scontrol show job "$SLURM_JOB_ID")" == *" PreemptTime=2"* ]]
}
