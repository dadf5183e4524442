"""Acceptance: counts of rounds -> lengths and rates, and the prompts that they are measured on."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mtptrain.clock import PhaseClock
from mtptrain.config import PipelineConfig
from mtptrain.prompt_files import DocumentEntry, Documents, Split, name_hash, render_prompt
from mtptrain.run_dir import require
from mtptrain.speculate import Drafter, Generation, Round, Sampler, check_prompts, speculate
from mtptrain.target import Target, load_tokenizer, read_target_config

MAX_LOOP_PERIOD, MIN_LOOP_TOKENS = 64, 32


@dataclass(frozen=True)
class Acceptance:
    """What drafting was worth; counts are pooled over rounds and ranks, then divided once."""

    acceptance_length: float
    """Tokens of a round with drafts, bonus token included: 1 + accepted / rounds, vLLM's convention."""
    acceptance_rate: float
    """Accepted over drafted tokens."""
    acceptance_rate_at: list[float]
    """Rounds that accepted the draft at each position, over rounds: not conditional on the positions before."""
    acceptance_length_mean_of_prompts: float
    """The same length by prompt, then averaged; beside the pooled one to show how far they lie apart."""
    tokens_per_step: float
    """Tokens per forward of the target, rounds without any draft included."""
    rounds: int
    empty_rounds: int
    drafted: int
    accepted: int
    accepted_at: list[int]
    prompts: int


def summarise(generations: Sequence[Generation]) -> Acceptance:
    """Pool the counts of many sequences; a length without rounds is 1, a rate 0."""
    num_depths = max((len(generation.accepted_at) for generation in generations), default=0)
    accepted_at = [sum(generation.accepted_at[depth] for generation in generations) for depth in range(num_depths)]
    rounds = sum(generation.rounds for generation in generations)
    empty_rounds = sum(generation.empty_rounds for generation in generations)
    drafted, accepted = sum(generation.drafted for generation in generations), sum(accepted_at)
    lengths = [1 + sum(generation.accepted_at) / generation.rounds for generation in generations if generation.rounds]
    return Acceptance(
        acceptance_length=1 + accepted / max(rounds, 1),
        acceptance_rate=accepted / max(drafted, 1),
        acceptance_rate_at=[count / max(rounds, 1) for count in accepted_at],
        acceptance_length_mean_of_prompts=float(np.mean(lengths)) if lengths else 1.0,
        tokens_per_step=1 + accepted / max(rounds + empty_rounds, 1),
        rounds=rounds,
        empty_rounds=empty_rounds,
        drafted=drafted,
        accepted=accepted,
        accepted_at=accepted_at,
        prompts=len(generations),
    )


@dataclass(frozen=True)
class Intervals:
    """Of 95 %, low and high, by bootstrap over conversations: they are drawn anew, with all rounds of each."""

    acceptance_length: tuple[float, float]
    acceptance_rate_at: list[tuple[float, float]]
    tokens_per_step: tuple[float, float]


def intervals(conversations: Sequence[Sequence[Generation]], draws: int = 2000, seed: int = 0) -> Intervals:
    """How far the figures of `summarise` may lie from those of other prompts of the same kind.

    Args:
        conversations: at least one; a prompt alone is a conversation of one answer.
    """
    of_each = ([(each.rounds, each.empty_rounds, *each.accepted_at) for each in answers] for answers in conversations)
    counts = np.array([np.sum(rows, axis=0) for rows in of_each], dtype=np.float64)  # [conversations, 2 + K]
    weights = np.random.default_rng(seed).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), draws)  # [draws, P]
    rounds, empty_rounds, *accepted_at = (weights @ counts).T
    accepted = np.sum(accepted_at, axis=0)

    def of(values: np.ndarray) -> tuple[float, float]:
        low, high = np.quantile(values, (0.025, 0.975))
        return float(low), float(high)

    return Intervals(
        acceptance_length=of(1 + accepted / np.maximum(rounds, 1)),
        acceptance_rate_at=[of(count / np.maximum(rounds, 1)) for count in accepted_at],
        tokens_per_step=of(1 + accepted / np.maximum(rounds + empty_rounds, 1)),
    )


