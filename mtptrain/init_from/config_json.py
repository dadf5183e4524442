"""Reads the config.json of a published head by a whitelist.

A key is known if a reader asks for it, or if it is in `DESCRIPTIONS`. All others are refused in one message, because
they may change how the head drafts, unless `head.ignored_keys` names them. Keys of `SECTIONS` are written with a dot. A
key whose value is null counts as absent. What a file says twice it must say alike: engines differ in which they read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from transformers import LlamaConfig, PreTrainedConfig

from mtptrain.heads.dflash import SLIDING
from mtptrain.target.families import ROPE_OF_THE_TARGET, STATIC_ROPE_TYPES, head_rope_parameters, norm_eps
from mtptrain.target.hub import MODEL_OPT_QUANTISATION
from mtptrain.utils.errors import UserError, refusing, warn
from mtptrain.utils.files import read_json

LAYERS, ROPE = "transformer_layer_config", "rope."
SECTIONS = {
    **dict.fromkeys(("dflash_config", "dspark_config", "eagle_config", LAYERS), ""),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ROPE),
}
"""Keys that hold further keys, and what stands before these here: projects have some of them at the top level too."""
SPECULATORS = "speculators_model_type"
"""The key that marks the layout of vLLM Speculators."""
SYNONYMS = {
    **dict.fromkeys(("query_zero_predicts_next", "shift_label"), "sample_from_anchor"),
    "causal": "is_causal",
    **dict.fromkeys(("pard_token", "ptd_token_id", "dspark_noise_token_id"), "mask_token_id"),
    **{f"dspark_{name}": name for name in ("block_size", "target_layer_ids", "markov_rank")},
    **dict.fromkeys(("use_confidence_head", "dspark_confidence_head"), "enable_confidence_head"),
    "use_aux_norm": "fc_norm",
    "return_hidden_post_norm": "norm_output",
    "speculators_config.algorithm": SPECULATORS,
    f"{ROPE}type": f"{ROPE}rope_type",
}
"""Names that projects and engines have for a setting, with the one under which it is read here."""
KINDS = ("eagle3", "peagle", "dflash", "dspark", "dflash2")
"""The kinds of heads in that layout, which stand for the classes of engines."""
CAPTURED, NON_CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"
DESCRIPTIONS = (
    *("architectures", "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tie_word_embeddings", "use_cache"),
    *("initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "return_dict", "problem_type"),
    *("is_encoder_decoder", "is_decoder", "output_attentions", "output_hidden_states", "id2label", "label2id"),
    *("chunk_size_feed_forward", "_attn_implementation", "attn_implementation", "base_model_name_or_path"),
    *("gradient_checkpointing", "_attn_implementation_autoset", "unsloth_version", "_torchspec_version"),
    "max_position_embeddings",  # the head uses the target's positions
    "max_window_layers",  # counts only for windows without layer_types, which are refused
    *("has_no_defaults_at_init", "speculators_version", "speculators_config"),
    *("num_anchors", "max_anchors", "confidence_head_alpha"),  # the number of blocks per document, and of a loss
    "embed_requires_grad",  # the embeddings in the file tell
    "parallel_draft_heads_num_layers",  # not used without parallel drafts
)
"""Keys that do not change how a head drafts, or that the class or the tensors of the head make redundant."""
PLAIN_ARITHMETIC = {
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "use_mrope": False,
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), True),  # RoPE rotates halves, not interleaved pairs
    **dict.fromkeys(("rope_interleave", "rope_interleaved", f"{ROPE}interleaved"), False),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", f"{ROPE}partial_rotary_factor"), 1.0),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias"), False),
}
"""The arithmetic of our heads, by the keys with which others may have another one."""
SHOWN_CHARACTERS = 80
"""Maximum number of characters that an error quotes from a value."""


def shown(value: object) -> str:
    """Returns a value of config.json as it is written there, but not more than its beginning."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def is_same(value: object, other: object) -> bool:
    """Returns whether two values of a JSON file are equal. In Python, true is also 1."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


class ConfigJson:
    """The settings in the config.json of a published head."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        """Take the content of the file `path`."""
        self.path = path
        self.values: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        """The name in the file of each value."""
        for key, value in sorted(content.items(), key=lambda item: item[0] in SECTIONS):
            self.add(key, value)
        self.known = {*DESCRIPTIONS, SPECULATORS}
        self.is_of_model = False
        """Whether the file is that of a whole model, of which the head is a part."""
        named = self.values.get("architectures") or "LlamaForCausalLM"  # heads of EAGLE's authors have a Llama's class
        self.architecture = str(named[0] if isinstance(named, list) else named)

    def add(self, label: str, value: Any, follows_from: str = "") -> None:
        """Take a value, and each one in a section. It must not contradict another value of the same meaning.

        `follows_from` is the key from which a value follows that the file does not have.
        """
        section, _, key = label.rpartition(".")
        name = SECTIONS[section] + key if section in SECTIONS else label
        name = SYNONYMS.get(name, name)
        if name == "dspark_bonus_anchor" and isinstance(value, bool):  # vLLM's
            name, value, label, follows_from = "sample_from_anchor", not value, "sample_from_anchor", label
        label = f"{label} according to {follows_from}" if follows_from else label
        if value is None or (name in DESCRIPTIONS and name in self.values):
            return
        if name in SECTIONS:
            if not isinstance(value, dict):
                raise UserError(
                    f"{self.path}: {label} must be a section of settings, but is {shown(value)}; choose another head"
                )
            for part, each in value.items():
                self.add(f"{name}.{part}", each)
            return
        other = self.labels.setdefault(name, label)
        if not is_same(present := self.values.setdefault(name, value), value):
            raise UserError(
                f"{self.path}: {label} must be the same as {other}, {shown(present)}, but is {shown(value)}; correct "
                "a copy of the file so that both say how the head was trained, or choose another head"
            )

    def take(self, key: str) -> Any:
        """Returns the value of a key, or None if the file has it under none of its names."""
        self.known.add(key)
        return self.values.get(key)

    def flag(self, key: str) -> bool | None:
        value = self.take(key)
        return value if isinstance(value, bool | None) else self.refuse(key, "true or false")

    def whole(self, key: str, least: int = 1, default: int | None = None) -> int:
        """Returns a whole number, which the file must have unless there is a default."""
        value = default if (found := self.take(key)) is None else found
        return value if type(value) is int and value >= least else self.refuse(key, f"a whole number from {least} on")

    def layer_ids(self, key: str, default: list[int] | None = None) -> list[int]:
        """Returns a list of layers, which the file must have unless there is a default. SGLang's -1: the embeddings."""
        value = default if (found := self.take(key)) is None else found
        if isinstance(value, list) and all(type(layer) is int and layer >= -1 for layer in value):
            return value
        self.refuse(key, "a list of layer ids")

    def must_be(self, wanted: Mapping[str, object], why: str = "as in our heads") -> None:
        """Refuse keys that are there with another value than the wanted one."""
        for key, value in wanted.items():
            if (found := self.take(key)) is not None and not is_same(found, value):
                self.refuse(key, f"{shown(value)} {why}")

    def describes(self, *keys: str) -> None:
        """Pass over keys that do not change how the head drafts."""
        self.known.update(keys)

    def has_rope(self) -> None:
        """Pass over the keys of RoPE and of the norms' eps, which `rope_of_head` reads as a whole."""
        self.describes("rope_theta", "original_max_position_embeddings", "rms_norm_eps")
        left_out = {f"{ROPE}{name}" for name in ROPE_OF_THE_TARGET}
        self.describes(*(key for key in self.values if key.startswith(ROPE) and key not in left_out))

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Refuse the value of a key, or that the file has none."""
        if key not in self.values:
            raise UserError(f"{self.path}: must have {key}, but does not; download the head again")
        raise UserError(
            f"{self.path}: {self.labels[key]} must be {wanted}, but is {shown(self.values[key])}; choose another head"
        )

    def refuse_unknown(self, ignored: Sequence[str]) -> None:
        """Refuse keys that are neither read nor ignored, and quantised weights by ModelOpt's file beside this."""
        unknown = {self.labels[key]: self.values[key] for key in self.values if key not in self.known}
        if left := [label for label in unknown if label not in ignored]:
            found = ", ".join(f"{label}={shown(unknown[label])}" for label in left)
            raise UserError(
                f"{self.path}: must hold only settings that mtptrain understands, because others may change what the "
                f"head drafts, but has {found}; find out in the code that trained the head what they do: if it depends "
                "on one of them what is drafted, or where, choose another head, otherwise set "
                f"'head.ignored_keys=[{','.join([*ignored, *left])}]'"
            )
        path = self.path.with_name(MODEL_OPT_QUANTISATION)
        named = read_json(path, "copy or download it again").get("quantization") if path.is_file() else None
        if any(named.values()) if isinstance(named, dict) else named is not None:
            raise UserError(
                f"{path}: must name no quantisation, because our heads are not quantised, but has {shown(named)}; "
                "choose another head"
            )


