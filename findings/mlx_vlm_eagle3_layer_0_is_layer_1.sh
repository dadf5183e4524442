#!/usr/bin/env bash
# mlx-vlm gives an EAGLE-3 head that reads the embeddings (layer id 0) the stream after the first layer instead, without a word.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head.
# Expected: `eagle_aux_hidden_state_layer_ids` k is the stream after k decoder layers, as in vLLM, so that id 0 is the embeddings; or a
#   refusal of id 0.
# Behaviour: the config turns ids into layers by `max(id - 1, 0)`, so that ids 0 and 1 name the output of the same layer. A head that
#   was trained with the embeddings drafts otherwise (126 accepted drafts instead of 141 with a tiny one).
# Seen: ids 0, 3, 4 and ids 1, 3, 4 give the head the same states, and ids 2, 3, 4 others.
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
    "draft_vocab_size": 80,
}


def built(config):
    """Returns a model of random weights."""
    classes = vars(get_model_and_args(dict(config))[0])
    model = classes["Model"](classes["ModelConfig"].from_dict(dict(config)))
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.2 if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    return model


mx.random.seed(0)
target, prompt = built(TARGET), mx.random.randint(1, 80, (1, 32))
settings = {"max_tokens": 2, "temperature": 0.0, "prefill_step_size": None, "draft_kind": "eagle3", "draft_block_size": 4}
found = {}
for first in (0, 1, 2):
    head = built(HEAD | {"eagle_aux_hidden_state_layer_ids": [first, 3, 4]})
    object.__setattr__(head, "prefill_from_target_hidden", lambda ids, states, *rest, **more: found.update({first: states}))
    list(generate_step(prompt, target, None, None, draft_model=head, **settings))
for first in (0, 2):
    print(f"SEEN ids {first}, 3, 4 and 1, 3, 4: the same states {mx.array_equal(found[first], found[1]).item()}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN ids 0, 3, 4 and 1, 3, 4: the same states True
SEEN ids 2, 3, 4 and 1, 3, 4: the same states False
SEEN
