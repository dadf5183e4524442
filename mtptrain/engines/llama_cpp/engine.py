"""llama.cpp: what it serves and needs, how it is started, and how it counts."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import Applied, RunningEngine, Served, ServedTarget
from mtptrain.engines.limits import Refusal, models_of, must_be_false, why_not_captured, why_not_keys, window_of
from mtptrain.engines.llama_cpp import formats
from mtptrain.engines.llama_cpp.formats import ARCHITECTURE_OF
from mtptrain.engines.llama_cpp.server import (
    EXACT,
    EXACT_DRAFT,
    HEAD_FILE,
    HOST_SAMPLING,
    VERSION,
    LlamaServer,
    is_in_fp32,
    server_arguments,
)
from mtptrain.engines.load import send_all
from mtptrain.engines.process import CHECKOUT, started_server
from mtptrain.engines.requests import EngineCounts, EngineRun, Load, LoadResult, Questions, Requests
from mtptrain.heads.dflash import layer_kinds
from mtptrain.heads.draft_model import model_config
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.settings.heads import Dflash2Config, DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.families import head_rope_parameters
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import NEUTRAL, PENALTIES, GenerationDefaults
from mtptrain.target.gguf import OWN_SAMPLING, SAMPLING, TOKENIZER, require_same_sizes
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.utils.errors import UserError

DEFAULT_SERVER = CHECKOUT / ".engines" / "llama_cpp" / "bin" / "llama-server"
RULE = (
    "llama.cpp drafts at most one token less than an answer may still have, and counts no draft after the end of an "
    "answer: ours are counted by the same rules."
)
TOOLS_NOTE = (
    "To requests with tools, llama-server adds a grammar, by which a call that has begun takes the form of the chat "
    "template: calls then differ where the target would write others, and drafts of others are rejected. It does not "
    'with `"tool_choice": "none"`.'
)
LLAMAS = tuple(family for family, name in ARCHITECTURE_OF.items() if name == ARCHITECTURE_OF["llama"])
"""Families that llama.cpp runs with its class of Llama."""
FAMILIES_WITH_STREAMS = ("llama", "mistral", "qwen3", "qwen3_moe")
"""Families whose residual streams in llama.cpp were compared with ours.

