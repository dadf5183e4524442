"""Export formats for vLLM 0.32.

Sources: deepseek_eagle.py, llama_eagle.py, llama_eagle3.py, medusa.py, qwen3_dflash.py, mimo.py, and *_mtp.py in
vllm/model_executor/models/.
"""

import json
import shlex
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtptrain.data.draft_vocab import membership
from mtptrain.engines.exports import LAYER_IDS
from mtptrain.engines.format import LAYER_PARTS, Format
from mtptrain.engines.limits import is_mimo
from mtptrain.engines.mimo import MimoLayer
from mtptrain.engines.target_files import add_target_files
from mtptrain.heads.base import Tensors
from mtptrain.heads.dflash import FULL, layer_types
from mtptrain.heads.dflash2 import published_settings
from mtptrain.heads.draft_model import model_config
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.heads.native_mtp_tensors import ModuleTensors
from mtptrain.settings.heads import (
    CausalLayers,
    Dflash2Config,
    DflashConfig,
    DraftModelConfig,
    DsparkConfig,
    Eagle3Config,
    HeadConfig,
    MedusaConfig,
    PeagleConfig,
    mask_token_id,
)
from mtptrain.target.families import has_window_in_all_layers, sliding_window
from mtptrain.target.form import build_on_meta
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.mimo import ARCHITECTURE, MTP_LAYERS
from mtptrain.utils.files import read_json, save_tensors, write_json

TOKENIZER_PATTERNS = ("*token*.json", "vocab.json", "merges.txt", "*.model", "*.jinja", "generation_config.json")
EAGLE_NAMES = {part: f"layers.0.{part}" for part in LAYER_PARTS}
EAGLE3_NAMES = {part: f"midlayer.{part}" for part in ("hidden_norm.weight", *LAYER_PARTS)}
MTP_NAMES = EAGLE_NAMES | {"eh_proj.weight": "fc.weight"}
V2_RUNNER = (
    "vLLM 0.32 serves {name} with its V2 runner alone, which needs a GPU. mtptrain's counters for such heads have been "
    "compared with llama.cpp's and with those of vLLM's classes in its V1 runner, not with those of the V2 runner."
)
"""The note on heads that vLLM does not serve on a CPU."""


class VllmFormat(Format):
    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        facts = {"method": self.method, "speculative_settings": self.speculative_settings}
        settings = speculative_config(facts | {"holds_target": self.holds_target}, directory, num_speculative_tokens)
        served = str(directory) if self.holds_target else target
        return shlex.join(["vllm", "serve", served, "--speculative-config", json.dumps(settings)])

    def notes(self) -> list[str]:
        window = sliding_window(self.target) if has_window_in_all_layers(self.target) else None
        if window is None or window >= self.target.max_position_embeddings or not self.has_full_layers():
            return []
        return [
            f"vLLM gives the head the target's sliding window of {window} tokens too (`CacheConfig.sliding_window`); "
            "its full layers were trained and measured without one. Drafts for texts of at most that length are not "
            "affected.",
        ]

    def has_full_layers(self) -> bool:
        """Returns whether a layer of the head has no window of its own."""
        return True


class VllmMtp(VllmFormat):
    """Exports `mtp` for vLLM's `EagleDeepSeekMTPModel` (deepseek_eagle.py), with its experts and latent attention off.

    Embeddings and lm_head are left out, so that vLLM shares the target's. Query, key and value projections are
    concatenated.
    """

    architecture = "EagleDeepSeekMTPModel"
    method = "eagle"
    names = MTP_NAMES
    _QKV = "layers.0.self_attn.qkv_proj.weight"
    _QKV_PARTS = tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")

    @classmethod
    def for_target(cls, head: HeadConfig, target: PreTrainedConfig) -> Format:
        return VllmMimo(head, target) if is_mimo(target) else cls(head, target)

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        tensors[self._QKV] = torch.cat([tensors.pop(name) for name in self._QKV_PARTS])
        return tensors

    def state(self, tensors: Tensors) -> Tensors:
        parts = dict(tensors)
        sizes = [
            heads * self.dims.head_dim
            for heads in (self.dims.num_attention_heads, *[self.dims.num_key_value_heads] * 2)
        ]
        joined = parts.pop(self._QKV)
        return super().state(parts | dict(zip(self._QKV_PARTS, joined.split(sizes), strict=True)))

    def config_json(self, dtype: str) -> dict[str, Any]:
        return super().config_json(dtype) | {
            # By default, DeepSeek's class has experts (from layer first_k_dense_replace on) and latent attention.
            "n_routed_experts": 0,
            "first_k_dense_replace": 100_000,
            "moe_layer_freq": 1,
            "n_group": 1,
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
        }


