#!/usr/bin/env bash
# mlx-vlm's MTP head of Qwen3.5 keeps the keys that accepted drafts got while drafting, where its EAGLE-3 head computes them anew.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; heads of random weights, random states.
# Expected: after a round, accepted tokens are run again with the target's states, which are known by then, as vLLM does, and as the
#   EAGLE-3 class of the same package does. An MTP module is trained on the target's states, not on its own.
# Behaviour: `accept_verified_tokens` trims only the rejected drafts, and runs the head for the newest token alone. Keys of accepted
#   drafts stay those of the head's own states, so that later drafts differ (302 accepted instead of 303 with a tiny head, and other
#   rounds in 8 of 20 answers).
# Seen: with 2 of 3 drafts accepted, EAGLE-3 runs 3 tokens, MTP 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2 requests Pillow
"$folder/venv/bin/pip" install --quiet --no-deps mlx-vlm==0.7.10
cat > "$folder/run.py" <<'PYTHON'
import mlx.core as mx
from mlx.utils import tree_map
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
EAGLE3 = {
    "model_type": "eagle3", "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **SIZES},
    "draft_vocab_size": 80, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}
MTP = {"model_type": "qwen3_5_mtp", "text_config": TARGET | {"mtp_num_hidden_layers": 1}, "block_size": 4}


def built(config):
    """Returns a model of random weights."""
    classes = vars(get_model_and_args(dict(config))[0])
    model = classes["Model"](classes["ModelConfig"].from_dict(dict(config)))
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.2 if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    return model


mx.random.seed(0)
target, ids = built(TARGET), mx.random.randint(1, 80, (1, 8))
greedy = lambda logits: mx.argmax(logits, axis=-1)
for name, config, width in (("eagle3", EAGLE3, 3 * 64), ("qwen3_5_mtp", MTP, 64)):
    head = built(config)
    cache = head.reset(target)
    head.prefill_from_target_hidden(ids, mx.random.normal((1, 8, width)), 5, greedy)
    drafts = head.draft_block(5, mx.random.normal((1, 1, width)), cache, 4, greedy)
    forward, run = head._forward_tokens, []
    object.__setattr__(head, "_forward_tokens", lambda tokens, *rest: run.append(tokens.shape[1]) or forward(tokens, *rest))
    head.accept_verified_tokens(mx.random.normal((1, 4, width)), drafts, 2, [*drafts[0, :2].tolist(), 7], greedy)
    print(f"SEEN {name}: runs {sum(run)} of 2 accepted drafts and the newest token, and has {cache[0].offset} keys")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN eagle3: runs 3 of 2 accepted drafts and the newest token, and has 11 keys
SEEN qwen3_5_mtp: runs 1 of 2 accepted drafts and the newest token, and has 11 keys
SEEN
