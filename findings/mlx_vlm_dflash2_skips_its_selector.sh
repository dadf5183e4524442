#!/usr/bin/env bash
# mlx-vlm's DFlash 2 skips the head's candidate selector at temperature 0 on Qwen3.5, so that a trained head accepts fewer drafts.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head.
# Expected: greedy drafts are those that the selector chooses, as `draft_block` of the same class chooses them.
# Behaviour: where the target has `speculative_argmax_from_hidden` (Qwen3.5 and some more), the rounds call `draft_block_greedy`, which
#   the class inherits from DFlash: it takes the plain argmax (84 accepted drafts instead of 183 with a tiny trained head).
#   `draft_block_greedy = draft_block` mends it.
# Seen: another selector changes what `draft_block` returns, but not what `draft_block_greedy` returns, nor the accepted drafts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2 requests Pillow
"$folder/venv/bin/pip" install --quiet --no-deps mlx-vlm==0.7.10
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import get_model_and_args, load_model

SIZES = {
    "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}
TARGET = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "tie_word_embeddings": False, "full_attention_interval": 4,
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "eos_token_id": 0, **SIZES,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    },
}
FOR_HEAD = {
    "mask_token_id": 79, "target_layer_ids": [0, 1, 2], "block_size": 4, "conv_kernel_size": 2, "conv_group_size": 16,
    "selector_rank": 8, "selector_top_k": 4,
}
HEAD = {
    "model_type": "qwen3", "architectures": ["DFlash2DraftModel"], "num_hidden_layers": 1, "rope_theta": 10000.0,
    "block_size": 4, "num_target_layers": 4, "dflash_config": FOR_HEAD, **SIZES,
}


def written(name, config):
    """Writes a checkpoint with random weights, and returns its folder."""
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    classes = vars(get_model_and_args(dict(config))[0])
    model = classes["Model"](classes["ModelConfig"].from_dict(json.loads(json.dumps(config))))
    weights = {
        name: mx.random.normal(x.shape) * (0.3 if x.ndim > 1 else 0.1) + (x.ndim == 1)
        for name, x in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


mx.random.seed(1)
target, folder = load_model(written("target", TARGET)), written("head", HEAD)
prompt, states = mx.random.randint(1, 80, (1, 64)), mx.ones((1, 1, 3 * 64))
found = {"draft_block": [], "draft_block_greedy": [], "accepted": []}
for scale in (0, 1, 5):
    head, kind = load_drafter(str(folder))
    head.candidate_selector.successor_codebook.weight = head.candidate_selector.successor_codebook.weight * scale
    settings = {"draft_model": head, "draft_kind": kind, "draft_block_size": 4}
    list(generate_step(prompt, target, None, None, max_tokens=100, temperature=0.0, **settings))
    found["accepted"].append([int(each) for each in head.accept_lens])
    for name in ("draft_block", "draft_block_greedy"):
        drafts = getattr(head, name)(5, states, head.make_cache(), 4, lambda x: mx.argmax(x, axis=-1))
        found[name].append(drafts.tolist())
for name, values in found.items():
    print(f"SEEN {name}: the selector changes it {any(each != values[0] for each in values)}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN draft_block: the selector changes it True
SEEN draft_block_greedy: the selector changes it False
SEEN accepted: the selector changes it False
SEEN
