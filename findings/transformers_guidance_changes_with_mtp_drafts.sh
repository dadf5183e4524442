#!/usr/bin/env bash
# transformers' `generate(use_mtp=True)` is exact in greedy decoding, except with guidance_scale, where drafts change the answer.
#
# Versions: transformers 5.23.0, torch 2.13.0 for CPUs, Python 3.11; a random Llama of two layers with one MTP layer, fp32.
# Expected: a refusal, because the guidance's second forward without the prompt keeps a cache that drafts have no place in (as
#   assisted generation refuses what it cannot do); or else the answer of decoding without drafts, as without guidance.
# Behaviour: with guidance_scale=1 (off) drafts change no token. With 3 nothing is refused or said; the setting is applied, and some
#   prompts get other tokens with `use_mtp` than without.
# Seen: "off: 12 of 12 answers equal" and "guided: fewer than 12 of 12 answers equal".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
cat > "$folder/decode.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
LAYERS, WIDTH, PROMPTS = 2, 64, 12
folder = Path(sys.argv[1]) / "model"
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=80, num_mtp_layers=1, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
)
LlamaForCausalLM(config).save_pretrained(folder)
path, mtp = folder / "model.safetensors", f"model.layers.{LAYERS}."
weights = load_file(path)
weights |= {name.replace("layers.1.", f"layers.{LAYERS}."): x.clone() for name, x in weights.items() if "layers.1." in name}
weights |= {mtp + name: torch.ones(WIDTH) for name in ("enorm.weight", "hnorm.weight", "post_norm.weight")}
weights[mtp + "eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH) / WIDTH**0.5
save_file(weights, path, {"format": "pt"})
LlamaForCausalLM._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
model = LlamaForCausalLM.from_pretrained(folder)


def answer(seed, **settings):
    prompt = torch.randint(1, 80, (1, 6), generator=torch.Generator().manual_seed(seed))
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False}
    return model.generate(prompt, **given, **settings)[0].tolist()


for name, scale in (("off", 1.0), ("guided", 3.0)):
    plain = [answer(seed, guidance_scale=scale) for seed in range(PROMPTS)]
    drafted = [answer(seed, guidance_scale=scale, use_mtp=True) for seed in range(PROMPTS)]
    equal = sum(a == b for a, b in zip(plain, drafted))
    print(f"SEEN {name}: {equal if equal == PROMPTS else 'fewer than 12'} of {PROMPTS} answers equal")
PYTHON
"$folder/venv/bin/python" "$folder/decode.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN off: 12 of 12 answers equal
SEEN guided: fewer than 12 of 12 answers equal
SEEN
