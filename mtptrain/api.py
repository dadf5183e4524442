"""The Python interface: load a target and a head, generate, measure acceptance, and run the pipeline.

`mtptrain` exports these names. They call what the programs call, so texts, counts and errors are those of the command
line: input that cannot be used raises `UserError`, whose message is one line.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedTokenizerBase

from mtptrain.cli.arguments import compose_config, flattened, override
from mtptrain.cli.mistakes import TYPES, words_of
from mtptrain.cli.program import stage_command
from mtptrain.config import AcceptanceConfig, Dtype, PromptsConfig, check_depths
from mtptrain.decoding.acceptance import Acceptance, generate_in_batches, summarise
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.prompts import check_head_context, read_prompts
from mtptrain.decoding.prompts_file import prompts_of
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, check_prompts
from mtptrain.init_from.start import RunHead, open_head
from mtptrain.settings.evaluation import check_acceptance
from mtptrain.settings.hardware import has_gpu
from mtptrain.settings.precision import resolve_acceptance_dtype
from mtptrain.target import loading
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import resolve_target
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from mtptrain.utils.setting_bounds import check_bounds

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat, which end with the user's."""


@dataclass(frozen=True)
class LoadedTarget:
    """A frozen target in memory, with its files."""

    model: Target
    files: TargetFiles

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.files.tokenizer


@dataclass(frozen=True)
class Generated:
    """The answer to a prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """The new tokens, with the end-of-sequence token if the target wrote one."""
    text: str
    """The new tokens as text, without special tokens."""
    accepted_by_round: list[int]
    """Number of accepted drafts in each round. A round adds one token of the target's own; the first token of an answer
    precedes all rounds, and the last round may go past the answer's end."""
    acceptance: Acceptance
    """The answer's counts and rates."""


class Decoding(TypedDict, total=False):
    """Settings of `generate` and `acceptance`, with the defaults and bounds of the config's section `acceptance`."""

    max_new_tokens: int
    """128 by default."""
    num_speculative_tokens: int
    """K, 3 by default, or what a head that drafts whole blocks was trained for."""
    temperature: float
    """0 by default: greedy."""
    top_p: float
    top_k: int
    seed: int
    sample_drafts: bool
    batch_size: int
    """Maximum number of prompts decoded together, 8 by default."""
    batch_tokens: int


