"""Export formats for Apple's MLX: mlx-lm 0.32.2 reads `draft_model`, mlx-vlm 0.7.10 heads that read captured layers.

Sources: mlx_lm/generate.py; mlx_vlm/speculative/ and mlx_vlm/speculative/drafters/{eagle3,qwen3_dflash}/.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtptrain.engines.exports import LAYER_IDS
from mtptrain.engines.format import LAYER_PARTS, Format
from mtptrain.engines.vllm.formats import VllmDflash, VllmDraftModel, VllmEagle3
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.utils.files import save_tensors

PROGRAM = """\
python - {target} {directory} <<'END'
import sys
from mlx_vlm import load, stream_generate
from mlx_vlm.speculative.drafters import load_drafter
model, processor = load(sys.argv[1])
draft, kind = load_drafter(sys.argv[2])
settings = {{"draft_model": draft, "draft_kind": kind, "draft_block_size": {block_size}, "prefill_step_size": None}}
for step in stream_generate(model, processor, "def main", max_tokens=64, **settings):
    print(step.text, end="", flush=True)
END"""
NOT_MEASURED = (
    "In float32 on a CPU, MLX accepts exactly the drafts that mtptrain does. Its speed, half precision and quantised "
    "weights on Apple silicon were not measured."
)


def keys_for_mlx_lm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of config.json from which mlx-lm's classes take what transformers 5 writes in others.

    Most ignore rope_parameters. Those by kinds of layers are left to the classes that read them.
    """
    rope = config.get("rope_parameters") or {}
    keys = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if config.get("model_type") == "qwen3_moe":
        keys["num_experts"] = config.get("num_experts", config.get("num_local_experts"))
        keys["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scaling = {name: value for name, value in rope.items() if name not in keys}
    return keys | ({"rope_scaling": scaling} if scaling.get("rope_type", "default") != "default" else {})


class MlxDraftModel(VllmDraftModel):
    """Exports `draft_model` as a standard transformers checkpoint with the target's tokenizer."""

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = super().config_json(dtype)
        return config | keys_for_mlx_lm(config)

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        drafts = ["--draft-model", str(directory), "--num-draft-tokens", str(num_speculative_tokens)]
        return shlex.join(["mlx_lm.server", "--model", target, *drafts, "--prompt-cache-size", "0"])

    def notes(self) -> list[str]:
        return [
            "mlx-lm decodes greedily unless a request says otherwise, and reads of `generation_config.json` the ends "
            "alone. Its first round drafts the first token of an answer too.",
            "Above temperature 0, mlx-lm samples the drafts, and accepts one if the target samples the same token. It "
            "accepts fewer than `mtptrain acceptance` measures.",
            "`--prompt-cache-size 0` is needed: with drafts, mlx-lm 0.32.2 keeps caches of earlier requests that lack "
            "a token, and answers a request that begins as one of them otherwise than without drafts, unsaid.",
            NOT_MEASURED,
        ]


class MlxHead(Format):
    """The format of a head for mlx-vlm, which counts the newest token in a block of drafts."""

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        """Returns a program, because `mlx_vlm.server` hides the prompt from some heads."""
        paths = {"target": shlex.quote(target), "directory": shlex.quote(str(directory))}
        return PROGRAM.format(**paths, block_size=num_speculative_tokens + 1)

    def notes(self) -> list[str]:
        return [
            "mlx-vlm applies `do_sample`, `temperature`, `top_p`, `top_k` and the ends of `generation_config.json`.",
            NOT_MEASURED,
        ]


class MlxEagle3(MlxHead, VllmEagle3):
    """Exports `eagle3` in the layout of vLLM Speculators, with copies of the target's embeddings and lm_head.

    A layer id k is the stream after k decoder layers, as ours.
    """

    architecture = "Eagle3Speculator"
    names = {part: f"layers.0.{part}" for part in ("hidden_norm.weight", *LAYER_PARTS)}  # noqa: RUF012

    def config_json(self, dtype: str) -> dict[str, Any]:
        return {
            "model_type": "eagle3",
            "speculators_model_type": "eagle3",
            "architectures": [self.architecture],
            "transformer_layer_config": self.llama_config(dtype) | {"architectures": None},
            "draft_vocab_size": self.head.draft_vocab_size or self.target.vocab_size,
            "norm_before_fc": self.head.norm_before_fc,
            "norm_before_residual": self.head.norm_before_residual,
            LAYER_IDS: list(self.layers),
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add what mlx-vlm does not load a head without, though it drafts with the target's own embeddings."""
        parts = load_frozen_parts(target_dir)
        copies = {"embed_tokens.weight": parts.embed_tokens}
        if self.head.draft_vocab_size is None:  # a file cannot hold one tensor under two names
            copies["lm_head.weight"] = parts.lm_head.clone()
        save_tensors(directory / "model-target.safetensors", copies)

    def notes(self) -> list[str]:
        return [
            "Without `draft_block_size` (K + 1), mlx-vlm drafts one token in each round.",
            "Set `prefill_step_size=None`: otherwise mlx-vlm 0.7.10 reads a prompt in chunks, gives the head its last "
            "token alone, and accepts fewer drafts without saying so (117 instead of 132 with a tiny head). "
            "`mlx_vlm.server` and `mlx_vlm.generate` have no option for that.",
            *super().notes(),
        ]


class MlxDflash(MlxHead, VllmDflash):
    """Exports `dflash`, as for vLLM."""

    def notes(self) -> list[str]:
        notes = [
            "With more than 3 drafts, mlx-vlm shortens blocks after rounds that accept little (to 3 drafts at least), "
            "and then accepts fewer tokens in a round than mtptrain measured.",
        ]
        return notes * (self.head.ttt_steps > 3) + super().notes()
