#!/usr/bin/env bash
# Speculators' accuracy of a head with a draft vocabulary is 1 where a server would accept less than a quarter of its drafts.
#
# Versions: speculators 0.9.0, torch 2.13.0, transformers 5.19.0, Python 3.11, on a CPU.
# Expected: `full_acc_0` is the share of positions at which the draft is the target's greedy token, so a position
#   whose greedy token the draft vocabulary lacks counts as wrong, because no draft can be accepted there.
# Behaviour: the target's logits are computed by rows of its lm_head that the draft vocabulary has, and their argmax is
#   what a draft is compared with. It is the best token that the head can say, not the token that the target says, and no
#   metric tells how often these differ. Training is right to do so, since the loss is the divergence within that
#   vocabulary; the accuracy is not an acceptance, and shrinking the vocabulary raises it. Whoever chooses a size of the
#   vocabulary by it chooses the smallest.
# Seen (one document of 48 tokens learnt by heart, vocabulary 64, draft vocabulary 8, counted on the document as the
#   trainer counts it): full_acc_0 1.00, drafts that are the target's greedy token 9 of 47
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet speculators==0.9.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio # unused here, and may be built for another torch
cat > "$folder/learnt_by_heart.py" <<'PYTHON'
import sys
from collections import Counter

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, DRAFT_VOCAB, TOKENS = 64, 8, 48
torch.manual_seed(0)
sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, tie_word_embeddings=False)).eval()
target.save_pretrained(sys.argv[1])
ids = torch.randint(VOCAB, (1, TOKENS))
before_norm = []
target.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
with torch.no_grad():
    output = target(ids, output_hidden_states=True)
greedy = output.logits[0, 1:].argmax(-1)  # what the target says after the tokens that the head has read
offsets, in_draft_vocab = build_vocab_mappings_from_distribution(Counter(ids[0].tolist()), DRAFT_VOCAB, VOCAB)
head = Eagle3DraftModel.from_training_args(
    LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False),
    t2d=in_draft_vocab,
    d2t=offsets,
    draft_vocab_size=DRAFT_VOCAB,
    norm_before_residual=False,
    ttt_steps=1,
    verifier_name_or_path=sys.argv[1],
    target_layer_ids=[1, 2, 3],
    draft_attn_impl="eager",
)
batch = {
    "hidden_states": torch.cat([output.hidden_states[layer][:, :-1] for layer in (1, 2, 3)], dim=-1),
    "input_ids": ids[:, 1:],
    "document_ids": torch.zeros(1, TOKENS - 1, dtype=torch.long),
    "loss_mask": torch.ones(1, TOKENS - 1, dtype=torch.bool),
    "verifier_last_hidden_states": before_norm[0][:, 1:],
}
optimizer = torch.optim.AdamW([weight for weight in head.parameters() if weight.requires_grad], 1e-2)
for _ in range(400):
    drafts, loss, metrics = head(**batch, ttt_steps=1, loss_config=resolve_loss_config("kl_div", "eager"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
accuracy = metrics["full_acc_0_sum"].item() / metrics["full_acc_0_total"].item()
drafted = drafts[0][0] + offsets[drafts[0][0]]
print(f"full_acc_0 {accuracy:.2f}, drafts that are the target's greedy token {int((drafted == greedy).sum())} of 47")
PYTHON
"$folder/venv/bin/python" "$folder/learnt_by_heart.py" "$folder/target" 2>"$folder/errors" | tee "$folder/seen" ||
    cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
full_acc_0 1.00, drafts that are the target's greedy token 9 of 47
SEEN
