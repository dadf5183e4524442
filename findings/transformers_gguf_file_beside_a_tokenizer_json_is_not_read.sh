#!/usr/bin/env bash
# transformers' AutoTokenizer, told to read a GGUF file, reads the tokenizer.json that lies beside it, and says nothing.
#
# Versions: transformers 5.23.0, torch 2.13.0 for CPUs, tokenizers 0.23.1, gguf 0.19.0 from PyPI, Python 3.11; a byte-level BPE of five tokens.
# Expected: `AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")` gives the tokens of that file, as it does where nothing
#   else lies in the folder, and as `AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)` gives its weights.
# Behaviour: with a tokenizer.json in the folder, the ids are those of the tokenizer.json. If the GGUF file numbers its tokens otherwise
#   (converted from a fine-tune with tokens of its own, or from another revision), the model gets ids that mean other tokens.
# Seen: "alone [2, 0, 1]" and "beside tokenizer.json [3, 4, 2]" for one text and one GGUF file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.1 gguf==0.19.0
cat > "$folder/read.py" <<'PYTHON'
import sys
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TOKENS, SIZES = ["b", "a", "ab", "<s>", "</s>"], ("context_length", "embedding_length", "block_count", "feed_forward_length")
folder = Path(sys.argv[1]) / "model"
folder.mkdir()
writer = GGUFWriter(folder / "model.gguf", "llama")
for name in (*SIZES, "head_count", "head_count_kv", "vocab_size"):
    getattr(writer, f"add_{name}")(len(TOKENS) if name == "vocab_size" else 8)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list(TOKENS)
writer.add_token_types([TokenType.CONTROL if each.startswith("<") else TokenType.NORMAL for each in TOKENS])
writer.add_token_merges(["a b"])
writer.add_bos_token_id(TOKENS.index("<s>"))
writer.add_eos_token_id(TOKENS.index("</s>"))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()


def ids():
    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")("abba", add_special_tokens=False)["input_ids"]


print("SEEN alone", ids())
other = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(sorted(TOKENS))}, merges=[("a", "b")]))
other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=other, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
print("SEEN beside tokenizer.json", ids())
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN alone [2, 0, 1]
SEEN beside tokenizer.json [3, 4, 2]
SEEN
