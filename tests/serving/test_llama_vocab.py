"""Tests that the special tokens which llama.cpp's converter writes for a directory are those that are read from it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from mtptrain.target.files import TargetFiles
from mtptrain.target.llama_tokens import llama_tokens
from tests.conftest import make_target
from tests.serving.llama_cpp import SOURCE

ADDED = ["<|user|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<|startoftext|>", "<|endofassistant|>", "<unk>"]
OF_FAMILIES = ("Glm", "Glm4", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "SolarOpen", "Dots3Note", "Gemma", "GraniteMoe")
AS_DICT = {"__type": "AddedToken", "content": "<user>"}
KINDS: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM:300": {} for name in OF_FAMILIES},
    **{f"{name}ForCausalLM:{size}": {} for name in ("Llama", "GraniteMoe") for size in (32016, 49152)},
    "LlamaForCausalLM:300": {"eos_token": "<|end|>", "add_bos_token": False},
    "Glm4vForConditionalGeneration:300": {"bos_token": "<user>", "eos_token": "<|end|>"},
    "Qwen3ForCausalLM:300": {"bos_token": AS_DICT, "cls_token": AS_DICT},
}
"""The settings of a tokenizer by a target's architecture and the size of its vocabulary."""


def test_the_special_tokens_of_a_directory_are_those_that_the_converter_writes(
    llama_server: Path, tmp_path: Path
) -> None:
    first = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 258)])
    targets = {kind: make_target(tmp_path / kind) for kind in KINDS}
    for kind, directory in targets.items():
        tokenizer, (architecture, size) = TargetFiles(directory).tokenizer, kind.split(":")
        tokenizer.add_tokens(ADDED, special_tokens=True)
        tokenizer.backend_tokenizer.post_processor = first
        tokenizer.save_pretrained(directory)
        of_config = {"architectures": [architecture], "vocab_size": int(size), "eos_token_id": [256]}
        for file, changes in (("config.json", of_config), ("tokenizer_config.json", {"eos_token": None} | KINDS[kind])):
            content = json.loads((directory / file).read_text())
            (directory / file).write_text(json.dumps(content | changes))
    command = [sys.executable, "tests/serving/llama_vocab.py", str(SOURCE), *map(str, targets.values())]
    subprocess.run(command, check=True)
    for kind, directory in targets.items():
        ours = llama_tokens(TargetFiles(directory))
        theirs = llama_tokens(TargetFiles(directory, given_gguf=str(directory / "vocab.gguf")))
        assert (ours.ids, ours.adds, {*ours.ends}) == (theirs.ids, theirs.adds, {*theirs.ends}), kind
        assert not ours.unknown
