"""Stage 5: write the head as a directory that a serving engine loads.

Reads `run_dir/train/best/` and, where it is there, `run_dir/acceptance/report.json`; writes `run_dir/export/<engine>/`: weights,
`config.json` and a README with the launch command.

    python -m mtptrain.export recipe=quickstart export.engine=vllm
"""

import json
import shutil
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from mtptrain.acceptance import held_out_prompts
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.drafters import HeadDrafter
from mtptrain.head_files import build_head, check_head_target, load_head
from mtptrain.heads.base import Head
from mtptrain.heads.mtp import MtpHead, from_vllm, mtp_dims, to_vllm, vllm_config
from mtptrain.identity import file_sha256
from mtptrain.prompt_files import Documents, Split
from mtptrain.run_dir import require, write_json, write_provenance
from mtptrain.speculate import Draft, Drafter, Sampler, Verified, speculate
from mtptrain.target import DEMO, Target, load_target, read_target_config, resolve_target
from mtptrain.tensor_files import save_tensors

METHOD_SWITCHING_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path that make vLLM choose another method by itself (vllm/config/speculative.py, 0.32)."""
PROOF_PROMPTS, PROOF_NEW_TOKENS, PROOF_DRAFTS = 8, 32, 3


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    output_dir = Path(config.export.output_dir or config.stage_dir("export") / config.export.engine)
    check_directory_name(output_dir)
    check_output_dir(output_dir)
    assert isinstance(config.head, MtpHead.Config)
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    check_not_quantised(target_config)
    check_head_target(config.stage_dir("train") / "best", target_dir)
    dtype = None if config.export.dtype is None else getattr(torch, config.export.dtype)
    head = load_head(config.stage_dir("train") / "best", config.head, target_config, dtype, torch.device("cpu"))

    # Beside the place where it goes, so that a directory under its own name is always whole and proven.
    temporary = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_vllm(temporary, head, config.head, target_config)
    check_vllm(temporary, config.head, target_config)
    proof = prove_equal_proposals(config, target_dir, head, reload_vllm(temporary, config.head, target_config))
    (temporary / "README.md").write_text(readme(config, target_dir, output_dir))
    write_provenance(temporary, config)
    shutil.rmtree(output_dir, ignore_errors=True)
    temporary.rename(output_dir)
    print_summary(output_dir, proof)


def check_directory_name(output_dir: Path) -> None:
    found = [name for name in METHOD_SWITCHING_NAMES if name in str(output_dir.resolve()).lower()]
    if found:
        raise ValueError(
            f"export.output_dir: the path must not contain {' or '.join(METHOD_SWITCHING_NAMES)}, by which vLLM chooses a method on its "
            f"own, but {output_dir.resolve()} contains {found[0]!r}; set export.output_dir"
        )


def check_output_dir(output_dir: Path) -> None:
    """An export replaces its directory whole, so it must be one that an export wrote."""
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / "provenance.json").is_file():
        raise ValueError(
            f"export.output_dir: must be new, empty or an earlier export, but {output_dir} holds other files; choose another directory"
        )


def check_not_quantised(target_config: PreTrainedConfig) -> None:
    """vLLM builds this head's layers with the target's quantisation, which bf16 weights do not fit."""
    method = getattr(target_config, "quantization_config", None)
    if method is not None:
        raise ValueError(
            f"target.path: the target of a vLLM export must not be quantised, but its config.json has quantization_config {method}, "
            "which vLLM would apply to the head too; export for the target in bf16"
        )


def write_vllm(directory: Path, head: Head, config: MtpHead.Config, target_config: PreTrainedConfig) -> None:
    tensors = to_vllm(head.state_dict())
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    directory.mkdir(parents=True)
    write_json(directory / "config.json", vllm_config(mtp_dims(config, target_config), target_config, dtype))
    save_tensors(directory / "model.safetensors", tensors)


def check_vllm(directory: Path, config: MtpHead.Config, target_config: PreTrainedConfig) -> None:
    """vLLM leaves a tensor that is missing from the file random without a word, so names and shapes are checked here.

    Raises:
        ValueError: a tensor is missing, unknown to the engine, or of another shape.
    """
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in to_vllm(MtpHead(config, target_config).state_dict()).items()}
    found = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{directory / 'model.safetensors'}: {name} must be {_shape(wanted.get(name))}, but is {_shape(found.get(name))}; vLLM "
                "would serve random weights: export again"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def reload_vllm(directory: Path, config: MtpHead.Config, target_config: PreTrainedConfig) -> Head:
    """The head as an engine reads it from the directory."""
    head = build_head(config, target_config)
    head.load_state_dict(from_vllm(load_file(directory / "model.safetensors"), mtp_dims(config, target_config)))
    return head.eval()


class RecordingDrafter:
    """A drafter whose proposals are kept."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.proposals: list[torch.Tensor] = []

    def start(self, batch_size: int, num_slots: int) -> None:
        self.drafter.start(batch_size, num_slots)

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        draft = self.drafter.draft(verified, sampler)
        self.proposals.append(draft.tokens)
        return draft


