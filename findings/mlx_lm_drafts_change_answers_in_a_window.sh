#!/usr/bin/env bash
# mlx-lm's decoding with a draft model changes greedy answers as soon as a sliding window is full.
#
# Versions: mlx and mlx-cpu 0.32.4, mlx-lm 0.32.2, Python 3.11, Linux; a random Llama of two layers, one with a window of 16 tokens.
# Expected: a refusal, as for caches that cannot be trimmed at all ("Speculative decoding requires a trimmable prompt cache"), or the
#   answers of plain decoding.
# Behaviour: whether the cache can be trimmed is asked once, before the prompt, when that of a window still can. Once it is full,
#   `trim_prompt_cache` does nothing and says nothing, so rejected drafts stay in the keys of all layers.
# Seen: prompts and answers within the window give 10 of 10 equal answers, prompts of 64 tokens fewer than 10; without a window they
#   give 10 of 10 too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cat > "$folder/run.py" <<'PYTHON'
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.llama import Model, ModelArgs

CONFIG = {
    "model_type": "llama", "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "sliding_window": 16,
}
NEW = 40


def model(seed, kind):
    mx.random.seed(seed)
    made = Model(ModelArgs.from_dict(CONFIG | {"layer_types": [kind, "full_attention"]}))
    made.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.3, made.parameters()))
    return made


for length, kind in ((4, "sliding_attention"), (64, "sliding_attention"), (64, "full_attention")):
    target, draft = model(1, kind), model(2, kind)
    equal = 0
    for seed in range(10):
        mx.random.seed(seed)
        prompt = mx.random.randint(1, 80, (length,))
        plain = [int(token) for token, _ in generate_step(prompt, target, max_tokens=NEW if length > 16 else 8)]
        steps = speculative_generate_step(prompt, target, draft, num_draft_tokens=3, max_tokens=len(plain))
        drafted = [int(token) for token, _, _ in steps]
        equal += plain == drafted
    print(f"SEEN prompts of {length} tokens, {kind}: {equal if equal == 10 else 'fewer than 10'} of 10 answers equal")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN prompts of 4 tokens, sliding_attention: 10 of 10 answers equal
SEEN prompts of 64 tokens, sliding_attention: fewer than 10 of 10 answers equal
SEEN prompts of 64 tokens, full_attention: 10 of 10 answers equal
SEEN
