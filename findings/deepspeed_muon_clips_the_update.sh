#!/usr/bin/env bash
# DeepSpeed's Muon takes shorter steps under ZeRO 1 and 2 than under ZeRO 0, with the same settings.
#
# Versions: DeepSpeed 0.19.8, torch 2.13.0, Python 3.11, on a CPU, one rank, fp32.
# Expected: Muon makes the gradient of a matrix orthogonal, so its step does not depend on the gradient's length, and
#   `gradient_clipping` (1.0 where the config says nothing) changes nothing; the first step is the same under each stage.
# Behaviour: under ZeRO 1 and 2 a gradient is made orthogonal while the partition is filled, and clipped after that. So
#   the clipping limits the norm of the update of all matrices together. An orthogonal matrix of rank r has a norm of
#   about sqrt(r), so every model larger than a toy is clipped at the default, and the rate in use falls with the
#   number and the width of its matrices. Under ZeRO 0 the gradient is clipped before, which Muon does not see.
#   Whoever takes a rate from one stage to another has to set `gradient_clipping` to 0.
# Seen (root mean square of the first matrix's first step, in units of the rate):
#   clipping left out: ZeRO 0 0.0560, ZeRO 1 0.0180, ZeRO 2 0.0180
#   clipping 0:        ZeRO 0 0.0560, ZeRO 1 0.0560, ZeRO 2 0.0560
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet deepspeed==0.19.8 numpy
cat > "$folder/first_step.py" <<'PYTHON'
import sys

import deepspeed
import torch

stage, clipping = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 16, bias=False))
for parameter in model.parameters():
    parameter.use_muon = True
before = model[0].weight.detach().clone()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0}},
}
if clipping != "default":
    config["gradient_clipping"] = float(clipping)
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
engine.backward(engine(inputs).square().mean())
engine.step()
update = (engine.module[0].weight.detach() - before) / 0.01
print(f"RESULT {stage} {clipping} {update.square().mean().sqrt().item():.4f}")
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
for clipping in default 0; do
    for stage in 0 1 2; do
        export MASTER_PORT=$((29671 + stage))
        "$folder/venv/bin/python" "$folder/first_step.py" "$stage" "$clipping" 2>"$folder/errors" | grep RESULT ||
            cat "$folder/errors"
    done
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN' && echo "as described"
RESULT 0 default 0.0560
RESULT 1 default 0.0180
RESULT 2 default 0.0180
RESULT 0 0 0.0560
RESULT 1 0 0.0560
RESULT 2 0 0.0560
SEEN