Its classes of Qwen2, Gemma 3 and DeepSeek-V2 return none.
"""


class LlamaCpp(RunningEngine):
    """llama.cpp's program `llama-server`."""

    name = "llama.cpp"
    version = VERSION
    formats = {  # noqa: RUF012 (never changed)
        "eagle3": formats.LlamaCppEagle3,
        "dflash": formats.LlamaCppDflash,
        "dspark": formats.LlamaCppDspark,
        "dflash2": formats.LlamaCppDflash2,
        "draft_model": formats.LlamaCppDraftModel,
    }
    applies = dict.fromkeys((*SAMPLING.values(), *OWN_SAMPLING, "tokenizer_eos_token_id"), Applied.yes)
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # noqa: RUF012 (never changed)
    # By the source: common_params_sampling, and spec_retune of common/speculative.cpp.
    sampling = {"order": ("top_k", "top_p", "min_p", "temperature"), "draft_top_k": 10}  # noqa: RUF012
    sampled_drafts = {"draft_model": "`--spec-draft-sampling probabilistic`"}  # noqa: RUF012
    reads_gguf = True
    server = LlamaServer
    advice = (
        "export the head again; a server must be idle and be started with --metrics, with --spec-type, without which "
        f"llama.cpp drafts nothing, with {' '.join((HOST_SAMPLING, *EXACT, *EXACT_DRAFT))}, and without "
        "--spec-draft-sampling"
    )
    why_no_drafts = ": no drafts were made, as llama-server makes none without --spec-type"

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if not isinstance(head, DraftModelConfig):
            yield from why_not_streams(head, target)
        if (value := window_of(target)) is not None:
            reason = "its window in llama.cpp has not been compared with ours"
            yield Refusal("target.path", "a target without a sliding window", value, reason)
        for each in models_of(head, target):
            yield from why_not_keys(self.name, *each, "silu", LLAMAS)
        if getattr(target, "norm_topk_prob", None) is False:
            reason = "llama.cpp makes the weights of a token's experts add up to 1, whatever the model says"
            yield Refusal("target.path", "a target with norm_topk_prob=true", "false", reason)
        if isinstance(head, Dflash2Config) and head.selector_top_k * (head.selector_top_k + 1) > target.hidden_size:
            must_be = "k with k (k + 1) of at most the target's hidden size"
            reason = "llama.cpp passes the candidates and the scores of all pairs where a state would be"
            yield Refusal("head.selector_top_k", must_be, head.selector_top_k, reason, "train with fewer")
        if isinstance(head, DraftModelConfig) and (value := unknown_model(model_config(head, target))) is not None:
            reason = "the names and RoPE of other models in llama.cpp are not known here"
            families = f"one of {', '.join(ARCHITECTURE_OF)} without a window"
            must_be = f"{families}, and with unscaled RoPE unless it is a Llama or Mistral"
            instead = "convert the export of export.engine=vllm with llama.cpp's convert_hf_to_gguf.py"
            yield Refusal("head.init_from", must_be, value, reason, instead, may_change_engine=False)
        if isinstance(head, Eagle3Config):
            yield from must_be_false(head, "norm_output", "llama.cpp feeds back the state before the final norm")
            yield from must_be_false(head, "fc_norm", "llama.cpp has no norm for each stream")

    def read_by(self, target: TargetFiles) -> GenerationDefaults:
        """Returns the settings of the target's GGUF file, or without one those that the converter would write."""
        return target.generation if target.gguf is None else target.gguf_generation

    def ends_of(self, target: TargetFiles) -> list[int]:
        return llama_tokens(target).ends

    def ends_note(self, target: TargetFiles) -> str:
        return llama_tokens(target).unknown or super().ends_note(target)

    def notes(self, target: TargetFiles) -> list[str]:
        suppressed = target.gguf_metadata.get(f"{TOKENIZER}suppress_tokens", [])
        note = f"{target.gguf} suppresses tokens: {self.name} never answers {suppressed}, and our loop may."
        with_tools = "tools" in str(target.tokenizer.chat_template)
        return super().notes(target) + [TOOLS_NOTE] * with_tools + [note] * bool(suppressed)

    def found(self, key: str) -> tuple[str, str] | None:
        with suppress(UserError):
            program = find_llama_server(None)
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stderr
            build = re.search(r"(?:build |version: )([1-9]\d+)", said)
            return f"b{build[1]}" if build else "a build without a number", str(program)
        return None

    def find_program(self, serving: ServingConfig) -> Path:
        return find_llama_server(serving.program)

    def check_target(self, target: TargetFiles) -> None:
        """Check the target's GGUF file."""
        if target.gguf is None:
            raise UserError(
                "target.gguf: must be the target as a GGUF file, which llama.cpp serves, but is left out; convert the "
                f"target with `python convert_hf_to_gguf.py {target.directory} --outtype f32 --outfile TARGET.gguf` of "
                "llama.cpp, and set target.gguf=TARGET.gguf"
            )
        require_same_sizes(target.gguf, target.config)

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        return {"dtype": None, "gguf": str(target.gguf)}

    def may_round(self, served: Served) -> bool:
        assert served.target.gguf is not None
        return not (is_in_fp32(served.target.gguf) and is_in_fp32(served.head_dir / HEAD_FILE))

    def why_not_answers(self, target: TargetFiles, sampling: Mapping[str, Any]) -> str:
        if target.gguf is None:
            return "it serves a GGUF file, which neither target.path nor target.gguf names"
        penalties = [name for name in PENALTIES if sampling[name] != NEUTRAL[name]]
        return f"its {penalties[0]} counts other tokens than vLLM's and ours" if penalties else ""

    def answering_command(self, served: ServedTarget, model: str) -> list[Path | str]:
        assert served.target.gguf is not None
        require_same_sizes(served.target.gguf, served.target.config)
        is_exact = served.dtype == "float32" and is_in_fp32(served.target.gguf)
        arguments = server_arguments(served.target.gguf, served.context_tokens, served.concurrency, is_exact, None)
        return [served.program, *arguments, "--alias", model, "--special"]

    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        command = server_command(served, num_drafts, is_exact=served.dtype == "float32")
        with started_server(LlamaServer, command, served.log_path(num_drafts)) as server:
            return [server.generate(each) for each in asked]

    def counted(self, generations: Sequence[Generation], num_drafts: int, asked: Questions) -> tuple[EngineCounts, str]:
        """Returns what llama.cpp counts for our answers, and a sentence on its rules if they changed the counts."""
        rounds = drafted = 0
        accepted_at = np.zeros(num_drafts, int)
        for generation in generations:
            for num_drafted, num_accepted in _drafts(generation, num_drafts, asked):
                rounds, drafted = rounds + 1, drafted + num_drafted
                accepted_at[:num_accepted] += 1
        counts = EngineCounts(rounds, drafted, accepted_at.tolist())
        return counts, "" if counts == EngineCounts.of(generations) else RULE

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        command = server_command(served, num_drafts, is_exact=False)
        with started_server(LlamaServer, command, served.log_path(num_drafts)) as server:
            return send_all(server, requests, loads)


