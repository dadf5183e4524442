"""What a target's files ask of whoever generates with it: generation_config.json, read whole, and the ends of a text.

A server applies some of these settings to each request that leaves them out; `Engine.applies` says which.
"""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from mtptrain.target.hub import DOWNLOAD_AGAIN
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import read_json

FILE = "generation_config.json"

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings of sampling, and the values with which the target's own distribution is unchanged."""

BOUNDS: Mapping[str, tuple[type, float, float]] = {
    "do_sample": (bool, False, True),
    "temperature": (float, 0, 1e6),
    "top_p": (float, 1e-9, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-9, 1e6),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (float, -2, 2)),
    **dict.fromkeys(("top_k", "max_new_tokens", "min_new_tokens", "max_length"), (int, 0, 2**31)),
}
"""The type and the least and greatest value of each setting, as servers check them."""
WORDS = {bool: "true or false", int: "a whole number from {:g} to {:g}", float: "a number from {:g} to {:g}"}

ONLY_SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Settings that change no greedy answer."""
LENGTHS = ("max_new_tokens", "min_new_tokens", "max_length")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

NO_EFFECT = {
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("_name_or_path", "_commit_hash", "dtype", "torch_dtype", "renormalize_logits", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "cache_config", "return_dict_in_generate", "max_cache_len", "use_mtp"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "trust_remote_code"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "prefill_chunk_size", "low_memory", "disable_compile", "compile_config"),
    *("chat_format", "max_window_size", "user_token_id", "assistant_token_id", "length_penalty", "early_stopping"),
}
"""Keys that change no token of one greedy or sampled answer."""

NO_EFFECT_VALUES = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty"), 1),
    **{"guidance_scale": 1, "max_time": None, "num_beam_groups": 1},
}
"""The values with which further keys change none; of all other keys, these are false, 0 and what is empty."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What a target's generation_config.json sets, and the ends of its texts. None where the file is silent."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text: those of generation_config.json, or of config.json without that file, as in transformers
    and vLLM. `TargetFiles` adds the tokenizer's, at which servers stop too."""
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 keeps all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    max_length: int | None = None
    """Tokens of prompt and answer."""
    processors: Mapping[str, Any] = field(default_factory=dict)
    """All other settings that change an answer, such as suppress_tokens, by their names in the file."""
    source: str = FILE
    """The name of the file."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of sampling that change the target's own distribution, by name."""
        values = {name: getattr(self, name) for name in NEUTRAL}
        return {name: value for name, value in values.items() if value is not None and value != NEUTRAL[name]}

    @property
    def samples(self) -> bool:
        """Whether answers are sampled: as do_sample says, or else if a setting that only sampling has is given."""
        is_given = any(getattr(self, name) is not None for name in ONLY_SAMPLED)
        return (self.do_sample if self.do_sample is not None else is_given) and self.temperature != 0

    @property
    def own_sampling(self) -> dict[str, Any]:
        """How the target is to be sampled, by the names of `NEUTRAL`; greedily, with its penalties, if not at all."""
        if self.samples:
            return {**NEUTRAL, **self.sampling}
        penalties = {name: value for name, value in self.sampling.items() if name in PENALTIES}
        return {**NEUTRAL, "temperature": 0.0, **penalties}

    def sampled_with(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns how answers are sampled with given settings: without a temperature, else as the target is to be."""
        chosen = {name: value for name, value in given.items() if value is not None}
        return (NEUTRAL if "temperature" in chosen else self.own_sampling) | chosen

    @property
    def changes(self) -> dict[str, Any]:
        """All settings that change what a request gets that leaves them out, by name; ends are not among them."""
        lengths = {name: getattr(self, name) for name in LENGTHS}
        return self.sampling | {name: value for name, value in lengths.items() if value} | dict(self.processors)

    def ending_at(self, token: int | None) -> "GenerationDefaults":
        """Returns these settings with one more end, if there is one."""
        ends = dict.fromkeys((*self.eos_token_ids, *as_ids(token)))
        return replace(self, eos_token_ids=tuple(ends))


def read_generation(target_dir: Path, config: PreTrainedConfig) -> GenerationDefaults:
    """Returns what generation_config.json sets, or else config.json. Raises UserError for values no engine takes."""
    path = target_dir / FILE
    if not path.is_file():
        given = stored_generation(target_dir, config).to_diff_dict()
        return parse_generation(given, path.with_name("config.json"), config)
    given = {"eos_token_id": None, **read_json(path, DOWNLOAD_AGAIN)}
    given = {name: value for name, value in given.items() if value is not None or name == "eos_token_id"}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's and llama.cpp's word for all tokens
    parsed = parse_generation(given, path, config)
    stored_generation(target_dir, config)
    return parsed


def stored_generation(target_dir: Path, config: PreTrainedConfig) -> transformers.GenerationConfig:
    """Returns what transformers, and so vLLM, read: without generation_config.json, a few settings of config.json."""
    path = target_dir / FILE
    if not path.is_file():
        with refusing(f"{path.with_name('config.json')}: settings of generation must be valid", "correct them"):
            return transformers.GenerationConfig.from_model_config(config)
    has_bom = path.read_bytes().startswith(codecs.BOM_UTF8)
    advice = "save it again as UTF-8 without a byte order mark" if has_bom else DOWNLOAD_AGAIN
    with refusing(f"{path}: must be readable by transformers", advice):
        return transformers.GenerationConfig.from_pretrained(target_dir)


def parse_generation(given: dict[str, Any], path: Path, config: PreTrainedConfig) -> GenerationDefaults:
    """Returns what the settings of a file say, whose names are those of generation_config.json."""
    for name, (kind, least, most) in BOUNDS.items():
        value = given.get(name, least)
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if name in given and not (is_kind and least <= value <= most):
            must = WORDS[kind].format(least, most)
            raise UserError(f"{path}: {name} must be {must}, but is {value!r}; {DOWNLOAD_AGAIN}")
    own = {each.name for each in fields(GenerationDefaults)} - {"eos_token_ids", "processors", "source"}
    others = {name: value for name, value in given.items() if name not in own | NO_EFFECT | {"eos_token_id"}}
    processors = {
        name: value
        for name, value in others.items()
        if (value != NO_EFFECT_VALUES[name] if name in NO_EFFECT_VALUES else value not in (False, [], {}))
        or (name.endswith("token_id") and value is not False)
    }
    ends, source = as_ids(given.get("eos_token_id")), path
    if "eos_token_id" not in given:
        ends, source = as_ids(config.eos_token_id), path.with_name("config.json")
    for token in ends:
        if isinstance(token, bool) or not (isinstance(token, int) and 0 <= token < config.vocab_size):
            raise UserError(
                f"{source}: eos_token_id must be token ids below vocab_size={config.vocab_size}, but is {token!r}; "
                f"{DOWNLOAD_AGAIN}"
            )
    return GenerationDefaults(
        tuple(ends), **{name: given[name] for name in own if name in given}, processors=processors, source=path.name
    )


def as_ids(ids: Any) -> list[Any]:
    """Returns a token id, a list of them, or nothing, as a list."""
    return list(ids) if isinstance(ids, list | tuple) else [] if ids is None else [ids]


def as_words(settings: Mapping[str, Any]) -> str:
    """Returns settings as text, such as "temperature 0.7, top_k 20"."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())
