#!/usr/bin/env bash
# mlx-vlm's EAGLE-3 drafts one token a round unless it is asked for more, whatever `block_size` the head's config.json has.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, mlx-vlm 0.7.10, Python 3.11, Linux; a random Qwen3.5 and a random head.
# Expected: without `draft_block_size`, the block of the head's config.json is used, as the help of `--draft-block-size` says ("the
#   drafter's configured block size").
# Behaviour: `block_size` 4 (the newest token and 3 drafts), and `speculative_tokens` 3 of vLLM Speculators, give rounds of one draft:
#   `_eagle3_rounds` takes the smaller of the block and 2 where no size is passed.
# Seen: 1 draft a round with either key, 3 with draft_block_size=4.
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
SPECULATORS = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}


def built(config):
    """Returns a model of random weights."""
    classes = vars(get_model_and_args(dict(config))[0])
    model = classes["Model"](classes["ModelConfig"].from_dict(dict(config)))
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.2 if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    return model


mx.random.seed(0)
target, prompt = built(TARGET), mx.random.randint(1, 80, (1, 32))
settings = {"max_tokens": 32, "temperature": 0.0, "prefill_step_size": None, "draft_kind": "eagle3"}
for name, in_head, more in (
    ("block_size 4", {"block_size": 4}, {}),
    ("speculative_tokens 3", SPECULATORS, {}),
    ("draft_block_size=4", {"block_size": 4}, {"draft_block_size": 4}),
):
    head = built(HEAD | in_head)
    list(generate_step(prompt, target, None, None, draft_model=head, **settings, **more))
    print(f"SEEN {name}: {max(int(each) for each in head.draft_lens)} drafted a round")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN block_size 4: 1 drafted a round
SEEN speculative_tokens 3: 1 drafted a round
SEEN draft_block_size=4: 3 drafted a round
SEEN
