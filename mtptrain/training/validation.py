"""Validation during training: acceptance measured on held-out prompts, with the real draft and verify path."""

from pathlib import Path

import torch

from mtptrain.config import PipelineConfig
from mtptrain.decoding.acceptance import Acceptance, eos_token_ids, generate_in_batches, summarise
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.prompts import HeldOut, held_out_documents, held_out_prompts
from mtptrain.decoding.speculate import Sampler
from mtptrain.heads.files import build_head
from mtptrain.target.families import read_target_config
from mtptrain.target.model import Target, check_placement, load_target
from mtptrain.utils.distributed import Ranks


class Validation:
    """Drafts greedily with the whole target; each rank takes its share of the prompts."""

    def __init__(self, config: PipelineConfig, target_dir: Path, ranks: Ranks) -> None:
        """Choose the prompts; the target is loaded when it is needed first.

        Raises:
            FileNotFoundError: stage 1 has not been run, or the target has no weights.
            ValueError: no prompt fits, or the target does not fit the ranks' devices.
        """
        self.dtype = getattr(torch, config.acceptance.dtype)
        check_placement(target_dir, self.dtype, ranks.device)
        prompts = held_out_prompts(
            held_out_documents(config.stage_dir("prompts"), HeldOut.choosing),
            config.train.validation_prompts,
            config.acceptance.prompt_tokens,
            config.train.validation_new_tokens,
            read_target_config(target_dir).max_position_embeddings,
        )
        self.prompts = list(prompts.values())[ranks.rank :: ranks.world_size]
        self.config = config
        self.target_dir = target_dir
        self.ranks = ranks
        self._target: Target | None = None

    def measure(self, head_state: dict[str, torch.Tensor]) -> Acceptance:
        """Acceptance of the head with these weights, over the prompts of all ranks."""
        if self._target is None:
            self._target = load_target(self.target_dir, self.dtype, self.ranks.device)
        head = build_head(self.config.head, self._target.config)
        head.load_state_dict(head_state)
        head.to(self.ranks.device, self.dtype).eval()
        num_speculative_tokens = self.config.acceptance.num_speculative_tokens
        generations = generate_in_batches(
            self._target,
            HeadDrafter(head, self._target.parts, num_speculative_tokens),
            self.prompts,
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=self.config.train.validation_new_tokens,
            sampler=Sampler(),
            eos_token_ids=eos_token_ids(self._target),
            batch_size=self.config.acceptance.batch_size,
            batch_tokens=self.config.acceptance.batch_tokens,
        )
        return summarise([generation for share in self.ranks.gather(generations) for generation in share])
