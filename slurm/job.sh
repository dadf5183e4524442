# shellcheck shell=bash
# Sourced by every job: the Python to run, torchrun over all nodes of the job, and what happens when Slurm asks the job to stop.
# docs/slurm.md lists the variables that it reads.

set -euo pipefail

# The signal that asked the job to stop. Slurm sends USR1 to this shell alone, before the time limit, and the shell passes it on to the
# step if one has started. Slurm sends TERM to every process.
asked=
step=
trap 'asked=USR1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null || true' USR1
trap 'asked=TERM' TERM

checkout=${MTPTRAIN_CHECKOUT:-${SLURM_SUBMIT_DIR:-$PWD}}
restarts_before_giving_up=5 # of any kind; after that many, a job that stops with nothing newly finished is not requeued

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

container=()   # options of srun that start a step in the container, with pyxis
on_one_node=() # the command that starts one process in the container; empty without a container
if [ -n "${MTPTRAIN_CONTAINER_IMAGE:-}" ]; then
    python=${MTPTRAIN_CONTAINER_PYTHON:-python3} # inside the container; the node itself needs no Python
    container=(--container-image="$MTPTRAIN_CONTAINER_IMAGE" --container-workdir="$PWD" --container-env=PYTHONPATH
        --container-mounts="$checkout:$checkout,$PWD:$PWD${MTPTRAIN_CONTAINER_MOUNTS:+,$MTPTRAIN_CONTAINER_MOUNTS}")
    on_one_node=(srun --nodes 1 --ntasks 1 --cpus-per-task "${SLURM_CPUS_ON_NODE:-1}" "${container[@]}")
else
    python=$(find_python)
    if ! [ -x "$(command -v "$python")" ]; then
        echo "MTPTRAIN_PYTHON: must be a Python with mtptrain's dependencies, but is '$python', which does not run; set it, activate an" \
            "environment, or run make setup in $checkout" >&2
        exit 1
    fi
    PATH=$(dirname "$(command -v "$python")"):$PATH # DeepSpeed looks for ninja there
fi
PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} # finds mtptrain from any folder, even if it is not installed
export PATH PYTHONPATH

case ${MTPTRAIN_LOCAL_RUN_DIR:-} in
    '' | 0 | 1) ;;
    *)
        echo "MTPTRAIN_LOCAL_RUN_DIR: must be 1 where run_dir is on a node's own disk, 0 where all nodes share it, or unset, but is" \
            "'$MTPTRAIN_LOCAL_RUN_DIR'; correct it" >&2
        exit 1
        ;;
esac

# With run_dir on a node's own disk, the first job of a chain keeps the later ones on its node. pipeline.sh releases it once it has written
# their ids to this file.
later_jobs=${MTPTRAIN_CHAIN_DIR:-}/chain-${SLURM_JOB_ID:-}
if [ -f "$later_jobs" ]; then
    echo "run_dir is on this node's own disk: the later jobs of the chain run on $SLURMD_NODENAME too"
    while read -r job; do scontrol update "JobId=$job" "ReqNodeList=$SLURMD_NODENAME" || true; done <"$later_jobs"
fi

# is_on_own_disk PATH: whether the path is on a local disk, judging by the type of the file system.
is_on_own_disk() {
    local path=$1
    [ "${MTPTRAIN_LOCAL_RUN_DIR:-}" != 0 ] || return 1
    [ "${MTPTRAIN_LOCAL_RUN_DIR:-}" != 1 ] || return 0
    until [ -e "$path" ]; do path=$(dirname "$path"); done
    [[ " ext2/ext3 xfs btrfs zfs f2fs tmpfs ramfs overlayfs " == *" $(stat --file-system --format %T "$path") "* ]]
}

# refuse_own_disk RUN_DIR: refuse a local disk for work that several nodes share. A cluster of one node is allowed.
refuse_own_disk() {
    is_on_own_disk "$1" && [ "$(sinfo --noheader --Node --format %N | sort -u | wc -l)" -gt 1 ] || return 0
    echo "run_dir: must be on a disk that all nodes share if several jobs or nodes work on it, but $1 is on a disk of" \
        "$(hostname) alone; move it, or run on one node, without an array, with MTPTRAIN_LOCAL_RUN_DIR=1, or set MTPTRAIN_LOCAL_RUN_DIR=0 if the nodes do" \
        "share it" >&2
    exit 1
}