def read_config(path: Path) -> ConfigJson:
    """Returns the settings of a head, with the keys of engines' classes also for the layout of vLLM Speculators.

    Speculators counts captured layers as we do, and says with a key of its own whether layers that slide are causal;
    full layers never are. vLLM 0.32 takes that key for all layers of `dflash`; here it means what it meant in training.
    Windows are those of engines, which move on with each token of a block, while Speculators trains all tokens of a
    block with the window of the first. Sources: Speculators 0.9, and vLLM's `configs/speculators/algos.py`.
    """
    stored = read_json(path, "copy or download it again")
    kind, layers = stored.get(SPECULATORS), stored.get(LAYERS)
    if kind is None and layers is None:
        return ConfigJson(path, stored)
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(layers, dict):
        wanted = f"{SPECULATORS} must be one of {', '.join(KINDS)}, and {LAYERS} must hold settings"
        raise UserError(f"{path}: {wanted}, but they are {shown(kind)} and {shown(layers)}; choose another head")
    config = ConfigJson(path, stored | {"architectures": [kind]})
    described = found if isinstance(found := stored.get("speculators_config"), dict) else {}
    config.add("speculators_config.algorithm", described.get("algorithm"))
    values, types, is_block = config.values, config.take("layer_types"), kind not in ("eagle3", "peagle")
    slides = is_block and isinstance(types, list) and SLIDING in types
    ambiguous = {"eagle3": ["norm_before_residual"], "dspark": ["sample_from_anchor"]}.get(kind, [])
    if slides and kind != "dflash2":
        ambiguous.append(NON_CAUSAL)
    for key in ambiguous:
        if config.flag(key) is None:
            raise UserError(
                f"{path}: must have {key}, because Speculators and vLLM have other defaults, but does not; add it to a "
                "copy of the file as the head was trained"
            )
    if is_block:
        most = config.whole("block_size", least=2) - (not config.flag("sample_from_anchor"))
        for each in described.get("proposal_methods") or ():
            if (each.get("speculative_tokens") or 0) > most:
                config.refuse(
                    "speculators_config", f"for at most {most} tokens, as block_size and sample_from_anchor say"
                )
        config.add("target_layer_ids", [layer - 1 for layer in config.layer_ids(CAPTURED)], CAPTURED)
        if config.flag(NON_CAUSAL) or (kind == "dflash2" and NON_CAUSAL not in values):
            config.add("is_causal", False, NON_CAUSAL)  # otherwise layers that slide are causal, and full ones are not
        if slides:
            values.setdefault("use_sliding_window", True)
        if kind == "dspark" and not values["sample_from_anchor"]:
            values["block_size"] = config.whole("block_size", least=2) - 1  # Speculators counts the newest token then
    return config


