"""Prints the plan of a run as a table, and warns about everything that will not fit.

It reads the target's config.json (the only file downloaded for a hub name) and, if mtptrain prompts has been run, the
documents that it wrote. The planner loads no weights and writes nothing, except that a GGUF file is first dequantised
into the cache. `plan=true` prints the plan instead of running the program:

    mtptrain hidden-states recipe=llama3_1_8b_mtp plan=true
"""

import math
import shlex

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table

from mtptrain.config import Backend, Dtype, PipelineConfig, StoreDtype
from mtptrain.hidden_states.stream import OPEN_WINDOWS
from mtptrain.planning.plan import ENGINE_SHARE, Plan, Speed, TrainMemory, make_plan
from mtptrain.serving.break_even import read_costs, verdicts
from mtptrain.serving.found_engines import describe_engines
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import config_dir
from mtptrain.target.loading import FITTING_SHARE
from mtptrain.utils.masking import hide_passwords


def print_plan(config: PipelineConfig) -> Plan:
    """Print the plan of a run, and warn about everything that will not fit.

    Raises:
        UserError: the target does not exist or is refused, or the head does not fit the target.
    """
    plan = make_plan(config)
    table = Table(title=f"plan of {config.run_dir}: memory and time are estimates", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path in the command is not cut off
    for name, value in plan_rows(plan, config):
        table.add_row(name, value)
    table.add_row("free disk", f"{_gb(plan.free_bytes)} on the disk of run_dir")
    table.add_row("does a draft pay?", describe_break_even(config))
    table.add_row("engines here", describe_engines(config.serving))
    table.add_row("export", f"{_gb(plan.export_bytes)} of host memory; the target's decoder layers are not loaded")
    console = Console(markup=False)
    console.print(table)
    for warning in plan_warnings(plan, config):
        console.print(f"WARNING {warning}", highlight=False, soft_wrap=True)
    return plan


def describe_break_even(config: PipelineConfig) -> str:
    """Returns the measured verdicts on drafting with this head, or the command that measures them."""
    path, revision = config.target.path, config.target.revision
    costs = read_costs(config, TargetFiles(config_dir(path, revision), path, revision, config.target.gguf))
    if costs:
        return "\n".join(verdicts(costs, config.head.name))
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    settings = [each for each in given if not each.startswith(("plan=", "serving_bench.break_even="))]
    command = ["mtptrain", "serving-bench", *hide_passwords(settings), "serving_bench.break_even=true"]
    return "not measured; " + shlex.join(command)


def plan_rows(plan: Plan, config: PipelineConfig) -> list[tuple[str, str]]:
    """Returns the rows that follow from the plan and the settings.

    `print_plan` adds those about this machine and the export.
    """
    chosen, memory = config.hidden_states.store_dtype, plan.memory
    is_vllm = plan.backend is Backend.vllm
    sizes = {
        dtype: f"{dtype} {_gb(plan.store_bytes[dtype])} ({plan.bytes_per_token[dtype]:,} bytes/token)"
        for dtype in plan.store_bytes
    }
    target = (
        f"{plan.target.num_parameters / 1e9:.2f} B parameters, {_gb(plan.target_bytes_per_gpu)} of weights on each GPU"
    )
    if plan.is_spread:
        target += f", spread by accelerate over {config.planner.num_gpus} in one process"
    elif is_vllm and config.hidden_states.tensor_parallel_size > 1:
        target += f", tensor parallel over {config.hidden_states.tensor_parallel_size}"
    weights, states = plan.target_bytes_per_gpu, plan.states_in_flight_bytes
    extraction = (
        "extraction, each GPU",
        f"{_gb(weights + states)}: weights {_gb(weights)}, states in flight {_gb(states)}",
    )
    return [
        ("documents", _describe_workload(plan, config)),
        ("hidden states", f"{sizes.pop(chosen)}; " + "; ".join(sizes.values())),
        *([("streamed", f"{_gb(streamed_bytes(plan, config, chosen))} at a time")] if config.train.stream else []),
        *(
            [("scratch", f"{plan.scratch_bytes_per_token:,} bytes/token in vLLM's files, deleted after each shard")]
            if is_vllm
            else []
        ),
        ("target", f"{target}, {plan.backend}"),
        *([extraction] if is_vllm else []),
        ("head", f"{config.head.name}, {plan.head_parameters / 1e6:,.1f} M parameters"),
        ("training, each GPU", f"{_gb(memory.state + memory.activations)}: {_describe_memory(memory)}"),
        *([("validation, each GPU", _describe_validation(memory))] if memory.validation else []),
        (
            "training",
            f"{plan.num_steps:,} steps of {config.train.batch_tokens * config.train.micro_batches_per_step:,} tokens",
        ),
        *([("serving", _describe_serving(*plan.draft_model_bytes))] if plan.draft_model_bytes else []),
        ("time of hidden states", _describe_speed(plan.extraction_speed)),
        ("time of training", _describe_speed(plan.training_speed)),
        ("time of both", _duration(plan.extraction_speed.seconds + plan.training_speed.seconds)),
    ]


def _describe_workload(plan: Plan, config: PipelineConfig) -> str:
    work = plan.workload
    if work.is_counted:
        share = work.supervised_tokens / max(1, work.tokens)
        return (
            f"{work.documents:,} with {work.tokens:,} tokens, {work.supervised_tokens:,} supervised ({share:.0%}); "
            f"the longest has {work.longest_tokens:,}"
        )
    bounds = (
        f"in documents of up to {work.longest_tokens:,}, all supervised (not counted yet: mtptrain prompts has not "
        "been run)"
    )
    what = "at most {:,} tokens" if config.prompts.max_train_tokens else "an assumed {:,} tokens"
    return f"{what.format(work.tokens)} {bounds}"


def _describe_memory(memory: TrainMemory) -> str:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        f"optimizer (ZeRO {memory.zero_stage})": memory.optimizer,
        "frozen parts": memory.frozen_parts,
        "activations": memory.activations,
    }
    if memory.validation_target:
        parts["target for validation"] = memory.validation_target
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())


