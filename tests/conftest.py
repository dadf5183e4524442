"""Provides what most tests use: tiny random targets with a tokenizer, composed configs and runs of programs."""

import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

if "MTPTRAIN_GPU_CHECK" not in os.environ:
    # Tests run on the CPU even if there are GPUs. DeepSpeed reads DS_ACCELERATOR, and torch reads CUDA_VISIBLE_DEVICES.
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
import tests.cuda.guard  # noqa: F401 - must come before torch

os.environ.setdefault("WANDB_MODE", "offline")
# On every CPU, `auto` stands for bf16 and ZeRO 1, as on GPUs; tests of the other path set the variable to 0.
os.environ["MTPTRAIN_CPU_BF16"] = "1"
# Without this variable, forked processes could not use CUDA after torch has looked for a GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import data_prep  # noqa: F401
import eval  # noqa: F401
from mtptrain.cli.arguments import expanded
from mtptrain.cli.mistakes import CONFIG_GROUPS
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.heads.base import Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.settings.hardware import this_machine
from mtptrain.target.model import Target
from tests.programs import StartedProgram

# A shell makes its background programs ignore Ctrl-C, but some tests send Ctrl-C to themselves. The packages of
# programs set a handler for the time of their imports, which ends here.
signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS_UNTIL = "MTPTRAIN_TESTS_UNTIL"
"""Environment variable with the time, in seconds since the epoch, after which no further test starts."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get(TESTS_UNTIL)
    if until is not None and time.time() > float(until):
        pytest.skip("NO TIME LEFT")


def tiers(values: Iterable[Any], core: Container[Any]) -> list[Any]:
    """Returns parameters of a test. Those that are not in `core` are slow."""
    slow = pytest.mark.slow
    return [
        value if value in core else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=slow)
        for value in values
    ]


GENERATION_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template: str | None = GENERATION_TEMPLATE) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer of 260 tokens: 256 bytes, `<|end|>` (id 256, end of text) and three roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<system>", "<user>", "<assistant>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=chat_template, clean_up_tokenization_spaces=False
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
WINDOW = 16
"""The size of the sliding window, in tokens, of the families below that have sliding windows."""

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "q_lora_rank": None}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LAST_HAS_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "mistral with window": {"sliding_window": WINDOW},
    "qwen2": {"num_attention_heads": 2, "rope_parameters": YARN_ROPE},
    "qwen2 with window": _LAST_HAS_WINDOW,
    "qwen3": {"head_dim": 128},
    "qwen3 with window": _LAST_HAS_WINDOW,
    "qwen3_moe": {"head_dim": 128, "num_experts": 8, **_EXPERTS},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 30.0,
        "initializer_range": 0.05,
    },
    "mimo": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "deepseek_v2": {
        **{"num_attention_heads": 2, "num_key_value_heads": 2, **_LATENT, **_EXPERTS},
        **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False},
        "rope_parameters": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.5},
    },
}
FAMILIES = {name: (name.split()[0], settings) for name, settings in _SETTINGS.items()}
"""The families of most tests, as arguments of `make_target`; `tests/families.py` has many more."""


def make_target(
    directory: Path,
    model_type: str = "llama",
    family_settings: Mapping[str, object] = MappingProxyType({}),
    *,
    seed: int = 0,
    chat_template: str | None = GENERATION_TEMPLATE,
    **config: object,
) -> Path:
    """Write a tiny random target.

    By default, it has H=64, 2 layers, 1 query head of size 64, a context of 512 tokens and a vocabulary of 260.
    """
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**settings, **family_settings, **config})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # leaving out a norm must change the results
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    make_tokenizer(chat_template).save_pretrained(directory)
    return directory


def as_draft_model(target: Target) -> Head:
    """Returns a copy of the target as a draft model."""
    head = build_head(DraftModelHead.Config(init_from=target.config.name_or_path), target.config).eval()
    weights = target.model.state_dict()
    head.load_state_dict({name: weights[name] for name in head.state_dict()})
    return head


PLAIN = (
    *("train.compile=false", "head.start_from_target=false", "train.optimizer=adamw", "train.feature_weight=0"),
    *("train.batch_tokens=1024", "train.micro_batches_per_step=1"),
)
"""Compiling takes longer than a tiny run, most tests need a head with random weights, and the recipe's own settings of
training are what is best for its head and text."""


@cache
def _composed(choices: tuple[str, ...], machine: object) -> DictConfig:
    with initialize_config_dir(RECIPES, version_base="1.3"):
        return compose("pipeline", [*choices])


def compose_config(*overrides: str) -> DictConfig:
    """Returns the config that Hydra composes with these overrides.

    Composing takes a tenth of a second, so each combination of choices is composed once, and settings are changed in
    copies, as Hydra does.
    """
    parsed = OverridesParser.create().parse_overrides(expanded(overrides).overrides)
    choices = tuple(each.input_line for each in parsed if each.key_or_group in CONFIG_GROUPS)
    config = deepcopy(_composed(choices, this_machine()))  # a test may pretend to have GPUs
    for each in parsed:
        if each.key_or_group not in CONFIG_GROUPS:
            OmegaConf.update(config, each.key_or_group, each.value(), force_add=each.is_add() or each.is_force_add())
    return config


def make_config(*overrides: str) -> PipelineConfig:
    """Returns the config of the quickstart recipe with overrides. By default, its run folder does not exist."""
    return load_config(compose_config("recipe=quickstart", "run_dir=not_there", "cpu_ranks=1", *PLAIN, *overrides))


@pytest.fixture
def user_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Yields the list to which warnings of users are added.

    Others are left out: a collection of garbage may warn at any time of a file that an earlier test left open.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        yield found


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def config_for(tmp_path: Path, tiny_target: Path) -> Callable[..., PipelineConfig]:
    """Returns a function that composes a config with a temporary run folder and the tiny target."""

    def build(*overrides: str) -> PipelineConfig:
        return make_config(f"run_dir={tmp_path}/run", f"target.path={tiny_target}", *overrides)

    return build


def start_program(program: str, *overrides: str, num_ranks: int = 1) -> StartedProgram:
    """Start a program with the quickstart recipe, or with that of the overrides."""
    return StartedProgram(program, ["recipe=quickstart", "cpu_ranks=1", *PLAIN, *overrides], num_ranks)


def run_program(program: str, *overrides: str, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program as `start_program` does, and return its exit code and output."""
    return start_program(program, *overrides, num_ranks=num_ranks).result()


