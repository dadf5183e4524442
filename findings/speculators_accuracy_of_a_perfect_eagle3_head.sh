#!/usr/bin/env bash
# Speculators' accuracies of an EAGLE-3 head are far below 1 for a head that is never wrong, more so for short answers.
#
# Versions: speculators 0.9.0, torch 2.13.0, transformers 5.19.0, Python 3.11, on a CPU.
# Expected: a head whose logits are the target's own at every step of training-time test has `full_acc_k` and
#   `cond_acc_k` of 1 at every step k, since each of its drafts is the target's token.
# Behaviour: the mask of correct drafts starts as the loss mask of the position at which a draft starts, and is combined
#   with the loss mask of the position that step k predicts, k later. An answer of n supervised tokens has n - k pairs
#   with both ends inside, but the denominators count n: for `cond_acc_k` all starts, for `full_acc_k` all predictions.
#   So an answer loses k drafts at step k as if they were wrong. The value falls with the length of the answers, not with
#   the head: heads cannot be compared across datasets, and a product of the conditional accuracies is no acceptance.
# Seen (correct / counted, answers of 4 and 6 tokens, then one of 200):
#   4 and 6 tokens: step 0 10/10, step 1 8/10, step 2 6/10, step 3 4/10
#   200 tokens:     step 0 200/200, step 1 199/200, step 2 198/200, step 3 197/200
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet speculators==0.9.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio # unused here, and may be built for another torch
cat > "$folder/perfect.py" <<'PYTHON'
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.metrics import compute_metrics


def show(title: str, answers: list[tuple[int, int]], length: int) -> None:
    targets = torch.randn(1, length, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, length, dtype=torch.bool)
    for start, end in answers:
        mask[0, start:end] = True
    correct_so_far, parts = mask.clone(), []
    for step in range(4):
        logits = torch.cat([targets[:, step:], torch.zeros(1, step, 16)], dim=1)  # what the target says, step by step
        _, metrics = compute_metrics(
            logits, targets, mask, correct_so_far, step, 1.0, resolve_loss_config("kl_div", "eager")
        )
        parts.append(f"{int(metrics[f'cond_acc_{step}_sum'])}/{int(metrics[f'cond_acc_{step}_total'])}")
    print(title, *parts)


show("short", [(2, 6), (12, 18)], 40)
show("long", [(2, 202)], 240)
PYTHON
"$folder/venv/bin/python" "$folder/perfect.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN' && echo "as described"
short 10/10 8/10 6/10 4/10
long 200/200 199/200 198/200 197/200
SEEN