class VllmEagle(VllmFormat):
    """Exports `eagle`, which shares the target's embeddings and lm_head."""

    architecture = "EagleLlamaForCausalLM"
    method = "eagle"
    names = EAGLE_NAMES


class VllmEagle3(VllmFormat):
    """Exports `eagle3` under the tensor names of published EAGLE-3 heads.

    vLLM refuses d2t and t2d unless the draft vocabulary is smaller than the target's.
    """

    architecture = "LlamaForCausalLMEagle3"
    method = "eagle3"
    names = EAGLE3_NAMES
    added = ("t2d",)
    head: Eagle3Config

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        if "d2t" in tensors:
            tensors["t2d"] = membership(tensors["d2t"], self.target.vocab_size)
        return tensors

    def config_json(self, dtype: str) -> dict[str, Any]:
        num_layers = self.target.num_hidden_layers
        is_default = self.layers == (2, num_layers // 2, num_layers - 3)
        return super().config_json(dtype) | {
            "draft_vocab_size": self.head.draft_vocab_size,  # null: the target's vocabulary and lm_head
            "num_aux_hidden_states": len(self.layers),
            "norm_before_fc": self.head.norm_before_fc,
            "fc_norm": self.head.fc_norm,
            "norm_output": self.head.norm_output,
            "norm_before_residual": self.head.norm_before_residual,
            # Engines number layers differently but agree on the default layers, so these are left out.
            **({} if is_default else self.layer_ids(self.layers)),
        }

    def layer_ids(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """Returns the keys for the layer ids, which are the same as ours: id k is the stream after k decoder layers.

        vLLM reads them at the top level or in `eagle_config`. The converter of llama.cpp, whose ids are also the same,
        reads the top level only and otherwise takes the default layers without an error.
        """
        return {LAYER_IDS: list(layers), "eagle_config": {LAYER_IDS: list(layers)}}


class VllmPeagle(VllmEagle3):
    """Exports `peagle`: an EAGLE-3 head, the state of its mask tokens, and the id of the mask token.

    vLLM takes the mask token's embedding from the target and applies fc to `mask_hidden` itself.
    """

    speculative_settings = {"parallel_drafting": True}  # noqa: RUF012 (never changed)
    head: PeagleConfig

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        return tensors | {"mask_hidden": tensors["mask_hidden"].flatten()[None]}

    def state(self, tensors: Tensors) -> Tensors:
        state = super().state(tensors)
        return state | {"mask_hidden": state["mask_hidden"].view(-1, self.dims.hidden_size)}

    def config_json(self, dtype: str) -> dict[str, Any]:
        return super().config_json(dtype) | {
            "mask_token_id": mask_token_id(self.head.mask_token_id, self.target.vocab_size)
        }


class VllmMedusa(VllmFormat):
    """Exports `medusa` under vLLM's tensor names, with a copy of the target's lm_head, which vLLM does not share.

    Besides num_heads and num_hidden_layers, no key of config.json may contain "num" together with "heads" or "layers",
    because vLLM would take it for one of the two.
    """

    architecture = "MedusaModel"
    method = "medusa"
    lm_head_name = "lm_head.safetensors"
    head: MedusaConfig

    def config_json(self, dtype: str) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "num_heads": self.head.ttt_steps,
            "num_hidden_layers": self.head.num_layers,
            "medusa_fc_bias": self.head.fc_bias,
            "original_lm_head": True,  # one lm_head for all depths
            "dtype": dtype,
        }

    def add_target(self, directory: Path, target_dir: Path) -> None:
        lm_head = load_frozen_parts(target_dir).lm_head
        save_tensors(directory / self.lm_head_name, {"lm_head.weight": lm_head})

    def notes(self) -> list[str]:
        return [
            "vLLM 0.33 and later have no Medusa: they cannot serve this head.",
            f"num_speculative_tokens may be at most {self.head.ttt_steps}, the number of trained depths. vLLM keeps it "
            "fixed for this method: leave num_speculative_tokens_per_batch_size unset.",
        ]


class VllmDflash(VllmFormat):
    """Exports `dflash` under our tensor names, which published heads also use.

    vLLM takes all embeddings from the target, including the mask token's, and lm_head too unless the head has one.
    """

    architecture = "DFlashDraftModel"
    method = "dflash"
    head: DflashConfig

    def config_json(self, dtype: str) -> dict[str, Any]:
        return super().config_json(dtype) | {
            "model_type": "qwen3",
            "num_hidden_layers": self.head.num_layers,
            "num_target_layers": self.target.num_hidden_layers,
            "layer_types": layer_types(self.head),
            # Without this key, vLLM makes sliding layers causal and others not.
            **({} if self.head.causal == CausalLayers.sliding else {"is_causal": self.head.causal == CausalLayers.all}),
            # llama.cpp's converter reads the window only with `use_sliding_window`.
            "use_sliding_window": self.head.sliding_window is not None,
            "sliding_window": self.head.sliding_window,
            "attention_bias": False,
            "block_size": self.head.ttt_steps + 1,
            "draft_vocab_size": self.head.draft_vocab_size,  # null: the target's vocabulary and lm_head
            "dflash_config": {
                "mask_token_id": mask_token_id(self.head.mask_token_id, self.target.vocab_size),
                # Here engines number layer outputs from 0: id k is the stream after k + 1 decoder layers.
                "target_layer_ids": [layer - 1 for layer in self.layers],
            },
        }

    def has_full_layers(self) -> bool:
        return FULL in layer_types(self.head)

    def notes(self) -> list[str]:
        notes = super().notes()
        if len(set(layer_types(self.head))) > 1:
            notes.append("vLLM serves sliding and full layers in one head with its V2 runner alone, which needs a GPU.")
        if self.head.num_layers > 1:
            notes.append(
                "On a CPU, vLLM 0.32 normalises the keys computed from captured states with the first layer's k_norm "
                "in every layer, so its counters differ from mtptrain's. GPUs are not affected."
            )
        return notes


class VllmDspark(VllmDflash):
    """Exports `dspark`, whose keys both vLLM and SGLang read at the top level.

    Engines leave tensors that a file lacks as they are, with random values: the export has all of them.
    """

    architecture = "Qwen3DSparkModel"
    method = "dspark"
    head: DsparkConfig

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = super().config_json(dtype)
        return config | {
            # K with and without `sample_from_anchor`; `dflash` has K + 1.
            "block_size": self.head.ttt_steps,
            "sample_from_anchor": self.head.sample_from_anchor,
            "markov_rank": self.head.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            **config["dflash_config"],
        }

    def notes(self) -> list[str]:
        return [*VllmFormat.notes(self), V2_RUNNER.format(name="DSpark")]


class VllmDflash2(VllmDflash):
    """Exports `dflash2`. Both vLLM and SGLang read its settings in `dflash_config`."""

    architecture = "DFlash2DraftModel"
    head: Dflash2Config

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = super().config_json(dtype)
        more = published_settings(self.head) | {"block_size": config["block_size"]}
        return config | {"dflash_config": config["dflash_config"] | more}

    def notes(self) -> list[str]:
        return [*VllmFormat.notes(self), V2_RUNNER.format(name="DFlash 2")]


class VllmDraftModel(VllmFormat):
    """Exports `draft_model` as a standard transformers checkpoint with the target's tokenizer."""

    method = "draft_model"
    head: DraftModelConfig

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.model_config = model_config(self.head, target)
        self.architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_config.model_type])

    @cached_property
    def _empty(self) -> PreTrainedModel:
        return build_on_meta(self.model_config)

    def tensors(self, state: Tensors) -> Tensors:
        """Returns tensors by the names of published checkpoints, whose experts transformers 5 joins."""
        return dict(revert_weight_conversion(self._empty, dict(state)))

    def state(self, tensors: Tensors) -> Tensors:
        names = self._empty.state_dict().keys()
        if tensors.keys() <= names:
            return tensors
        dtype = next(iter(tensors.values())).dtype
        model = type(self._empty).from_pretrained(None, config=self.model_config, state_dict=dict(tensors), dtype=dtype)
        return {name: tensor for name, tensor in model.state_dict().items() if name in names}

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = self.model_config.to_dict() | {"architectures": [self.architecture], "dtype": dtype}
        return {name: value for name, value in config.items() if name != "_name_or_path"}  # omits a local path

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's tokenizer, so that the directory can be used alone."""
        for pattern in TOKENIZER_PATTERNS:
            for path in target_dir.glob(pattern):
                shutil.copyfile(path, directory / path.name)

    def notes(self) -> list[str]:
        ours, theirs = self.model_config.max_position_embeddings, self.target.max_position_embeddings
        notes = [
            *(super().notes() if sliding_window(self.model_config) is None else []),
            "vLLM runs the draft model with the target's tensor parallel size, and stores the draft model's keys and "
            "values in addition to the target's.",
        ]
        if ours < theirs:
            notes.append(f"vLLM stops drafting for texts of more than {ours} tokens, the draft model's context.")
        return notes