def server_command(served: Served, num_drafts: int, is_exact: bool) -> list[Path | str]:
    """Returns the command that serves a target and an exported head with K = `num_drafts`, 0 for no head."""
    assert served.target.gguf is not None
    head = (served.head_dir / HEAD_FILE, str(served.facts["method"]), num_drafts) if num_drafts else None
    arguments = server_arguments(served.target.gguf, served.context_tokens, served.concurrency, is_exact, head)
    return [served.program, *arguments, *served.server_args]


def find_llama_server(path: str | None) -> Path:
    """Returns the program `llama-server`: `serving.program`, the one in the checkout, or that on PATH."""
    default = str(DEFAULT_SERVER) if DEFAULT_SERVER.is_file() else shutil.which("llama-server") or str(DEFAULT_SERVER)
    found = Path(shutil.which(path or default) or path or default)
    if not os.access(found, os.X_OK) or found.is_dir():
        raise UserError(
            f"serving.program: must be llama.cpp's program llama-server, but {found} is no program; run `make "
            f".engines/llama_cpp/.installed` in a checkout, or build llama.cpp {VERSION} and set serving.program"
        )
    return found


def _drafts(generation: Generation, most_drafts: int, asked: Questions) -> list[tuple[int, int]]:
    """Returns how many tokens each round drafts and accepts by llama.cpp's rules.

    `get_n_draft_max` leaves room for the token that follows the drafts. `common_sampler_sample_and_accept_n` ends at an
    accepted end of the answer, unless that is the last draft.
    """
    rounds, position = [], 1  # the target chose token 0 itself
    for accepted in generation.accepted_by_round:
        num_drafts = min(most_drafts, asked.max_new_tokens - position - 1)
        if num_drafts > 0:
            accepted = min(accepted, num_drafts)
            for index, token in enumerate(generation.tokens[position : position + accepted]):
                if token in asked.stop_token_ids and index + 1 < num_drafts:
                    accepted = index
                    break
            rounds.append((num_drafts, accepted))
            position += accepted
        position += 1
    return rounds


def why_not_streams(head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what llama.cpp does not serve of a head that reads captured layers."""
    at_last = "llama.cpp captures a stream at the input of the next layer"
    yield from why_not_captured("llama.cpp", head, target, at_last=at_last, has_three=True)
    if isinstance(head, DflashConfig) and len({kind.is_causal for kind in layer_kinds(head)}) > 1:
        must_be, reason = "all or none if some layers slide and others do not", "llama.cpp has one setting for all"
        yield Refusal("head.causal", must_be, str(head.causal), reason, "train with another")
    if target.model_type not in FAMILIES_WITH_STREAMS:
        must_be, value = f"one of {', '.join(FAMILIES_WITH_STREAMS)}", f"a {target.model_type}"
        reason = "of other families llama.cpp returns no residual streams, or none has been compared with ours"
        instead = "train head=draft_model" if target.model_type in ARCHITECTURE_OF else ""
        yield Refusal("target.path", must_be, value, reason, instead)


def unknown_model(model: PreTrainedConfig) -> str | None:
    """Returns what llama.cpp does not know of a draft model: its family, its window, or how its RoPE is scaled."""
    if model.model_type not in ARCHITECTURE_OF:
        return f"a {model.model_type}"
    if (window := window_of(model)) is not None:
        return window
    rope_type = head_rope_parameters(model)["rope_type"]
    return (
        None if rope_type == "default" or model.model_type in LLAMAS else f"a {model.model_type} with {rope_type} RoPE"
    )


ENGINE = LlamaCpp()