def has_loop(tokens: Sequence[int]) -> bool:
    """Whether a block of at most 64 tokens follows itself at least twice, over 32 tokens or more: greedy decoding of a small model
    gets caught in such loops, and drafting is easy there.
    """
    array = np.asarray(tokens)
    for period in range(1, min(MAX_LOOP_PERIOD, len(array) // 3) + 1):
        longest = run = 0
        for repeats in array[period:] == array[:-period]:
            run = run + 1 if repeats else 0
            longest = max(longest, run)
        if longest >= max(2 * period, MIN_LOOP_TOKENS - period):
            return True
    return False


def generate_in_batches(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    sampler: Sampler,
    eos_token_ids: Sequence[int],
    batch_size: int,
    description: str | None = None,
    clock: PhaseClock | None = None,
    observe: Callable[[Round], None] | None = None,
) -> list[Generation]:
    """Decode many prompts, those of similar length together; results in the order of the prompts.

    Args:
        description: of the progress bar; None shows none.
        clock: of `speculate`.
        observe: likewise.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    generations: dict[int, Generation] = {}
    with tqdm(total=len(prompts), desc=description, unit="prompt", disable=description is None) as bar:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = speculate(
                target,
                drafter,
                [prompts[index] for index in indices],
                num_speculative_tokens=num_speculative_tokens,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                eos_token_ids=eos_token_ids,
                clock=clock,
                observe=observe,
            )
            generations |= dict(zip(indices, batch, strict=True))
            bar.update(len(indices))
            bar.set_postfix(acceptance_length=f"{summarise(list(generations.values())).acceptance_length:.2f}")
    return [generations[index] for index in range(len(prompts))]


def read_prompts(config: PipelineConfig, target_dir: Path, spare_tokens: int = 0) -> dict[str, list[int]]:
    """The prompts of `acceptance` by id, every one checked against the target before it is loaded.

    Args:
        spare_tokens: of the target's context that must be left behind prompt and answer.
    """
    settings, target_config = config.acceptance, read_target_config(target_dir)
    context_tokens = target_config.max_position_embeddings - spare_tokens
    if settings.prompts_file is not None:
        prompts = read_prompts_file(Path(settings.prompts_file), load_tokenizer(target_dir), target_config.vocab_size)
        check_prompts(list(prompts.values()), settings.max_new_tokens, context_tokens)
        return prompts
    documents = held_out_documents(config.stage_dir("prompts"))
    return held_out_prompts(documents, settings.num_prompts, settings.prompt_tokens, settings.max_new_tokens, context_tokens)


def held_out_documents(prompts_dir: Path) -> Documents:
    """The held-out documents to cut prompts from: every window of texts, but of a conversation the one document with its first
    answer, so that none weighs more than another and none begins in the middle of a turn.

    Raises:
        FileNotFoundError: stage 1 has not run.
        ValueError: no conversation has its first answer in its first window.
    """
    documents = Documents.load(require(prompts_dir / f"{Split.validation}.safetensors", "data_prep.prompts"))
    if documents.loss_mask.all():
        return documents
    entries, first = DocumentEntry.read_all(prompts_dir), dict[str, int]()
    prompt_tokens = [int(documents.mask(index).argmax()) for index in range(len(documents))]
    for index, document_id in enumerate(documents.document_ids):
        entry = entries[document_id]
        if entry.window == 0 and prompt_tokens[index] <= prompt_tokens[first.setdefault(entry.name, index)]:
            first[entry.name] = index
    chosen = sorted(first.values())
    if not chosen:
        raise ValueError(
            f"prompts.max_document_tokens: the first window of a held-out conversation must hold its first answer, but none of "
            f"{len({entries[i].name for i in documents.document_ids})} does; raise it and run data_prep.prompts again, or set "
            "prompts.validation_fraction higher"
        )
    return Documents.from_list([(int(documents.document_ids[i]), documents.tokens(i), documents.mask(i)) for i in chosen])


def held_out_prompts(
    documents: Documents, num_prompts: int, prompt_tokens: int, max_new_tokens: int, context_tokens: int
) -> dict[str, list[int]]:
    """Prompts from held-out documents, by document id, in an order fixed by its hash.

    A conversation is cut before its first answer, a document without turns behind `prompt_tokens` tokens; documents too short for
    that, or too long for the context with their answer, are passed over.

    Raises:
        ValueError: no document gives a prompt.
    """
    prompts: dict[str, list[int]] = {}
    for index in sorted(range(len(documents)), key=lambda index: name_hash(str(documents.document_ids[index]))):
        mask = documents.mask(index)
        end = prompt_tokens if mask.all() else int(mask.argmax())
        if 0 < end <= min(len(mask), context_tokens - max_new_tokens):
            prompts[str(documents.document_ids[index])] = documents.tokens(index)[:end].tolist()
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise ValueError(
            f"acceptance.prompt_tokens: held-out documents must hold a prompt of {prompt_tokens} tokens that fits a context of "
            f"{context_tokens} with {max_new_tokens} new ones, but none of {len(documents)} does; lower it or acceptance.max_new_tokens"
        )
    return prompts


@dataclass(frozen=True)
class PromptNotes:
    """What the lines of a prompts file say besides the prompt, by id."""

    categories: dict[str, str] = field(default_factory=dict)
    turns: dict[str, list[str]] = field(default_factory=dict)
    """All that the user says in a conversation whose answers are the target's own."""


def prompts_sha256(prompts: Mapping[str, Sequence[int]], notes: PromptNotes) -> str:
    """Equal where the same is asked under the same ids."""
    asked = json.dumps({"prompts": prompts, "turns": notes.turns}, sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


def eos_token_ids(target: Target) -> tuple[int, ...]:
    """End-of-sequence tokens, from the generation config first, as engines do."""
    found = target.model.generation_config.eos_token_id if target.model.generation_config is not None else None
    found = target.config.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)


def read_prompts_file(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, list[int]]:
    """Prompts of a jsonl file by id; each line has `id` (or Spec-Bench's `question_id`) and one of `input_ids`, `text`, `messages`,
    `turns`, whose first turn is the prompt.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not of that form, an id stands twice, a token is not in the vocabulary, or there is no prompt.
    """
    if not path.is_file():
        raise FileNotFoundError(f"acceptance.prompts_file: must be a jsonl file, but {path} does not exist; correct the path")
    prompts: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        prompt_id, input_ids = _prompt_of(line, f"{path}:{number}", tokenizer)
        if prompt_id in prompts:
            raise ValueError(f"{path}:{number}: ids must be unique, but {prompt_id!r} stands twice; rename one")
        outside = [token for token in input_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{path}:{number}: tokens must lie in the target's vocabulary of {vocab_size}, but one is {outside[0]}; the file was "
                "made for another target"
            )
        prompts[prompt_id] = input_ids
    if not prompts:
        raise ValueError(f"{path}: must hold at least one prompt, but is empty; add lines with `id` and `text`")
    return prompts


def read_notes(path: Path) -> PromptNotes:
    """Of a file that `read_prompts_file` accepts."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return PromptNotes(
        {_id_of(row): str(row["category"]) for row in rows if "category" in row},
        {_id_of(row): row["turns"] for row in rows if "turns" in row},
    )


def _id_of(row: dict[str, Any]) -> str:
    return str(row["id"] if "id" in row else row["question_id"])


def _prompt_of(line: str, where: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: a line must be JSON, but is not ({error}); correct it") from error
    kinds = [kind for kind in ("input_ids", "text", "messages", "turns") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1 or not {"id", "question_id"} & row.keys():
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where}: a line must have `id` and one of `input_ids`, `text`, `messages`, `turns`, but has {keys}; correct it"
        )
    if kinds[0] == "input_ids":
        if not isinstance(row["input_ids"], list) or not all(type(token) is int for token in row["input_ids"]):
            raise ValueError(f"{where}: input_ids must be a list of integers, but is {str(row['input_ids'])[:40]}; correct it")
        return _id_of(row), row["input_ids"]
    if kinds[0] == "text":
        if not isinstance(row["text"], str):
            raise ValueError(f"{where}: text must be a string, but is {str(row['text'])[:40]}; correct it")
        return _id_of(row), list(tokenizer(row["text"])["input_ids"])
    if kinds[0] == "turns":
        if not isinstance(row["turns"], list) or not row["turns"] or not all(isinstance(turn, str) for turn in row["turns"]):
            raise ValueError(f"{where}: turns must be a list of at least one string, but is {str(row['turns'])[:40]}; correct it")
        return _id_of(row), render_prompt(tokenizer, [{"role": "user", "content": row["turns"][0]}])
    if not isinstance(row["messages"], list) or not all(isinstance(message, dict) for message in row["messages"] or [0]):
        raise ValueError(
            f"{where}: messages must be a list of at least one message, but is {str(row['messages'])[:40]}; correct it"
        )
    return _id_of(row), render_prompt(tokenizer, row["messages"])
