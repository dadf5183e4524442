"""Writes the tokens of model directories into vocab.gguf of each by llama.cpp's own converter.

llama_vocab.py SOURCE DIRECTORY... It cannot know the tests' pre-tokenizer, and no directory has SentencePiece's file.
"""

import sys
from pathlib import Path

source, *directories = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

from conversion import ModelType, get_model_architecture, get_model_class  # noqa: E402 (from the path above)
from conversion.base import ModelBase, TextModel  # noqa: E402
from gguf import GGUFWriter  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2

for directory in map(Path, directories):
    config = ModelBase.load_hparams(directory, False)
    model = object.__new__(get_model_class(get_model_architecture(config, ModelType.TEXT)))
    model.dir_model, model.hparams, model.origin_hf_arch = directory, config, config["architectures"][0]
    model.is_mistral_format, model.gguf_writer = False, GGUFWriter(directory / "vocab.gguf", "llama")
    model.set_vocab()
    model.gguf_writer.write_header_to_file()
    model.gguf_writer.write_kv_data_to_file()
    model.gguf_writer.close()