# run_on_all_nodes STAGE [OVERRIDES]: torchrun on every node of the job. Leaves `code`, the exit code. If a node is lost and the ranks
# on other nodes fail because of it, srun waits until Slurm marks the node as down, which requeues the job.
run_on_all_nodes() {
    local launcher=(-m torch.distributed.run --standalone) ranks=NPROC_$1
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
        local addresses
        mapfile -t addresses < <(node_addresses)
        launcher=("$checkout/slurm/on_node.py" "$(IFS=,; echo "${addresses[*]}")"
            --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d
            --rdzv-endpoint "${addresses[0]}:$((20000 + SLURM_JOB_ID % 10000))")
    fi
    # By default a step has one core per task. After a signal, torchrun kills ranks that have not ended within --shutdown-timeout seconds.
    srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --cpus-per-task "$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 \
        "${container[@]}" "$python" "${launcher[@]}" --nproc-per-node "${!ranks:-${NPROC:-gpu}}" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 100 -m mtptrain "${1//_/-}" "${@:2}" &
    step=$!
    [ -z "$asked" ] || kill -USR1 "$step" 2>/dev/null || true # asked while it was being started
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
    code=0
    wait "$step" || code=$?
}

node_addresses() { # of the job's nodes, in their order
    local node
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        sinfo --noheader --nodes "$node" --format %o | head -n 1
    done
}

# run_and_requeue FINISHED STAGE [OVERRIDES]: run_on_all_nodes, and requeue the job if it is asked to stop before it is done.
# FINISHED is a pattern for files that survive a stop, in the folder of the stage or in $stage_folder. A job that was restarted
# $restarts_before_giving_up times and stops again without a new or changed file is not requeued, and fails.
run_and_requeue() {
    local pattern=$1 stage=$2 plan run_dir stage_dir before code=75
    shift 2
    plan=$("${on_one_node[@]}" "$python" "$checkout/slurm/stages.py" "$@")
    run_dir=${plan%%$'\n'*}
    stage_dir=$run_dir/${stage_folder:-$stage}
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ] || [ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 ]; then refuse_own_disk "$run_dir"; fi
    before=$(finished "$stage_dir" "$pattern")
    if [ -z "$asked" ]; then run_on_all_nodes "$stage" "$@"; fi
    [ -n "$asked" ] || ! is_preempted || asked=preemption
    if [ "$code" = 0 ] || [ -z "$asked" ]; then
        exit "$code"
    elif [ "$asked" = TERM ]; then
        echo "$stage: stopped by TERM; Slurm puts it back into the queue, or it has been cancelled"
    elif [ "$before" = "$(finished "$stage_dir" "$pattern")" ] &&
        [ "${SLURM_RESTART_COUNT:-0}" -ge "$restarts_before_giving_up" ]; then
        echo "$stage: stopped by $asked with nothing finished since it started, after $SLURM_RESTART_COUNT restarts: not put back" \
            "into the queue; give it a longer --time" >&2
        exit 1
    else
        echo "$stage: stopped by $asked, put back into the queue; it goes on with what $stage_dir holds"
        scontrol requeue "$SLURM_JOB_ID"
        ! is_on_own_disk "$run_dir" || scontrol update "JobId=$SLURM_JOB_ID" "ReqNodeList=$SLURMD_NODENAME" || true
    fi
    exit 75 # stopped, not failed; with RequeueExit=75 in slurm.conf, Slurm also requeues a job that ends so
}

finished() { # DIRECTORY PATTERN
    find "$1" -name "$2" -printf '%p %s\n' 2>/dev/null | sort || true
}

# If preemption grants a grace period, its TERM goes to the steps of a job, not to this shell.
is_preempted() {
    [[ "$(scontrol show job "$SLURM_JOB_ID")" == *" PreemptTime=2"* ]]
}
