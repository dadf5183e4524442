"""Finds what the programs of one run share: its target, its prompts, and the identity of its hidden states."""

from functools import cached_property
from pathlib import Path

import torch

from mtptrain.config import Backend, Dtype, PipelineConfig
from mtptrain.data.identity import StoreIdentity, TargetIdentity, TokenizerIdentity, refuse_different_facts
from mtptrain.data.prompt_files import Documents, PromptsManifest, Split, require_prompts
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.target.files import TargetFiles, override_of
from mtptrain.target.hub import resolve_target
from mtptrain.target.loading import weights_bytes
from mtptrain.utils.distributed import become_ranks, cpu_ranks, is_alone_on_cpu
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
    def backend(self) -> Backend:
        """The engine that runs the target for its hidden states: see `choose_backend`."""
        return choose_backend(self.config.hidden_states.backend, self.target.config)

    def prompts_file(self, split: Split) -> Path:
        """Returns the file of a split, after comparing its bytes with the manifest."""
        if split not in self._prompts_files:
            self._prompts_files[split] = require_prompts(self.stage_dir("prompts"), split.filename)
        return self._prompts_files[split]

    def documents(self, split: Split) -> Documents:
        """Returns the documents of a split."""
        return Documents.load(self.prompts_file(split))

    def identity(self, capture_layers: tuple[int, ...]) -> StoreIdentity:
        """Returns the identity that the run's hidden states must have: target, settings and training prompts.

        Prompts that were not made with the target's tokenizer and chat template are refused.
        """
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
