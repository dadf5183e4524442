#!/usr/bin/env bash
# The whole pipeline as Slurm jobs, each of which starts when the previous one has succeeded:
#
#   [responses ->] prompts [-> draft_vocab] -> hidden_states, an array -> train [-> choose_head] -> acceptance -> export
#
# With hidden_states.num_servers=N the array are N servers, and hidden_states is one process without GPUs that asks them.
#
#   slurm/pipeline.sh [SBATCH OPTIONS] recipe=NAME [OVERRIDES]
#   NODES=2 ARRAY_TASKS=8 slurm/pipeline.sh --partition=gpu --account=team --time=12:00:00 recipe=llama3_1_8b_mtp "prompts.paths=[chats.jsonl]" train.micro_batches_per_step=16
#
# Options, each as one word (--time=12:00:00), are passed to every sbatch; a --dependency applies to the first job. Environment:
#   NODES        nodes for training, such as 2 or 1-2 (default 1). Other jobs take one node each
#   ARRAY_TASKS  tasks that share the extraction (default 4, or 1 with MTPTRAIN_LOCAL_RUN_DIR=1). More than one needs run_dir on a disk that
#                all nodes share
#   GPU_OPTIONS  more options for the jobs on GPUs (8 per node, whole nodes), CPU_OPTIONS for the others (ignored with MTPTRAIN_LOCAL_RUN_DIR=1)
#   SKIP         stages to leave out, by name: SKIP="prompts hidden_states"
#   NPROC, NPROC_<stage>, MTPTRAIN_...   as in docs/slurm.md
# Every job is requeued when its node is lost or when it is preempted and, if it can resume, before its time limit.
# Relative paths start at the working directory; the output of jobs is in RUN_DIR/slurm/.
set -euo pipefail

MTPTRAIN_CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MTPTRAIN_CHECKOUT
# Settings are checked here, outside any container.
# shellcheck source=slurm/job.sh
MTPTRAIN_CONTAINER_IMAGE='' source "$MTPTRAIN_CHECKOUT/slurm/job.sh"
trap - USR1 TERM # this is no job

options=()
while [[ "${1:-}" == -* ]]; do
    options+=("$1")
    shift
done
for word in "${options[@]}"; do
    if [[ "$word" == --nodes=* || "$word" == -N* ]]; then
        echo "$word: the number of nodes for training must be set by NODES, as in NODES=2, but this is an option of every job; use NODES" >&2
        exit 1
    fi
done
for word in "$@"; do
    if [[ "$word" == -* ]]; then
        echo "$word: options of sbatch must come first, each as one word (--time=12:00:00), but this one follows '$1'; join it or move it" >&2
        exit 1
    fi
done
read -ra gpu_options <<<"${GPU_OPTIONS:-}"
read -ra cpu_options <<<"${CPU_OPTIONS:-}"

read -ra skipped <<<"${SKIP:-}"
[[ " ${skipped[*]} " == *" train "* ]] || export NODES=${NODES:-1} # stages.py checks the number of ranks
plan=$(MTPTRAIN_SKIP=${SKIP:-} "$python" "$checkout/slurm/stages.py" "$@")
run_dir=${plan%%$'\n'*}