def rope_of_head(config: ConfigJson, target: PreTrainedConfig, theta: float) -> list[dict[str, Any]]:
    """Returns the RoPE that a head may have been trained with, most likely first; an empty one is the target's.

    Engines take `theta` for a head without rope_theta. ModelOpt trains EAGLE-3 without scaling and then exports YaRN,
    so scaling that is not the target's may have been absent in training. RoPE that contradicts itself, is not complete
    or depends on the length of the text is refused. A warning says if the norms have another eps than the target's,
    which our heads use.
    """
    names = ("rope_theta", "original_max_position_embeddings", "max_position_embeddings", "rms_norm_eps")
    given = {name: config.values[name] for name in names if name in config.values}
    if rope := {key.removeprefix(ROPE): value for key, value in config.values.items() if key.startswith(ROPE)}:
        given["rope_parameters"] = rope
    with refusing(f"{config.path}: RoPE and rms_norm_eps must be readable by transformers", "choose another head"):
        own = LlamaConfig.from_dict({"rope_theta": theta} | given)
        if (kind := head_rope_parameters(own)["rope_type"]) not in STATIC_ROPE_TYPES:
            raise ValueError(f"rope_type {kind}, which changes with the length of the text")
        if any(isinstance(value, dict) for value in (own.rope_parameters or {}).values()):
            raise ValueError("RoPE that differs by layer")
    # A target's GGUF file holds its eps in fp32, so compare both in fp32; str gives 1e-06 instead of 9.99999997e-07.
    own_eps, eps = (float(str(np.float32(each))) for each in (own.rms_norm_eps, norm_eps(target)))
    if own_eps != eps:
        warn(
            f"{config.path}: rms_norm_eps should be {eps}, the target's value, which is used, but is {own_eps}; the "
            "head may draft worse than published until it is trained"
        )
    rope, targets = (
        {name: value for name, value in head_rope_parameters(each).items() if name != "type"} for each in (own, target)
    )
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if rope == targets:
        return [{}, head_rope_parameters(target)]
    if rope == plain:
        return [plain]
    return [plain, rope] if "use_last_layernorm" in config.values else [rope, plain]