def succeed(program: str, *overrides: str, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program, which must end without an error, and return its output."""
    result = run_program(program, *overrides, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def write_text_files(directory: Path, num_files: int = 40, num_lines: int = 30) -> Path:
    """Write files that look like source code. All differ, but names recur."""
    generator = random.Random(0)
    names = [f"{verb}_{noun}" for verb in ("read", "write", "open") for noun in ("file", "line", "row", "table")]
    directory.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = [
            f"    {generator.choice(names)} = {generator.choice(names)}({generator.randint(0, 9)})"
            for _ in range(num_lines)
        ]
        (directory / f"module_{i:03d}.py").write_text(f"def main_{i}():\n" + "\n".join(lines) + "\n")
    return directory


TINY_SETTINGS = (
    "prompts.max_document_tokens=128",
    "prompts.validation_fraction=0.2",
    "hidden_states.shard_tokens=4000",
    "hidden_states.dtype=float32",
    "train.batch_tokens=1024",
    "train.micro_batches_per_step=2",
    "train.max_steps=20",
    "train.log_every=1",
    "train.warmup_steps=5",
    "train.validation_prompts=4",
    "train.validation_new_tokens=8",
    "train.tracker=none",
    "acceptance.prompt_tokens=32",
    "acceptance.num_prompts=8",
    "acceptance.max_new_tokens=16",
    "head.ttt_steps=3",
)
"""With these settings, a run of the quickstart takes seconds on a tiny target."""


Run = tuple[Path, tuple[str, ...]]
"""A run folder and the overrides of its config."""


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Run:
    """Runs stages 1 and 2. Returns the run folder and the overrides, except run_dir."""
    directory = tmp_path_factory.mktemp("tiny")
    files = write_text_files(directory / "files")
    overrides = (*TINY_SETTINGS, f"target.path={tiny_target}", f"prompts.paths=[{files}]")
    for module in ("prompts", "hidden-states"):
        succeed(module, f"run_dir={directory}/run", *overrides)
    return directory / "run", overrides


@pytest.fixture
def fresh_run(tiny_run: Run, tmp_path: Path) -> Run:
    """Copies `tiny_run` for one test. Returns the folder and the overrides, including run_dir."""
    run_dir, overrides = tiny_run
    shutil.copytree(run_dir, tmp_path / "run")
    return tmp_path / "run", (f"run_dir={tmp_path}/run", *overrides)


@pytest.fixture(scope="session")
def finished(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Copies `tiny_run` and runs stages 3 to 5. Returns the folder and the overrides, including run_dir."""
    directory = tmp_path_factory.mktemp("finished")
    shutil.copytree(tiny_run[0], directory / "run")
    overrides = (f"run_dir={directory}/run", *tiny_run[1])
    for module in ("train", "acceptance", "export"):
        (directory / f"{module}.out").write_text(succeed(module, *overrides).stdout)
    return directory / "run", overrides