# With run_dir on a node's own disk, all jobs run on one node: the one in --nodelist, otherwise the one where the first job starts.
# All jobs take GPUs, so that the first one gets a node with free GPUs. This machine cannot see that disk, so the jobs' output stays here.
use_one_node() {
    num_tasks=${ARRAY_TASKS:-1} output_dir=$PWD/logs/${run_dir##*/} cpu_options=(--gpus-per-node=8 --exclusive --mem=0 "${gpu_options[@]}")
    if [ "$num_tasks" != 1 ] || [ "${NODES:-1}" != 1 ]; then
        echo "NODES and ARRAY_TASKS: must be 1 with MTPTRAIN_LOCAL_RUN_DIR=1, but are ${NODES:-1} and $num_tasks; leave them out, or put" \
            "run_dir on a disk that all nodes share" >&2
        exit 1
    fi
    [[ " ${options[*]} ${gpu_options[*]} " != *" --nodelist="* ]] || return 0
    if [ ${#skipped[@]} != 0 ]; then
        echo "--nodelist: must name the node whose disk holds the output of the stages in SKIP, but is missing; add it" >&2
        exit 1
    fi
    hold=(--hold)
}

num_tasks=${ARRAY_TASKS:-4} output_dir=$run_dir/slurm hold=()
if [ "${MTPTRAIN_LOCAL_RUN_DIR:-}" = 1 ]; then
    use_one_node
else
    refuse_own_disk "$run_dir"
fi
if ! [[ "$num_tasks" =~ ^[1-9][0-9]*$ ]]; then
    echo "ARRAY_TASKS: must be a number of at least 1, but is '$num_tasks'; correct it" >&2
    exit 1
fi
mkdir -p "$output_dir"
export MTPTRAIN_CHAIN_DIR=$output_dir

jobs=()
trap '[ $? = 0 ] || [ ${#jobs[@]} = 0 ] || scancel "${jobs[@]}"' EXIT # all of the chain, or nothing

submit() { # STAGE SCRIPT [ARGUMENTS], with stage_options; it waits for the job before it to succeed, or for $start_after
    local stage=$1 output=%x-%j.out after=() job
    shift
    [[ " ${stage_options[*]}" != *" --array="* ]] || output=%x-%A_%a.out
    [ ${#jobs[@]} = 0 ] || after=("--dependency=${start_after:-afterok:${jobs[-1]}}" --kill-on-invalid-dep=yes)
    [ ${#jobs[@]} != 0 ] || after=("${hold[@]}")
    job=$(sbatch --parsable --export=ALL --job-name="$stage" --output="$output_dir/$output" \
        "${options[@]}" "${stage_options[@]}" "${after[@]}" "$@") # if an option is given twice, sbatch takes the last
    jobs+=("${job%%;*}")
    printf '%-14s %s\n' "$stage" "${jobs[-1]}"
}

while read -r stage kind num_servers; do
    [[ " ${skipped[*]} " != *" $stage "* ]] || continue
    stage_options=("${cpu_options[@]}")
    case $kind in
        process) submit "$stage" "$checkout/slurm/process.sbatch" "$stage" "$@" ;;
        server) submit "$stage" "$checkout/slurm/asking.sbatch" "$stage" "$@" ;;
        servers) # the first of them to start lets the one that asks start
            stage_options=("--array=0-$((num_servers - 1))" "${gpu_options[@]}")
            submit states_server "$checkout/slurm/states_server.sbatch" "$@"
            first=$(printf "?after:${jobs[-1]}_%d" $(seq 0 $((num_servers - 1))))
            stage_options=("${cpu_options[@]}")
            start_after=${first#?} submit "$stage" "$checkout/slurm/asking.sbatch" "$stage" "$@"
            echo "${jobs[-1]}" >"$output_dir/asker-${jobs[-2]}"
            ;;
        ranks)
            stage_options=()
            [ "$stage" != hidden_states ] || stage_options=("--array=0-$((num_tasks - 1))")
            [ "$stage" != train ] || stage_options=("--nodes=${NODES:-1}")
            stage_options+=("${gpu_options[@]}")
            submit "$stage" "$checkout/slurm/$stage.sbatch" "$@"
            ;;
    esac
done <<<"${plan#*$'\n'}"

if [ ${#jobs[@]} = 0 ]; then
    echo "SKIP: must leave at least one stage, but is '${skipped[*]}'; name fewer" >&2
    exit 1
fi

if [ ${#hold[@]} != 0 ]; then
    printf '%s\n' "${jobs[@]:1}" >"$output_dir/chain-${jobs[0]}"
    scontrol release "${jobs[0]}"
fi

echo "to follow: squeue --jobs=$(IFS=,; echo "${jobs[*]}"); tail -F $output_dir/*.out"
echo "to cancel: scancel ${jobs[*]}"