def load_target(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> LoadedTarget:
    """Load the whole target: a directory, a GGUF file, a hub name, or `demo`, which comes with mtptrain.

    `dtype` is that of `acceptance.dtype`: by default bfloat16 on a GPU that has it, and float32 on a CPU, where counts
    equal an engine's. `device` is the first GPU by default, or the CPU without one. `template_kwargs` are those of
    `prompts.template_kwargs`. Raises UserError for a path without a model and for a model that mtptrain cannot run.
    """
    if dtype not in list(Dtype):
        raise UserError(f"dtype: must be one of {', '.join(Dtype)}, but is {dtype!r}; correct it")
    chosen = resolve_acceptance_dtype(Dtype(dtype), has_gpu())
    placed = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    directory = resolve_target(str(path), revision)
    files = TargetFiles(directory, str(path), revision, template_kwargs=template_kwargs or {})
    return LoadedTarget(loading.load_target(directory, getattr(torch, chosen), placed), files)


def load_head(path: str | Path, target: LoadedTarget, *, kind: str | None = None) -> RunHead:
    """Load a head in the target's dtype and on its device.

    `path` is a `run_dir` (its best head, or its last if none was measured), the directory of a head or of an export, or
    a published head on the hub. `kind` is the name of the head if its files do not say it: `native_mtp` for the MTP
    module of a checkpoint, `draft_model` for a language model. Raises UserError for a head of another target and for
    one that would draft otherwise than it was trained to.
    """
    model = target.model
    return open_head(str(path), target.files, model.parts.embed_tokens.dtype, model.device, kind)


def generate(
    target: LoadedTarget,
    head: RunHead | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    progress: bool = True,
    **settings: Unpack[Decoding],
) -> list[Generated]:
    """Returns the target's answers, drafted by the head, in the order of the prompts: a list, also of a single prompt.

    Without a head (None), the target decodes alone; greedy answers are the same. In a terminal, `progress` shows a bar,
    also in `acceptance`. Raises UserError for a prompt of
    another type or that does not fit the context, and for a setting of another name or value.
    """
    chosen = _settings(head, settings)
    token_ids = _token_ids(target, prompts)
    return [
        Generated(
            prompt,
            each.tokens,
            str(target.tokenizer.decode(each.tokens, skip_special_tokens=True)),
            each.accepted_by_round,
            summarise([each]),
        )
        for prompt, each in zip(token_ids, _decode(target, head, token_ids, chosen, progress), strict=True)
    ]


def acceptance(
    target: LoadedTarget,
    head: RunHead,
    prompts: Prompt | Sequence[Prompt] | None = None,
    *,
    prompts_file: str | Path | None = None,
    run_dir: str | Path | None = None,
    num_prompts: int | None = AcceptanceConfig.num_prompts,
    prompt_tokens: int = AcceptanceConfig.prompt_tokens,
    progress: bool = True,
    **settings: Unpack[Decoding],
) -> Acceptance:
    """Returns the head's acceptance, pooled over rounds.

    It is measured on prompts as `generate` takes them, or on at most `num_prompts` of a jsonl file
    (`acceptance.prompts_file`) or of the held-out ones of a run; texts are cut after `prompt_tokens` tokens. On one
    rank and with equal settings, the counts are those of `mtptrain acceptance`. Raises UserError as `generate` does,
    and if not exactly one of prompts, file and run is given.
    """
    if sum(each is not None for each in (prompts, prompts_file, run_dir)) != 1:
        raise UserError("prompts: must be given, or prompts_file, or run_dir, but not one of them is; give one alone")
    of_prompts = {"num_prompts": num_prompts, "prompt_tokens": prompt_tokens}
    file = None if prompts_file is None else str(prompts_file)
    chosen = _settings(head, {**settings, **of_prompts, "prompts_file": file})
    if prompts is not None:
        return summarise(_decode(target, head, _token_ids(target, prompts), chosen, progress))
    read = read_prompts(chosen, PromptsConfig(), target.files, Path(run_dir or "") / "prompts")
    if read.turns:
        raise UserError(
            f"{prompts_file}: must have no `turns`, each of which follows an answer, but has; measure it with "
            "`mtptrain acceptance`, or give `messages`"
        )
    return summarise(_decode(target, head, list(read.input_ids.values()), chosen, progress))


def run(config: str | Path | Mapping[str, Any] | Sequence[str]) -> Path:
    """Run all stages as `mtptrain run` does, in a process of its own, and return the `run_dir`.

    `config` is the path of a YAML file, a dict of settings, nested or with dotted names, or a list of arguments of the
    command line. Raises UserError for settings that are refused, and if a stage fails, after which the same call goes
    on where it stopped.
    """
    if isinstance(config, Mapping):
        arguments = [override(name, value) for name, value in flattened(config).items()]
    else:
        arguments = [str(config)] if isinstance(config, str | Path) else list(config)
    run_dir = compose_config(*arguments).run_dir
    code = subprocess.run(stage_command("run", arguments), check=False).returncode
    if code:
        raise UserError(
            f"{run_dir}: mtptrain run must end with status 0, but ended with {code}; its last lines say why"
        )
    return Path(run_dir)


def _settings(head: RunHead | None, given: Mapping[str, Any]) -> AcceptanceConfig:
    """Returns the settings of stage 4 with these values, checked for the head."""
    if head is not None and head.config.drafts_whole_blocks:
        given = {"num_speculative_tokens": head.config.ttt_steps, **given}
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(AcceptanceConfig, dict(given)))
    except OmegaConfBaseException as error:
        name = str(error.full_key)
        kind = TYPES.get(f"acceptance.{name}")
        must, found = ("a setting of acceptance", "none") if kind is None else (words_of(kind), given[name])
        raise UserError(f"{name}: must be {must}, but is {found}; correct it") from error
    assert isinstance(settings, AcceptanceConfig)
    check_bounds(settings)
    check_acceptance(settings)
    if head is not None:
        check_depths(head.config, "num_speculative_tokens", settings.num_speculative_tokens)
    return settings


def _token_ids(target: LoadedTarget, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Returns the tokens of one prompt or several, read as the rows of a file with prompts are."""
    _check_kind("prompts", prompts)
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    rows = _rows([prompts] if is_one else prompts)
    return list(prompts_of("prompts", rows, target.tokenizer, target.files.config.vocab_size).input_ids.values())


def _rows(prompts: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, prompt in enumerate(prompts):
        where = f"prompts[{index}]"
        _check_kind(where, prompt)
        is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
        column = "text" if isinstance(prompt, str) else "messages" if is_chat else "input_ids"
        yield where, {"id": index, column: prompt if isinstance(prompt, str) else list(prompt)}


def _check_kind(name: str, prompt: object) -> None:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise UserError(
            f"{name}: must be a text, token ids, the messages of a chat, or a list of these, but is a "
            f"{type(prompt).__name__}; correct it"
        )


def _decode(
    target: LoadedTarget, head: RunHead | None, prompts: Sequence[Sequence[int]], settings: AcceptanceConfig, bar: bool
) -> list[Generation]:
    depths, model = settings.num_speculative_tokens, target.model
    names = [f"prompts[{index}]" for index in range(len(prompts))]
    check_prompts(prompts, max(settings.max_new_tokens, depths), model.config.max_position_embeddings, names)
    if head is not None and prompts:
        check_head_context(head.head, prompts, settings.max_new_tokens, depths, "head")
    return generate_in_batches(
        model,
        NoDrafter() if head is None else HeadDrafter(head.head, model.parts, depths, settings.sample_drafts),
        prompts,
        sampler=Sampler(settings.temperature, settings.seed, settings.top_p, settings.top_k),
        eos_token_ids=model.eos_token_ids,
        description="answers" if bar and sys.stderr.isatty() else None,
        **settings.limits,
    )
