#!/usr/bin/env bash
# mlx-vlm's EAGLE-3 head gets one token of the prompt, beside the states of all of them, so it drafts worse for a Qwen3.5 target.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head, a prompt of
#   32 tokens.
# Expected: `prefill_from_target_hidden` gets the prompt's 32 tokens and their 32 states, as EAGLE-3 is trained.
# Behaviour: `generate_step` reads the prompt in chunks even if it fits into one, and keeps the last token alone for the head, which
#   pairs it with the state of position 0. Nothing is said, and answers stay right; a trained head accepts fewer drafts (117 instead of
#   132 with a tiny one). `prefill_step_size=None` mends it in Python; the command line and the server have no such choice.
# Seen: "1 of 32 tokens with 32 states" by default, and "32 of 32 tokens" with prefill_step_size=None.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2 requests Pillow
"$folder/venv/bin/pip" install --quiet --no-deps mlx-vlm==0.7.10
cat > "$folder/run.py" <<'PYTHON'
import mlx.core as mx
from mlx.utils import tree_map
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import get_model_and_args

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
HEAD = {
    "model_type": "eagle3", "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **SIZES},
    "draft_vocab_size": 80, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def built(config):
    """Returns a model of random weights."""
    classes = vars(get_model_and_args(dict(config))[0])
    model = classes["Model"](classes["ModelConfig"].from_dict(dict(config)))
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.2 if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    return model


mx.random.seed(0)
target, head = built(TARGET), built(HEAD)
prompt = mx.random.randint(1, 80, (1, 32))
prefill = head.prefill_from_target_hidden


def seen(ids, states, *rest, **more):
    print(f"SEEN {name}: {ids.shape[1]} of 32 tokens with {states.shape[1]} states")
    return prefill(ids, states, *rest, **more)


object.__setattr__(head, "prefill_from_target_hidden", seen)
drafting = {"draft_model": head, "draft_kind": "eagle3", "draft_block_size": 4}
for name, more in (("default", {}), ("prefill_step_size=None", {"prefill_step_size": None})):
    list(generate_step(prompt, target, None, None, max_tokens=8, temperature=0.0, **drafting, **more))
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN default: 1 of 32 tokens with 32 states
SEEN prefill_step_size=None: 32 of 32 tokens with 32 states
SEEN