class WholeCheckpoint(VllmFormat):
    """A target's checkpoint for vLLM, in which a head takes the place of the checkpoint's own MTP layer."""

    method = "mtp"
    weights_name = "mtp.safetensors"
    holds_target = True

    def notes(self) -> list[str]:
        return [
            "This directory is the whole checkpoint. The target's weights here are hard links to the target's files, "
            "or copies where links are not possible; a file that had tensors of the MTP layer is written again without "
            "them."
        ]


class VllmMimo(WholeCheckpoint, MimoLayer):
    """Replaces a MiMo checkpoint's own MTP layer with `mtp`.

    The directory is a whole checkpoint. Its `config.json` has Qwen2's model type, so that engines need no code from the
    checkpoint: MiMo's config differs from Qwen2's only by name. The model class is still MiMo's.
    """

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = self.target.to_dict() | {"architectures": [ARCHITECTURE], **self.model_entries}
        return {name: value for name, value in config.items() if name not in ("_name_or_path", "auto_map")}

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's tokenizer, its weights except those of its own MTP layer, and the index of all tensors."""
        add_target_files(directory, target_dir, self.weights_name, lambda name: name.startswith(MTP_LAYERS))

    def notes(self) -> list[str]:
        return [
            *super().notes(),
            "Serve this with vLLM. Its MiMo class passes the states before the target's final norm to the MTP layer, "
            "and the head was trained and measured with these. SGLang's class passes the states after the norm.",
        ]


