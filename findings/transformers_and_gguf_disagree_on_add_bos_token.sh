#!/usr/bin/env bash
# transformers ignores add_bos_token=true of a tokenizer without a post-processor; gguf takes it at its word, so llama.cpp adds a BOS.
#
# Versions: transformers 5.23.0, tokenizers 0.23.1, gguf 0.19.0 from PyPI, Python 3.11; a byte-level BPE tokenizer with a BOS.
# Expected: transformers reads `"add_bos_token": true` in tokenizer_config.json as its classes for Llama did, and begins "a" with
#   the BOS; or gguf finds out what the tokenizer does. Either way a GGUF file of the model begins a prompt as the model does.
# Behaviour: the backend that transformers 5 uses for all fast tokenizers adds a BOS only if the post-processor in tokenizer.json
#   does; the setting alone changes nothing. gguf's `SpecialVocab` looks at the post-processor too, but where there is none the
#   setting holds: it writes add_bos_token=true, and a llama.cpp server begins every prompt and every chat with a BOS that
#   training and transformers never saw.
# Seen: "transformers [0] gguf True": 0 is "a", and the BOS would be 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.1 gguf==0.19.0
cat > "$folder/read.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from gguf import SpecialVocab
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

for has_processor in (False, True):
    folder = Path(sys.argv[1]) / str(has_processor)
    base = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    base.add_special_tokens(["<s>", "</s>"])
    if has_processor:
        base.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 4}))
    ids = AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    print("SEEN", has_processor, "transformers", ids, "gguf", SpecialVocab(folder).add_special_token.get("bos"))
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN False transformers [0] gguf True
SEEN True transformers [2, 0] gguf True
SEEN
