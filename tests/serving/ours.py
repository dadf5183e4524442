"""What mtptrain itself decodes for the cases that engines serve."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.divergence import GREEDY
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import Served
from mtptrain.engines.requests import EngineCounts, EngineRun, Questions
from mtptrain.heads.base import Head
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.serving.cases import CONTEXT_TOKENS, EOS, MAX_NEW_TOKENS, PROMPTS, Case

QUESTIONS = Questions(PROMPTS, MAX_NEW_TOKENS, [EOS])
Serve = Callable[..., tuple[list[Generation], EngineRun, EngineCounts]]
"""Serves a case, and returns our answers, the engine's, and our counts by its rules."""


@dataclass(frozen=True)
class OnDisk:
    """Pairs a target with its directory."""

    directory: Path
    target: Target
    """The target in fp32."""

    def in_dtype(self, dtype: str) -> Target:
        return (
            self.target
            if dtype == "float32"
            else load_target(self.directory, getattr(torch, dtype), torch.device("cpu"))
        )


def drafted_here(
    case: Case,
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Generation]:
    """Returns what mtptrain's own decoding generates for the same prompts with the head of a case."""
    target, head = target_of(case.target).in_dtype(case.dtype), deepcopy(head_of(case.head, case.target))
    drafter = HeadDrafter(head.to(getattr(torch, case.dtype)), target.parts, case.num_speculative_tokens)
    return decoded_here(target, drafter, case.num_speculative_tokens, prompts=prompts)


def decoded_here(
    target: Target,
    drafter: Drafter,
    num_speculative_tokens: int,
    sampler: Sampler = GREEDY,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Generation]:
    """Returns what mtptrain's own decoding generates for the same prompts with any drafter."""
    return generate_in_batches(
        target,
        drafter,
        prompts,
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=MAX_NEW_TOKENS,
        sampler=sampler,
        eos_token_ids=[EOS],
        batch_size=8,
    )


def check_equal(serve: Serve, case: Case) -> None:
    """Check that all answers and counters of an engine are ours, and that drafts were accepted."""
    ours, theirs, counted = serve(case)
    assert theirs.tokens == [generation.tokens for generation in ours]
    assert theirs.counts == counted and counted.accepted_at[0] > 0


def served_from(program: Path, target_dir: Path, head_dir: Path) -> Served:
    """Returns what an engine serves from two folders, in fp32."""
    plain = program, TargetFiles(target_dir), ServingConfig(), "float32", CONTEXT_TOKENS, 1
    return Served(*plain, head_dir=head_dir, facts={}, log_dir=Path())