class VllmNativeMtp(WholeCheckpoint):
    """Replaces a checkpoint's own MTP module with `native_mtp`."""

    @cached_property
    def module(self) -> ModuleTensors:
        return ModuleTensors(self.target)

    @property
    def architecture(self) -> str:  # type: ignore[override]
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.target.model_type])

    def tensors(self, state: Tensors) -> Tensors:
        return self.module.stored(state)

    def state(self, tensors: Tensors) -> Tensors:
        return self.module.state(tensors)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """Returns nothing: `add_target` writes the target's own config.json."""
        return {}

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's config, tokenizer and weights, except those of its own module, and the index of all."""
        config = read_json(target_dir / "config.json")
        declaring, count = config.get("text_config", config), NATIVE_MTP[self.target.model_type].count
        declaring[count] = declaring.get(count) or 1
        write_json(directory / "config.json", config)
        add_target_files(directory, target_dir, self.weights_name, self.module.is_of_module)


def speculative_config(facts: dict[str, Any], head_dir: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """Returns `--speculative-config` for an export, without `model` if it also holds the target."""
    return {
        "method": facts["method"],
        **({} if facts["holds_target"] else {"model": str(head_dir)}),
        "num_speculative_tokens": num_speculative_tokens,
        **facts["speculative_settings"],
    }
