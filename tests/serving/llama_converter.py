"""Runs llama.cpp's own converter, with the tests' tokenizer in place of those that it knows.

llama_converter.py SOURCE TOKENIZER.json ARGUMENTS: the second holds the tokenizer's metadata, the others are those of
`convert_hf_to_gguf.py`.
"""

import json
import sys
from pathlib import Path

source, tokenizer, *arguments = sys.argv[1:]
sys.path.insert(0, source)

import convert_hf_to_gguf  # noqa: E402 (from the path above)
from conversion.base import TextModel  # noqa: E402
from gguf import GGUFValueType, SpecialVocab  # noqa: E402


def set_vocab(model: TextModel) -> None:
    ends = SpecialVocab(model.dir_model).special_token_ids  # as the converter finds them
    found = {f"tokenizer.ggml.{kind}_token_id": token for kind, token in ends.items() if kind == "eos"}
    for key, value in (json.loads(Path(tokenizer).read_text()) | found).items():
        model.gguf_writer.add_key_value(
            key, value, GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        )


TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2 = set_vocab
sys.argv = ["convert_hf_to_gguf.py", *arguments]
convert_hf_to_gguf.main()
