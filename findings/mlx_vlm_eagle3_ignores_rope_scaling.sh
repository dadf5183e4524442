#!/usr/bin/env bash
# mlx-vlm's EAGLE-3 heads ignore the scaling of their RoPE and `partial_rotary_factor`, without a word.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head.
# Expected: a head rotates as its `rope_parameters` say, as in vLLM, or is refused.
# Behaviour: the config takes `rope_theta` alone of them, and the attention rotates whole heads by plain RoPE. A head with
#   the scaling of Llama 3 drafts otherwise than it was trained.
# Seen: another rope_theta changes the drafts; the other entries do not.
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


def drafts(layer, change=lambda head: None):
    """Returns the drafts of all rounds by a head with one set of weights."""
    mx.random.seed(1)
    head, found = built(HEAD | {"transformer_layer_config": HEAD["transformer_layer_config"] | layer}), []
    change(head)
    draft_block = head.draft_block
    object.__setattr__(head, "draft_block", lambda *given, **named: found.append(draft_block(*given, **named)) or found[-1])
    list(generate_step(prompt, target, None, None, draft_model=head, **settings))
    return [each.tolist() for each in found]


mx.random.seed(0)
target, prompt = built(TARGET), mx.random.randint(1, 80, (1, 32))
settings = {"max_tokens": 24, "temperature": 0.0, "prefill_step_size": None, "draft_kind": "eagle3", "draft_block_size": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
plain = {"rope_type": "default", "rope_theta": 10000.0}
for name, rope in (
    ("rope_theta 100", {"rope_theta": 100.0}),
    ("linear, factor 8", {"rope_type": "linear", "factor": 8.0}),
    ("llama3", LLAMA3),
    ("partial_rotary_factor 0.25", {"partial_rotary_factor": 0.25}),
):
    print(f"SEEN {name}: the same drafts {drafts({'rope_parameters': plain | rope}) == drafts({'rope_parameters': plain})}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN rope_theta 100: the same drafts False
SEEN linear, factor 8: the same drafts True
SEEN llama3: the same drafts True
SEEN partial_rotary_factor 0.25: the same drafts True
SEEN
