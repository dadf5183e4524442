"""Tests which jobs and chains of jobs may work on a disk of one node."""

import re

from tests.slurm.stand import Stand, array_of

SEVERAL_NODES: list[tuple[str, dict[str, str]]] = [
    ("pipeline.sh", {}),
    ("train.sbatch", {"SLURM_JOB_NUM_NODES": "2"}),
    ("hidden_states.sbatch", array_of("0-1", "0")),
]


def test_several_nodes_do_not_work_on_a_disk_of_one_of_them(stand: Stand) -> None:
    (stand.directory / "sinfo").write_text("#!/bin/sh\nprintf 'first\\nsecond\\n'\n")
    message = (
        "run_dir: must be on a disk that all nodes share .* but runs/quickstart is on a disk of .* alone; move it, or "
        "run on one node, without an array, with MTPTRAIN_LOCAL_RUN_DIR=1, or set MTPTRAIN_LOCAL_RUN_DIR=0 if the "
        "nodes do share it"
    )
    for script, variables in SEVERAL_NODES:
        result = stand.run(script, "recipe=quickstart", **variables, MTPTRAIN_LOCAL_RUN_DIR="")
        assert result.returncode == 1 and re.search(message, result.stderr)
    assert stand.asked("sbatch") == stand.asked("srun") == []
    for script, variables in SEVERAL_NODES:
        assert "run_dir: must be" not in stand.run(script, "recipe=quickstart", **variables).stderr


ONE = "NODES and ARRAY_TASKS: must be 1 with MTPTRAIN_LOCAL_RUN_DIR=1, but are"
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("yes", {}, "MTPTRAIN_LOCAL_RUN_DIR: must be 1 where .*, 0 where .*, or unset, but is 'yes'; correct it"),
    ("1", {"ARRAY_TASKS": "8"}, f"{ONE} 1 and 8; leave them out"),
    ("1", {"NODES": "2"}, f"{ONE} 2 and 1; leave them out"),
    (
        "1",
        {"SKIP": "prompts"},
        "--nodelist: must name the node whose disk holds .* in SKIP, but is missing",
    ),
]


def test_a_chain_on_one_nodes_disk_refuses_what_needs_a_shared_one(stand: Stand) -> None:
    for value, variables, expected in REFUSED:
        result = stand.run("pipeline.sh", "recipe=quickstart", **variables, MTPTRAIN_LOCAL_RUN_DIR=value)
        assert result.returncode == 1 and re.search(expected, result.stderr)
    assert stand.asked("sbatch") == []


def test_a_chain_on_one_nodes_disk_is_one_task_on_the_node_that_is_named(stand: Stand) -> None:
    variables = {"MTPTRAIN_LOCAL_RUN_DIR": "1", "SKIP": "responses prompts"}
    assert stand.run("pipeline.sh", "--nodelist=n7", "recipe=quickstart", **variables).returncode == 0
    first, *_ = jobs = stand.asked("sbatch")
    assert all("--nodelist=n7" in line and "--hold" not in line for line in jobs)
    assert "--array=0-0 " in first and f"--output={stand.directory}/logs/quickstart/" in first
    assert not (stand.directory / "runs").exists()  # the submitting machine does not see the node's disk


def test_an_own_disk_keeps_a_job_that_goes_back_into_the_queue_on_its_node(stand: Stand) -> None:
    (stand.directory / "srun").write_text("#!/bin/sh\nkill -USR1 $PPID\nexit 1\n")
    variables = {"MTPTRAIN_LOCAL_RUN_DIR": "1", "SLURMD_NODENAME": "n7"}
    assert stand.run("train.sbatch", "recipe=quickstart", **variables).returncode == 75
    assert stand.asked("scontrol") == ["requeue 7", "update JobId=7 ReqNodeList=n7"]
