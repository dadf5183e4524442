#!/usr/bin/env bash
# mlx-vlm replaces the embeddings of an EAGLE-3 head by those of the target, without a word.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head.
# Expected: a head whose file has embeddings of its own drafts with them, or is refused.
# Behaviour: `bind` takes the target's table wherever its shape is the same, although a file without `embed_tokens` does not load. A
#   head that was trained with its own embeddings drafts otherwise.
# Seen: other embeddings in the head change no draft; its other tensors, such as the norm, do.
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


def roll(name):
    """Returns a change of one tensor of a head."""
    def change(head):
        part = getattr(head, name)
        part.weight = mx.roll(part.weight, 1, axis=0)
    return change


for name in ("embed_tokens", "norm"):
    print(f"SEEN another {name} in the head: the same drafts {drafts({}, roll(name)) == drafts({})}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN another embed_tokens in the head: the same drafts True
SEEN another norm in the head: the same drafts False
SEEN
