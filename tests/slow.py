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
    # Checks of an export, and its speed. Kept: a right export counts as mtptrain does, a wrong or missing one is
    # refused, and tests/eval/test_serving_bench.py.
    r"tests/serving/test_serving_check\.py::test_(a_tensor_parallel|in_bfloat16|a_running_server|a_server|the_engine_is)",
    r"tests/serving/test_serving_bench\.py::test_(a_running_server|a_server|an_engine|every_engine|the_counts|the_engines|ctrl_c)",
    r"tests/serving/test_baselines\.py",
    # Quantised targets. Kept: tests/mtptrain/target/test_quantised.py, which needs no engine.
    r"tests/serving/test_quantised_target\.py",
    # The MTP layer of a checkpoint. Kept: tests of its files and settings, which need no engine.
    r"tests/serving/test_native_mtp\.py",
    # Slurm jobs on a cluster of daemons, which takes minutes. Kept: the scripts, and addresses and disks of nodes.
    r"tests/slurm/test_(pipeline|lost_nodes)\.py",
    # Distributions of sampled tokens. Kept: one temperature for chains and trees, and one wrong acceptance rule.
    r"tests/mtptrain/decoding/test_sampling\.py::test_sampled_speculation_follows_the_targets_joint_distribution"
    r"\[(?!(greedy drafts|sampled drafts|tree)-1\.0\])",
    r"tests/mtptrain/decoding/test_sampling\.py::test_sampled_speculation_follows_the_distribution_of_top_p",
    r"tests/mtptrain/decoding/test_sampling\.py::test_a_biased_rule_of_trees",
    r"tests/mtptrain/decoding/test_sampling\.py::test_a_wrong_acceptance_rule_is_caught\[(?!accept_without_residual)",
    # Functions compiled for the CPU. Kept: those compiled for a GPU in tests/cuda, and a compiled training run.
    r"tests/mtptrain/training/test_losses\.py::test_compiled_code_of_one_depth",
    r"tests/mtptrain/hidden_states/extraction/test_transformers_streams\.py::test_compiled_layers",
    r"tests/mtptrain/heads/test_layers\.py::test_documents_of_all_lengths_are_computed_by_few_compiled",
    # Steps compiled for a GPU. Kept: mtp and eagle3.
    r"tests/cuda/test_compiled_for_h100\.py::test_the_other_heads",
    # Kills and ranks. Kept: one kill and one signal in training, two ranks, and resuming with another number of ranks.
    r"tests/mtptrain/hidden_states/test_stream\.py::test_a_streamed_run_that_is_killed",
    r"tests/mtptrain/train/test_resuming\.py::test_a_signal_ends_the_step\w*\[(?!SIGTERM)",
    r"tests/mtptrain/train/test_losses_and_ranks\.py::test_a_run_goes_on_with_another_number_of_ranks\w*"
    r"\[(?!1, 2, 1 ranks)",
    r"tests/mtptrain/train/test_resuming\.py::test_a_killed_run_resumes\w*\[(?!1-0)",
    r"tests/mtptrain/train/test_losses_and_ranks\.py::test_four_ranks",
    r"tests/mtptrain/train/test_draft_vocabulary\.py::test_ranks_and_zero_stages_agree",
    r"tests/mtptrain/train/test_losses_and_ranks\.py::test_ranks_and_zero_stages_give\w*\[(?!2-[12])",
    # Attention in bf16 without AMX tiles. Kept: documents with answers after prompts, at every size of scores.
    r"tests/mtptrain/heads/test_layers\.py::test_attention_in_bf16\w*\[False-all tokens",
    # Kills. Kept: one kill.
    r"tests/data_prep/hidden_states/test_interruptions\.py::test_runs_killed_at_ten",
    # Whole programs. Kept: the pipeline on the tiny target, tests of their parts, and the wheel's list of files.
    r"tests/eval/test_gpu_check\.py::test_every_check_runs",
    r"tests/eval/bench/test_train\.py::test_(every_candidate|what_runs)",
    r"tests/test_packaging\.py::test_(a_bare_checkout|an_installed_)",
    # Plans. Kept: Llama 3.1 8B with both heads.
    r"tests/test_recipe_plans\.py::test_every_plan\w*\[(?!llama3_1_8b_)",
}


def is_slow(test_id: str) -> bool:
    return any(re.match(pattern, test_id) for pattern in SLOW)
