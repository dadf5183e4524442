"""Finds what the programs of one run share: its target, its prompts, and the identity of its hidden states."""

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mtptrain.config import AnsweringEngine, Backend, Dtype, PipelineConfig
from mtptrain.data.identity import StoreIdentity, TargetIdentity, TokenizerIdentity, refuse_different_facts
from mtptrain.data.prompt_files import Documents, PromptsManifest, Split, require_prompts, unused_token
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.settings.heads import DflashConfig, HeadConfig, PeagleConfig, mask_token_id
from mtptrain.target.files import TargetFiles, override_of
from mtptrain.target.hub import resolve_target
from mtptrain.target.loading import weights_bytes
from mtptrain.utils.distributed import become_ranks, cpu_ranks, is_alone_on_cpu
from mtptrain.utils.errors import warn
from mtptrain.utils.files import file_sha256


class Run:
    """One `run_dir` and the settings of its programs. Nothing is read before it is asked for."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self._prompts_files: dict[Split, Path] = {}  # those that were checked

    def stage_dir(self, stage: str) -> Path:
        return self.config.stage_dir(stage)

    @cached_property
    def target(self) -> TargetFiles:
        """The target of `target.path`, after downloading or dequantising it if necessary: see `resolve_target`."""
        target, template_kwargs = self.config.target, self.config.prompts.template_kwargs
        directory = resolve_target(target.path, target.revision)
        return TargetFiles(directory, target.path, target.revision, target.gguf, template_kwargs)

    @cached_property
    def head(self) -> HeadConfig:
        """The settings of the head. A mask token that they leave out is one that no prompt has, or that of the head of
        another run to start from."""
        head, directory = self.config.head, self.stage_dir("prompts")
        if not isinstance(head, PeagleConfig | DflashConfig) or head.mask_token_id is not None:
            return head
        if head.init_from is None:
            chosen = PromptsManifest.read(directory).unused_token if (directory / "manifest.json").is_file() else None
        else:
            from mtptrain.heads.files import stored_config  # loads every head

            has_own = (Path(head.init_from) / "head.json").is_file()
            chosen = getattr(stored_config(Path(head.init_from)) if has_own else None, "mask_token_id", None)
        return replace(head, mask_token_id=chosen)

    def announce_mask_token(self) -> None:
        """Say which mask token is taken instead of the vocabulary's last token, or warn if prompts have the mask token.

        A head cannot tell a mask from the same token in a text.
        """
        given, head = self.config.head, self.head
        if not isinstance(head, PeagleConfig | DflashConfig):
            return
        documents, size = [self.documents(split) for split in Split], int(self.target.config.vocab_size)
        mask = mask_token_id(head.mask_token_id, size)
        looked_up = size - 1 if head != given and given.init_from is None else mask
        found = np.concatenate([each.loss_mask[each.input_ids == looked_up] for each in documents])
        occurs = (
            f"{looked_up} ({self.target.tokenizer.decode([looked_up])!r}), which occurs {len(found):,} times in the "
            f"{sum(map(len, documents)):,} documents of the prompts, {found.sum():,} of them supervised"
        )
        if mask != looked_up:
            print(f"head.mask_token_id: {mask} is taken, which does not occur, instead of {occurs}")
        elif len(found):
            advice = f"set head.mask_token_id={unused_token(documents, size)}, which does not occur"
            if given.init_from is not None:
                advice = "the head to start from keeps it, and may draft worse around it; choose another head or data"
            warn(f"head.mask_token_id: must not occur in prompts, but is {occurs}; {advice}")

    @cached_property
    def backend(self) -> Backend:
        """The engine that runs the target for its hidden states: see `choose_backend`."""
        return choose_backend(self.config.hidden_states.backend, self.target.config)

    @cached_property
    def answering(self) -> tuple[str, str]:
        """The engine that generates responses unless a `url` does, and why `auto` did not choose one before it."""
        from mtptrain.engines.table import choose_answering  # loads engines

        settings = self.config.responses
        if settings.engine is not AnsweringEngine.auto:
            return str(settings.engine), ""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return str(AnsweringEngine.transformers), "torchrun has started ranks for it"
        return choose_answering(
            self.target, self.target.generation.sampled_with(settings.sampling), self.config.serving
        )

    def prompts_file(self, split: Split) -> Path:
        """Returns the file of a split, after comparing its bytes with the manifest."""
        if split not in self._prompts_files:
            self._prompts_files[split] = require_prompts(self.stage_dir("prompts"), split.filename)
        return self._prompts_files[split]

    def documents(self, split: Split) -> Documents:
        """Returns the documents of a split."""
        return Documents.load(self.prompts_file(split))

    def identity(self, capture_layers: tuple[int, ...]) -> StoreIdentity:
        """Returns the identity that the run's hidden states must have; refuses prompts of another tokenizer."""
        prompts_file, settings = self.prompts_file(Split.train), self.config.hidden_states
        stored = PromptsManifest.read(prompts_file.parent).tokenizer
        expected = TokenizerIdentity.of(self.target.tokenizer, self.target.template_kwargs_json)
        mode = override_of(expected.template_kwargs)
        remedy = f"run mtptrain prompts again with target {self.target.path} and {mode}"
        refuse_different_facts(prompts_file.parent / "manifest.json", vars(expected), vars(stored), remedy)
        return StoreIdentity(
            TargetIdentity.of(self.target),
            capture_layers,
            compute_dtype=str(settings.dtype),
            prompts_sha256=file_sha256(prompts_file),
            dtype=str(settings.store_dtype),
            backend=str(self.backend),
        )

    @property
    def served_head_dir(self) -> Path:
        """The export that an engine serves: `serving.head_dir`, or where this run's export goes."""
        serving, export = self.config.serving, self.config.export
        chosen = export.output_dir if export.engine.value == serving.engine.value else None
        return Path(serving.head_dir or chosen or self.stage_dir("export") / serving.engine)


def become_cpu_ranks(run: Run, dtype: Dtype, divides: int | None = None) -> None:
    """On a CPU, go on as one rank per core, as far as memory allows and `cpu_ranks` does not say otherwise.

    Every rank may hold a copy of the target in this dtype. The number of ranks divides `divides`. Call this before
    anything else that takes long; see `become_ranks`.
    """
    if not is_alone_on_cpu():
        return
    most = cpu_ranks(run.config.cpu_ranks, weights_bytes(run.target.directory, getattr(torch, dtype)))
    become_ranks(most if divides is None else max(n for n in range(1, most + 1) if divides % n == 0))