def prove_equal_proposals(config: PipelineConfig, target_dir: Path, head: Head, reloaded: Head) -> int:
    """Draft held-out prompts with both heads in fp32; returns the number of proposed tokens that were compared.

    Raises:
        RuntimeError: the exported head proposes something else.
    """
    target = load_target(target_dir, torch.float32, torch.device("cpu"))
    documents = Documents.load(require(config.stage_dir("prompts") / f"{Split.validation}.safetensors", "data_prep.prompts"))
    context_tokens = target.config.max_position_embeddings
    prompts = held_out_prompts(documents, PROOF_PROMPTS, config.acceptance.prompt_tokens, PROOF_NEW_TOKENS, context_tokens)
    ours, theirs = (propose(target, each, list(prompts.values())) for each in (head, reloaded))
    if len(ours) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise RuntimeError(
            "export: the exported head must propose what the trained one does, but differs on held-out prompts; nothing was written, "
            "report this with the run's config.yaml"
        )
    return sum(tokens.numel() for tokens in ours)


def propose(target: Target, head: Head, prompts: list[list[int]]) -> list[torch.Tensor]:
    """What a head proposes in every round of greedy decoding, [B, K] each."""
    drafter = RecordingDrafter(HeadDrafter(head.float(), target.parts, PROOF_DRAFTS))
    speculate(target, drafter, prompts, num_speculative_tokens=PROOF_DRAFTS, max_new_tokens=PROOF_NEW_TOKENS, sampler=Sampler())
    return drafter.proposals


def readme(config: PipelineConfig, target_dir: Path, output_dir: Path) -> str:
    """How to serve the directory, and what it was measured to be worth."""
    num_speculative_tokens = config.acceptance.num_speculative_tokens
    speculative = json.dumps(
        {"method": "eagle", "model": str(output_dir.resolve()), "num_speculative_tokens": num_speculative_tokens}
    )
    served = str(target_dir) if config.target.path == DEMO else config.target.path
    report_path = config.stage_dir("acceptance") / "report.json"
    measured = "Not measured: run `python -m eval.acceptance` and export again."
    report = json.loads(report_path.read_text()) if report_path.is_file() else {}
    if report.get("head_sha256") == file_sha256(config.stage_dir("train") / "best" / "head.safetensors"):
        rates = ", ".join(f"{rate:.3f}" for rate in report["acceptance_rate_at"])
        measured = (
            f"Acceptance length {report['acceptance_length']:.3f} (bonus token included), rate by position {rates}: K = "
            f"{report['num_speculative_tokens']}, temperature {report['temperature']:g}, {report['prompts']} prompts, {report['dtype']}."
        )
    return (
        f"# Draft head for `{config.target.path}`\n\nHead `{config.head.name}` as vLLM's `EagleDeepSeekMTPModel`; embeddings and lm_head "
        f"are the target's.\n\n    vllm serve {served} --speculative-config '{speculative}'\n\n{measured}\n"
    )


def print_summary(output_dir: Path, proof: int) -> None:
    table = Table(title="mtptrain.export", show_header=False)
    table.add_row("directory", str(output_dir))
    table.add_row("weights", f"{(output_dir / 'model.safetensors').stat().st_size:,} bytes")
    table.add_row("proposals equal after reloading", f"{proof:,} tokens")
    table.add_row("serve", "see README.md there")
    Console().print(table)


if __name__ == "__main__":
    main()
