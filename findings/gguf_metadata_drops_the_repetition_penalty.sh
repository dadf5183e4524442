#!/usr/bin/env bash
# The package gguf carries a target's temperature into a GGUF file's sampling defaults, but not its repetition_penalty.
#
# Versions: gguf 0.19.0 from PyPI, Python 3.11; a generation_config.json as published models have it.
# Expected: `Metadata.load` reads both from generation_config.json, as the keys `general.sampling.temp` and
#   `general.sampling.penalty_repeat` suggest, so that a server which applies a file's defaults applies the model's penalty too.
# Behaviour: temperature, top_k, top_p and min_p are read by the names that transformers writes. The penalty is looked up as
#   `penalty_repeat`, which is llama.cpp's word and no key of transformers, so it is dropped without a word. Two servers of one model
#   then answer plain requests differently, also at temperature 0. The gguf-py of llama.cpp b11434 calls itself 0.19.0 too, and
#   reads both names.
# Seen: "temperature 0.7 top_k 20 penalty None", and "penalty 1.05" if the key is renamed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0
mkdir "$folder/model"
cat > "$folder/read.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFWriter, Metadata

folder = Path(sys.argv[1])
(folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
for name in ("repetition_penalty", "penalty_repeat"):
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, name: 1.05}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    metadata = Metadata.load(model_path=folder)
    writer = GGUFWriter(folder / "model.gguf", "llama")
    metadata.set_gguf_meta_model(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = GGUFReader(folder / "model.gguf").fields

    def value(key: str) -> object:
        field = fields.get(f"general.sampling.{key}")
        return None if field is None else round(float(field.parts[field.data[0]][0]), 2)

    print("SEEN", name, "temperature", value("temp"), "top_k", value("top_k"), "penalty", value("penalty_repeat"))
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder/model" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN repetition_penalty temperature 0.7 top_k 20.0 penalty None
SEEN penalty_repeat temperature 0.7 top_k 20.0 penalty 1.05
SEEN
