"""Tests what acceptance and `mtptrain serving-check` say of settings that a server adds to a request."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.acceptance import served_settings, warn_of_greedy_drafts
from eval.as_served import CHAT, Asked, AsServed, other_chat, print_as_served, questions
from mtptrain.config import AcceptanceConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.engines.requests import EngineCounts, EngineRun, Manner, Questions
from mtptrain.engines.table import engine_of, running_engine
from mtptrain.run_dir import Run
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import GenerationDefaults
from mtptrain.target.loading import load_target
from tests.conftest import as_draft_model, make_config
from tests.data_prep.speaking import EOS, make_speaking_target
from tests.gguf_files import write_gguf

PENALTY = {"repetition_penalty": 1.3}
LLAMA = dict(engine_of("llama_cpp").defaults)
SETTINGS = AcceptanceConfig(max_new_tokens=24, num_speculative_tokens=3)


def run_with(target: Path, engine: str, **generation: Any) -> Run:
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **generation}))
    return Run(make_config(f"target.path={target}", f"export.engine={engine}", "acceptance.temperature=0"))


def test_sampled_drafts_that_the_engine_does_not_sample_are_warned_of() -> None:
    config = make_config("head=eagle3", "acceptance.temperature=1", "acceptance.sample_drafts=true")
    warn_of_greedy_drafts(config, engine_of("vllm"))
    with pytest.warns(UserWarning, match=r"must be false for head eagle3 and llama\.cpp"):
        warn_of_greedy_drafts(config, engine_of("llama_cpp"))


def test_acceptance_has_a_row_for_what_the_engine_adds_and_sampler_and_engine_share(tmp_path: Path) -> None:
    target = make_speaking_target(tmp_path)
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    greedy_row, sampled_row = {"temperature": 0.0, **PENALTY}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("vllm", {}, {}),
        ("vllm", {"suppress_tokens": [3]}, {}),
        ("vllm", PENALTY, {"as_served": greedy_row}),
        ("vllm", sampled, {"as_served_sampled": sampled_row}),
        ("vllm", {"presence_penalty": 1.5}, {"as_served": {"temperature": 0.0, "presence_penalty": 1.5}}),
        ("vllm", {"presence_penalty": 1.5, "_from_model_config": True}, {}),  # transformers drops what it does not know
        ("vllm", PENALTY | {"_from_model_config": True}, {"as_served": greedy_row}),
        ("vllm", {"temperature": 1e-6}, {"as_served_sampled": {"temperature": 0.01}}),  # to which it raises it
        ("vllm", sampled | PENALTY, {"as_served": greedy_row, "as_served_sampled": sampled_row | PENALTY}),
        ("vllm", sampled | {"min_p": 0.1}, {}),  # which vLLM refuses with drafts
        ("llama_cpp", sampled, {"as_served_sampled": {"min_p": 0.05, **sampled_row}}),  # a default of its own
        *(  # neutral values, which replace defaults that are not
            (
                "llama_cpp",
                {"temperature": 1.0, "top_k": 0},
                {"as_served_sampled": LLAMA | {"temperature": 1.0, "top_k": 0}},
            ),
            ("transformers", {"do_sample": True, "top_k": 0}, {"as_served_sampled": {"temperature": 1.0, "top_k": 0}}),
            ("transformers", {"do_sample": False, "top_k": 0}, {}),
        ),
        ("llama_cpp", sampled | PENALTY, {}),
        ("llama_cpp", sampled | {"xtc_probability": 0.5}, {}),  # which its converter keeps
        ("openvino", PENALTY, {}),
        ("transformers", sampled, {"as_served_sampled": sampled_row}),
        ("transformers", {"do_sample": True}, {"as_served_sampled": {"temperature": 1.0, "top_k": 50}}),  # its defaults
        ("transformers", sampled | {"temperature": 2}, {}),  # a whole number, with which it fails
        ("transformers", sampled | {"typical_p": 0.5}, {}),  # a rule that our sampler does not have
    ]
    for engine, generation, expected in cases:
        assert served_settings(run_with(target, engine, **generation)) == expected, (engine, generation)
    generation = GenerationDefaults(temperature=0.7, repetition_penalty=1.05, processors={"suppress_tokens": [3]})
    note = engine_of("vllm").defaults_note(generation)
    assert "sets temperature 0.7, repetition_penalty 1.05, suppress_tokens [3]. vLLM 0.32 does not apply supp" in note
    assert "applies temperature, repetition_penalty to each request" in note and "`--generation-config vllm`" in note
    assert not engine_of("vllm").defaults_note(GenerationDefaults(temperature=1.0))
    for name, said in (("vllm", "at 1.0."), ("llama_cpp", "at 0.8."), ("openvino", ""), ("transformers", "")):
        note = engine_of(name).defaults_note(GenerationDefaults(max_new_tokens=9 if name == "vllm" else None))
        assert ("samples a request without a temperature, " + said in note) == bool(said), note
        assert "another share" not in note
    assert "sets temperature 1.0. llama.cpp" in engine_of("llama_cpp").defaults_note(
        GenerationDefaults(temperature=1.0)
    )
    settings = {"general.sampling.temp": 0.5, "general.sampling.penalty_last_n": 9}
    gguf = write_gguf(tmp_path / "target.gguf", target, settings=settings)
    run = Run(make_config(f"target.path={target}", f"target.gguf={gguf}", "export.engine=llama_cpp"))
    note = engine_of("llama_cpp").defaults_note(engine_of("llama_cpp").read_by(run.target))
    assert "target.gguf sets temperature 0.5, penalty_last_n 9. llama.cpp b11434 applies temperature, penal" in note
    gguf = write_gguf(gguf, target, settings={"general.sampling.temp": 0.5, "tokenizer.ggml.suppress_tokens": [3, 5]})
    run = Run(make_config(f"target.path={target}", f"target.gguf={gguf}", "export.engine=llama_cpp"))
    assert served_settings(run)["as_served_sampled"]["temperature"] == 0.5
    assert "llama.cpp never answers [3, 5], and our loop may." in engine_of("llama_cpp").notes(run.target)[-1]
    assert "adds a grammar" not in str(engine_of("llama_cpp").notes(run.target))
    run.target.tokenizer.chat_template += "{% if tools %}{{ tools | tojson }}{% endif %}"
    assert "To requests with tools, llama-server adds a grammar" in engine_of("llama_cpp").notes(run.target)[-2]
    note = engine_of("transformers").defaults_note(
        GenerationDefaults(processors={"max_time": 2, "stop_strings": ["x"]})
    )
    assert "applies max_time to each" in note and "fails until stop_strings is removed from the file." in note
    fails = "does not serve the head to requests that leave out what the target's generation_config.json sets: "
    for name, settings, said in (
        ("transformers", {"temperature": 0.0}, ""),
        ("transformers", {"do_sample": True}, "sets do_sample True. transformers 5.23 applies do_sample to each"),
        ("transformers", {"temperature": 0.0, "do_sample": True}, rf"{fails}ValueError: .*temperature"),
        ("transformers", {"repetition_penalty": 2}, rf"{fails}ValueError: .*penalty"),
        ("transformers", {"do_sample": True, "typical_p": "x"}, rf"{fails}TypeError"),
        ("transformers", {"bad_words_ids": [5]}, rf"{fails}ValueError"),
        ("transformers", {"guidance_scale": 0}, "applies guidance_scale"),
        ("transformers", {"use_cache": False}, rf"{fails}ValueError: .*use_cache=True"),
        ("transformers", {"cache_implementation": "static"}, rf"{fails}ValueError: .*Static cache"),
        ("transformers", {"do_sample": True, "num_return_sequences": 2}, rf"{fails}ValueError: num_return_sequences"),
        ("transformers", {"num_beams": 2}, rf"{fails}it selects beam_search,"),
        ("transformers", {"prompt_lookup_num_tokens": 4}, rf"{fails}it selects assisted_generation,"),
        ("transformers", {"assistant_early_exit": 2}, rf"{fails}it selects assisted_generation,"),
        ("transformers", {"assistant_ensemble_weight": 0.5, "use_mtp": True}, "applies assistant_ensemble_weight"),
        ("transformers", {"encoder_no_repeat_ngram_size": 3}, "applies encoder_no_repeat_ngram_size"),
        ("transformers", {"num_beam_groups": 1, "use_mtp": True, "top_h": 0.5}, "applies top_h"),
        ("vllm", {"temperature": 3.0}, rf"{fails}temperature must be in \[0, 2\], got 3"),
        ("sglang", {"temperature": 0.7, "top_k": 0}, rf"{fails}top_k must be -1 .* got 0"),
        ("sglang", {"temperature": 0.7, "top_k": -1}, "applies temperature to each"),
        ("sglang", {"temperature": 0.0, "top_k": 0}, "applies temperature to each"),
        ("sglang", {"repetition_penalty": 2.5}, rf"{fails}repetition_penalty must be in \(0, 2\], got 2.5"),
    ):
        notes = engine_of(name).notes(run_with(target, name, **settings).target)
        others = [note for note in notes if not note.startswith("vLLM 0.32 samples a request without")]
        assert len(others) == bool(said) and all(re.search(said, note) for note in others), (settings, notes)
    config = (target / "config.json").read_text()
    (modules := target / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    assert "for a model of embeddings, by modules.json" in engine_of("vllm").notes(run_with(target, "vllm").target)[-1]
    modules.unlink()
    low = run_with(target, "vllm", temperature=1e-6).target
    assert engine_of("vllm").notes(low)[-1] == "vLLM 0.32 raises the target's temperature 1e-06 to 0.01."
    of_embeddings = target / "sentence_bert_config.json"
    for settings, said in (
        ({"max_seq_length": 32, "do_lower_case": True}, "takes 32 tokens .* lower-cases prompts: remove it"),
        ({"max_seq_length": 32}, "takes 32 tokens at most, by sentence_bert_config.json, which is for embeddings: rem"),
        ({"do_lower_case": True}, "^vLLM 0.32 samples"),  # of which vLLM then reads nothing
    ):
        of_embeddings.write_text(json.dumps(settings))
        assert re.search(said, engine_of("vllm").notes(run_with(target, "vllm").target)[-1])
    of_embeddings.unlink()
    own, by_architecture = (
        "makes prompts of chats with this target by a program of its own, not",
        "takes the class of a ta",
    )
    for changed, in_vllm, in_sglang in (
        ({"seq_length": 9}, "takes 9 tokens at most, by seq_length", "takes 9 tokens at most, by seq_length"),
        ({"seq_len": 9}, "takes 9 tokens at most, by seq_len", ""),
        (
            {"model_max_length": 9, "seq_length": 8},
            "9 tokens at most, by model_max_length",
            "8 tokens at most, by seq_",
        ),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "by openai_harmony, .* reads reaso", ""),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, f"{own} by .* --tokenizer-mode hf", by_architecture),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, own, own),
        ({"architectures": ["LlamaModel"]}, f"{by_architecture}.* LlamaModel, but .* LlamaForC", by_architecture),
        ({"architectures": None}, "which names none, but transformers from its model_type, here Ll", by_architecture),
        ({"architectures": ["MiMoForCausalLM"]}, "", ""),
    ):
        (target / "config.json").write_text(json.dumps(json.loads(config) | changed))
        for name, said in (("vllm", in_vllm), ("sglang", in_sglang)):
            note = engine_of(name).notes(run_with(target, name).target)[-1]
            assert re.search(said or "samples a request without", note), (changed, note)
    greedy = run_with(target, "transformers", do_sample=False, temperature=0.7, repetition_penalty=1.05).target
    assert engine_of("transformers").read_by(greedy).sampling == {"repetition_penalty": 1.05}
    other = run_with(target, "vllm", eos_token_id=[3]).target
    for name, missed in (("vllm", ""), ("transformers", "at 256 ("), ("openvino", "at 256 ("), ("llama_cpp", "at 3 (")):
        assert missed in (said := engine_of(name).ends_note(other)) and bool(said) is bool(missed)
    (target / "config.json").write_text(json.dumps(json.loads(config) | {"eos_token_id": [3, 4]}))
    other = run_with(target, "sglang", eos_token_id=[3]).target
    other.tokenizer.add_tokens(["<|eom_id|>"], special_tokens=True)
    other.config.vocab_size += 1
    assert engine_of("sglang").ends_of(other) == [3, EOS, 4, 260]
    assert engine_of("mlx").ends_of(other) == [3, EOS]
    assert engine_of("mlx").ends_of(run_with(target, "mlx", eos_token_id=None).target) == [3, 4, EOS]
    assert re.search(
        r"SGLang 0.5.23 ends answers at 4 \(.*, 260 \(<.eom_id.>\) too", engine_of("sglang").ends_note(other)
    )
    (target / "config.json").write_text(config)
    named = replace(run_with(target, "sglang").target, path="org/Wizard-Vicuna-7B")
    assert "if the target's path has `Vicuna`: start it with `--chat-template" in engine_of("sglang").notes(named)[-1]
    assert "--chat-template" not in str(engine_of("sglang").notes(replace(named, path="org/viewpoints")))
    templated = run_with(target, "openvino").target
    assert "by a program of its own, which fails" in engine_of("openvino").notes(templated)[-1]
    templated.tokenizer.chat_template = None
    assert "by a program of its own" not in str(engine_of("openvino").notes(templated))
    silent = run_with(target, "vllm", eos_token_id=None).target
    assert engine_of("openvino").ends_of(silent) == [EOS] and engine_of("openvino").ends_of(other) == [3]
    silent.tokenizer.eos_token = None
    assert "Answers never end here and in vLLM: gen" in engine_of("vllm").ends_note(silent)
    for end, named, name, said in (  # 77 is a token without a text in the tokenizer, and 260 one that only that has
        (
            "<|end|>",
            [EOS, 259],
            "llama_cpp",
            "Answers end at 259 (no text) here and in vLLM, but llama.cpp b11434 writes past it. ",
        ),
        (
            "<x>",
            [EOS],
            "vllm",
            "No answer ends at 260, the end of the tokenizer: the target has 260 tokens. To mend it",
        ),
        (
            "<x>",
            [EOS],
            "llama_cpp",
            "No answer ends at 260, the end of the tokenizer: the target has 260 tokens. To mend it",
        ),
    ):
        odd = run_with(target, name, eos_token_id=named).target
        odd.tokenizer.add_tokens(["<x>"] if end == "<x>" else [])
        odd.tokenizer.eos_token = end
        if 259 in named:
            odd.tokenizer.decode = lambda ids: "" if 259 in ids else "x"
        assert engine_of(name).ends_note(odd).startswith(said), engine_of(name).ends_note(odd)
    note = engine_of("vllm").defaults_note(GenerationDefaults(min_p=0.1))
    assert "With drafts it refuses sampled requests that leave out min_p. To switch that off, start vLLM" in note


GROUPS = "num_beams with such num_beam_groups and diversity_penalty"


def test_settings_with_which_an_engine_fails_without_drafts_or_with_long_prompts_are_named(tmp_path: Path) -> None:
    target, refuses = (
        make_speaking_target(tmp_path),
        "Without drafts, OpenVINO 2026.4.1 refuses every request, for {} in",
    )
    both = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}  # the defaults of transformers 4
    for name, settings, said in (
        ("openvino", both, refuses.format("num_assistant_tokens beside assistant_confidence_threshold")),
        ("openvino", both | {"num_assistant_tokens": None}, ""),
        ("openvino", {"do_sample": True, "temperature": 0.0}, refuses.format("do_sample with temperature 0")),
        ("openvino", {"do_sample": True, "num_beams": 2}, refuses.format("num_beams with do_sample or a penalty")),
        ("openvino", PENALTY | {"num_beams": 2}, refuses.format("num_beams with do_sample or a penalty")),
        ("openvino", {"repetition_penalty": 1.0, "num_beams": 2}, ""),
        ("openvino", {"min_new_tokens": 5, "max_new_tokens": 3}, refuses.format("min_new_tokens above max_new_tokens")),
        ("openvino", {"min_new_tokens": 5}, ""),
        ("openvino", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, ""),
        ("openvino", {"num_beams": 4, "num_beam_groups": 2}, refuses.format(GROUPS)),
        ("openvino", {"num_beams": 4, "diversity_penalty": 1.0}, refuses.format(GROUPS)),
        (
            "openvino",
            {"max_length": 20, "max_new_tokens": 4},
            "Without drafts, a prompt of 20 tokens or more, the max_l",
        ),
        (
            "transformers",
            {"max_length": 20},
            "A prompt of 20 tokens or more, the max_length, is an error without max_new",
        ),
        ("transformers", {"max_length": 20, "max_new_tokens": 4}, ""),
    ):
        notes = engine_of(name).notes(run_with(target, name, **settings).target)
        found = [note for note in notes if "Without drafts" in note or "is an error" in note]
        assert len(found) == bool(said) and all(note.startswith(said) for note in found), (settings, notes)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    directory = make_speaking_target(tmp_path_factory.mktemp("target"))
    target = load_target(directory, torch.float32, torch.device("cpu"))
    return directory, target, as_draft_model(target)


def generated(target: Any, drafter: Any, asked: Questions, sampler: Sampler, ends: tuple[int, ...] = (EOS,)) -> Any:
    """Returns what our own decoding answers, with K = 3 unless nothing drafts."""
    return generate_in_batches(
        *(target, drafter, asked.prompts),
        num_speculative_tokens=0 if isinstance(drafter, NoDrafter) else 3,
        max_new_tokens=asked.max_new_tokens,
        sampler=sampler,
        eos_token_ids=ends,
        batch_size=8,
    )


def test_what_a_server_adds_is_named_and_its_drafts_are_compared_along_its_own_answers(
    served: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, target, head = served
    engine = running_engine("vllm")
    asked = Questions([list(range(i, i + 9)) for i in range(8)], 24, [EOS], Manner.greedy)

    def answers(sampling: Mapping[str, Any], ends: tuple[int, ...] = (EOS,)) -> Any:
        return generated(target, HeadDrafter(head, target.parts, 3), asked, Sampler(**sampling), ends)

    neutral = [each.tokens for each in answers({})]

    def compare(generation: dict[str, Any], theirs: Any, wrong_counts: bool = False) -> Asked:
        run_with(directory, "vllm", **generation)
        counts = EngineCounts.of(theirs)
        if wrong_counts:
            counts = EngineCounts(counts.rounds + 1, counts.drafted, counts.accepted_at)
        run = EngineRun("0.32.0", [each.tokens for each in theirs], counts, None)
        compared = AsServed(SETTINGS, target, TargetFiles(directory), head, engine).compare(asked, run, neutral, False)
        print_as_served([compared], engine, 1.0, TargetFiles(directory).generation)
        return compared

    penalised, other_end = answers(PENALTY), neutral[0][2]
    assert [each.tokens for each in penalised] != neutral
    found = compare(PENALTY, penalised)
    assert found.is_explained and found.reasons == ["penalty: repetition_penalty 1.3 of generation_config.json"]
    found = compare({}, answers({}, (EOS, other_end)))
    assert found.is_explained and len(found.reasons) == 1
    assert found.reasons[0].startswith(f"end: the server ends answers at token {other_end}, ")
    found = compare(PENALTY, answers({}))  # such as a server with --generation-config vllm
    assert found.is_explained and not found.num_different
    assert "the server adds nothing of that to these requests" in capsys.readouterr().out
    # neither of these has a reason that the target's files give
    found = compare({}, penalised)
    assert found.is_same_draft and not found.is_explained and not found.reasons
    assert "for a reason that is not known here" in capsys.readouterr().err
    assert not compare({"repetition_penalty": 1.2}, penalised).is_explained
    found = compare(PENALTY, penalised, wrong_counts=True)
    assert found.reasons and not found.is_explained
    assert "the engine must count as we do along its own answers" in capsys.readouterr().err


def test_a_server_is_asked_twice_more_and_few_prompts_where_nothing_changes_greedy_answers(tmp_path: Path) -> None:
    neutral, target = Questions([[1]] * 100, 8, [0]), make_speaking_target(tmp_path)

    def asked(why_not_sampled: str = "", has_server: bool = True, **generation: Any) -> list[Questions]:
        refused = lambda generation: ["min_p"] if generation.min_p else []  # noqa: E731
        engine = SimpleNamespace(has_server=has_server, why_not_sampled=lambda: why_not_sampled, refused_for=refused)
        engine.read_by = lambda target: target.generation
        return questions(neutral, run_with(target, "vllm", **generation).target, engine)  # type: ignore[arg-type]

    greedy, plain = asked(temperature=0.7)
    assert (greedy.manner, plain.manner, len(greedy.prompts)) == (Manner.greedy, Manner.plain, len(plain.prompts))
    assert len(plain.prompts) == 32
    assert len(asked(min_p=0.1)) == 1
    [greedy] = asked("it samples wrongly", presence_penalty=0.5)
    assert (greedy.manner, len(greedy.prompts)) == (Manner.greedy, 100) and not asked(has_server=False)


def test_an_engine_that_makes_another_prompt_of_a_chat_is_told_apart(tmp_path: Path) -> None:
    target = TargetFiles(make_speaking_target(tmp_path))
    ours = render_prompt(target.tokenizer, CHAT)
    for ids, expected in ((ours, ""), (None, ""), ([EOS, *ours], "from token 0 on '<|end|><user>What i', not '<user>")):
        found = other_chat(target, "vLLM", ids)
        assert expected in found and bool(found) == bool(expected)
