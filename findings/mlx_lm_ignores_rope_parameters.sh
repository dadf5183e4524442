#!/usr/bin/env bash
# mlx-lm's Llama class ignores `rope_parameters`, the only place where transformers 5 writes RoPE: theta and scaling are lost.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, Python 3.11, Linux; a random Llama of two layers whose RoPE is that of Llama 3.
# Expected: a checkpoint that transformers 5 has saved is rotated as its config.json says, or refused.
# Behaviour: `rope_theta` and `rope_scaling` at the top level, as older checkpoints have them, change the logits. The same settings in
#   `rope_parameters` change nothing: the model runs with theta 10,000 and no scaling, and writes other text, without a word. Most
#   classes do the same (mistral, qwen2, qwen3_moe and others); qwen3's and some newer ones read the key.
# Seen: "True" for the old keys and "False" for the new one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_model

folder = Path(sys.argv[1])
ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE["original_max_position_embeddings"] = 64
SIZES = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {"model_type": "llama", "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, **SIZES}
OLD = {"rope_theta": ROPE["rope_theta"], "rope_scaling": {k: v for k, v in ROPE.items() if k != "rope_theta"}}


def logits(rope):
    """Returns the logits of one checkpoint whose config.json describes its RoPE in these keys."""
    (folder / "config.json").write_text(json.dumps(CONFIG | rope))
    mx.random.seed(0)
    shapes = tree_flatten(Model(ModelArgs.from_dict(CONFIG)).parameters())
    weights = {name: mx.random.normal(x.shape) * 0.2 for name, x in shapes}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return load_model(folder)[0](mx.arange(1, 65)[None] % 80)


none, old, new = logits({}), logits(OLD), logits({"rope_parameters": ROPE})
print("SEEN rope_theta and rope_scaling change the logits:", not mx.allclose(none, old).item())
print("SEEN rope_parameters changes the logits:", not mx.allclose(none, new).item())
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN rope_theta and rope_scaling change the logits: True
SEEN rope_parameters changes the logits: False
SEEN
