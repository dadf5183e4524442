"""Lists the slow tests: `make test` leaves them out, `make test-slow` runs those without engines, `make test-all` all.

Each entry is a pattern of test ids. A test is slow if a pattern matches the start of its id. The comment above an
entry names the behaviour that its tests cover and, after "Kept", the tests of this behaviour that `make test` runs.
"""

import re

SLOW = {
    # Served heads. Kept: mtp, eagle and eagle3 on Llama with K=3, and mtp with one broken part.
    r"tests/serving/test_served_heads\.py::test_(a_served|every_prompt|vllm_without|in_bf16|a_head_served|the_states)\w*"
    r"\[(?!(mtp|eagle|eagle3)-llama-K3\]|llama\]|mtp-llama-K3-without_columns\])",
    r"tests/serving/test_served_heads\.py::test_(the_table|the_pages_table)",
    # Heads served by llama.cpp. Kept: one of each kind, and every trap.
    r"tests/serving/test_llama_cpp\.py::test_(llama_cpp_counts_as_we_do_in_every_case|the_gguf_file_of_another)",
    # Heads served by OpenVINO. Kept: one of each kind, its default layers, and a check of an export.
    r"tests/serving/test_openvino\.py::test_(openvino_counts_as_we_do_in_every_other_case|the_commands)",
    # Extraction by vLLM. Kept: Llama, the comparison of both backends' stores, tensor parallelism with forked workers.
    r"tests/serving/test_hidden_states\.py::test_(extracted|layer_0)\w*\[(?!llama\])",
    r"tests/serving/test_vllm_store\.py::test_runs_killed",
    r"tests/serving/test_vllm_streams\.py::test_(the_engine_ends|an_engine_that_cannot_write|a_vllm_for_cpus)",
    # Baselines. Kept: tests of prompt lookup and of small models, which need no engine.
    r"tests/serving/test_baselines\.py",
    # Quantised targets. Kept: tests/mtptrain/target/test_quantised.py, which needs no engine.
    r"tests/serving/test_quantised_target\.py",
    # The MTP layer of a checkpoint. Kept: tests of its files and settings, which need no engine.
    r"tests/serving/test_native_mtp\.py",
    # Slurm jobs on a cluster of daemons, which takes minutes. Kept: the scripts, and addresses and disks of nodes.
    r"tests/slurm/test_(pipeline|lost_nodes)\.py",
    # Whole programs. Kept: the pipeline on the tiny target, tests of their parts, and the wheel's list of files.
    r"tests/test_packaging\.py::test_(a_bare_checkout|an_installed_)",
}


def is_slow(test_id: str) -> bool:
    return any(re.match(pattern, test_id) for pattern in SLOW)