def _describe_validation(memory: TrainMemory) -> str:
    parts = f"{_gb(memory.validation)} for KV caches and the forward pass over the prompts"
    return f"{_gb(memory.state + memory.validation)}, including {parts}; no training activations are alive then"


def _describe_speed(speed: Speed) -> str:
    return f"{_duration(speed.seconds)} at {speed.tokens_per_s:,.0f} tokens/s, {speed.basis}"


def _describe_serving(weights: int, cached_per_token: int) -> str:
    return f"{_gb(weights)} of weights, and {cached_per_token:,} bytes of keys and values per token"


def plan_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    """Returns a warning for everything that will not fit, each with a remedy."""
    return [
        *_disk_warnings(plan, config),
        *_target_warnings(plan, config),
        *_memory_warnings(plan, config),
        *_setting_warnings(plan, config),
    ]


def _disk_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    streamed = streamed_bytes(plan, config, config.hidden_states.store_dtype)
    size = streamed if config.train.stream else plan.store_bytes[config.hidden_states.store_dtype]
    if size <= plan.free_bytes:
        return []
    fp8 = streamed_bytes(plan, config, StoreDtype.fp8) if config.train.stream else plan.store_bytes[StoreDtype.fp8]
    smaller = f"hidden_states.store_dtype=fp8 ({_gb(fp8)}), " if fp8 <= plan.free_bytes else ""
    if streamed <= plan.free_bytes:
        smaller += f"train.stream=true train.epochs=1 ({_gb(streamed)} at a time), "
    elif config.train.stream:
        smaller += "a lower train.stream_shards, "
    return [
        f"run_dir: {_gb(size)} must be free for the hidden states, but {config.run_dir} has {_gb(plan.free_bytes)}; "
        f"set {smaller}run_dir to a larger disk, or a lower prompts.max_train_tokens"
    ]


def streamed_bytes(plan: Plan, config: PipelineConfig, dtype: StoreDtype) -> int:
    """Returns the peak size of a store of this dtype with `train.stream`: the size of its open windows."""
    window_tokens = OPEN_WINDOWS * config.train.stream_shards * config.hidden_states.shard_tokens
    return min(plan.store_bytes[dtype], window_tokens * plan.bytes_per_token[dtype])


def _target_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    available, settings = FITTING_SHARE * config.planner.gpu_memory_gb * 1e9, config.hidden_states
    engine_gpus = _least_engine_gpus(plan, config)
    warnings = []
    if plan.target_bytes_per_gpu > available:
        with_vllm = (
            f"{engine_gpus} GPUs with hidden_states.backend=vllm hidden_states.tensor_parallel_size={engine_gpus}, or "
        )
        warnings.append(
            f"target.path: weights must fit into {_gb(available)} of each GPU in extraction, but take "
            f"{_gb(plan.target_bytes_per_gpu)}; use {with_vllm * (engine_gpus is not None)}at least "
            f"{math.ceil(plan.target_bytes / available)} GPUs in one machine with hidden_states.backend=transformers"
        )
    elif plan.backend is Backend.vllm:
        warnings += _states_warnings(plan, config)
    elif plan.is_spread and engine_gpus is not None and engine_gpus <= config.planner.num_gpus:
        warnings.append(
            f"target.path: weights must fit into {_gb(available)} of one GPU for all GPUs to work at once, but take "
            f"{_gb(plan.target_bytes)}; start mtptrain hidden-states as one process, in which accelerate spreads "
            f"them over all GPUs, or set hidden_states.backend=vllm hidden_states.tensor_parallel_size={engine_gpus}"
        )
    if plan.backend is Backend.vllm and config.planner.num_gpus % settings.tensor_parallel_size:
        warnings.append(
            f"hidden_states.tensor_parallel_size: must divide the {config.planner.num_gpus} GPUs of planner.num_gpus, "
            f"but is {settings.tensor_parallel_size}; change one of them"
        )
    return warnings


def _states_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    available, settings = ENGINE_SHARE * config.planner.gpu_memory_gb * 1e9, config.hidden_states
    states, engine_gpus = plan.states_in_flight_bytes, _least_engine_gpus(plan, config)
    if plan.target_bytes_per_gpu + states <= available:
        return []
    has_enough_gpus = engine_gpus is not None and engine_gpus <= config.planner.num_gpus
    more_gpus = f"set hidden_states.tensor_parallel_size={engine_gpus}, " if has_enough_gpus else "set "
    return [
        f"hidden_states.batch_tokens: weights and states in flight must fit into {_gb(available)} of each GPU with "
        f"vLLM, but take {_gb(plan.target_bytes_per_gpu + states)}: {_gb(states)} for the states of two batches of "
        f"{settings.batch_tokens:,} tokens and a document of {plan.workload.longest_tokens:,}, and the rest for "
        f"weights, the only part that tensor parallelism divides; {more_gpus}a lower hidden_states.batch_tokens, a "
        "lower prompts.max_document_tokens, or hidden_states.backend=transformers"
    ]


def _least_engine_gpus(plan: Plan, config: PipelineConfig) -> int | None:
    """Returns the smallest number of GPUs, a power of two, that fits vLLM's weights and states; None if none does."""
    memory = config.planner.gpu_memory_gb * 1e9
    left = min(FITTING_SHARE * memory, ENGINE_SHARE * memory - plan.states_in_flight_bytes)
    return 1 << (math.ceil(plan.target_bytes / left) - 1).bit_length() if left > 0 else None


def _memory_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    memory, available = plan.memory, config.planner.gpu_memory_gb * 1e9
    without_target = memory.state - memory.validation_target + memory.activations
    with_validation = memory.state + memory.validation
    warnings = []
    advice = "" if config.train.activation_checkpointing else "set train.activation_checkpointing=true, or "
    if without_target > available:
        warnings.append(
            f"train.batch_tokens: training must fit into {_gb(available)} of each GPU, but takes "
            f"{_gb(without_target)}, {_gb(memory.activations)} of them for activations; {advice}lower "
            f"train.batch_tokens from {config.train.batch_tokens:,} (and prompts.max_document_tokens with it), "
            f"or lower head.ttt_steps from {config.head.ttt_steps}"
        )
    elif without_target + memory.validation_target > available:
        ways = []
        if config.acceptance.dtype != Dtype.bfloat16:
            ways.append("acceptance.dtype=bfloat16")
        if memory.state < available:
            ways.append("a lower train.batch_tokens")
        smaller = f"set {' or '.join(ways)}; or " if ways else ""
        left, needed = _gb(available - without_target), _gb(memory.validation_target)
        warnings.append(
            "train.validation_prompts: for validation, the target must fit on every GPU next to training, but takes "
            f"{needed}, and only {left} are left; {smaller}set train.validation_prompts=0 and run mtptrain choose-head "
            "after training; or use GPUs with more memory"
        )
    elif with_validation > available:
        warnings.append(
            f"acceptance.batch_tokens: validation must fit into {_gb(available)} of each GPU, but takes "
            f"{_gb(with_validation)}, {_gb(memory.validation)} of them for KV caches and the forward pass over the "
            f"prompts; lower acceptance.batch_tokens from {config.acceptance.batch_tokens:,}, lower "
            "acceptance.batch_size, or set train.validation_prompts=0"
        )
    return warnings


def _setting_warnings(plan: Plan, config: PipelineConfig) -> list[str]:
    longest, num_gpus, per_step = (
        plan.workload.longest_tokens,
        config.planner.num_gpus,
        config.train.micro_batches_per_step,
    )
    again = " and run mtptrain prompts again" if plan.workload.is_counted else ""
    warnings = []
    if longest > plan.max_position_embeddings:
        warnings.append(
            f"prompts.max_document_tokens: documents must have at most {plan.max_position_embeddings:,} tokens, the "
            f"target's max_position_embeddings, but have up to {longest:,}; lower it{again}"
        )
    if longest > config.train.batch_tokens:
        warnings.append(
            f"train.batch_tokens: must be at least the {longest:,} tokens of the longest document, but is "
            f"{config.train.batch_tokens:,}; raise it, or lower prompts.max_document_tokens{again}"
        )
    if plan.workload.is_counted and plan.workload.documents < per_step:
        warnings.append(
            f"train.micro_batches_per_step: must be at most the {plan.workload.documents:,} documents, but is "
            f"{per_step}; lower it, or train on more documents"
        )
    if per_step % num_gpus:
        warnings.append(
            f"train.micro_batches_per_step: must be a multiple of the {num_gpus} GPUs of planner.num_gpus, but is "
            f"{per_step}; set it to {-(-per_step // num_gpus) * num_gpus}"
        )
    return warnings


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 99.5e9 else f"{num_bytes / 1e9:.3g} GB"
