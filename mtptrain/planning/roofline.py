"""Writes docs/results/roofline.md: a lower bound on the time of a training step on an H100. Needs no GPU.

python -m mtptrain.planning.roofline
"""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from mtptrain.config import TrainConfig
from mtptrain.heads import HEADS
from mtptrain.heads.config import HeadConfig
from mtptrain.planning.costs import MicroBatch, StepCosts, step_costs
from mtptrain.utils.errors import errors_as_lines

PAGE = Path("docs/results/roofline.md")
FLOPS_PER_S, BYTES_PER_S = 989e12, 3.35e12
"""Peak rates of an H100 SXM: dense bf16 FLOP/s and memory bandwidth."""
TOKENS, DEPTHS = 8192, 3
_LLAMA: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
TARGETS = {
    "8B": LlamaConfig(
        **_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    ),
    "70B": LlamaConfig(
        **_LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}
HEAD_SETTINGS: dict[str, dict[str, int]] = {"mtp": {}, "eagle3": {"draft_vocab_size": 32_000}}
TEXT = f"""# Roofline of the training step

The table has the seconds that forward, loss and backward of one micro-batch would take on one H100
at its peaks, {FLOPS_PER_S / 1e12:.0f} TFLOP/s in bf16 and {BYTES_PER_S / 1e12:.2f} TB/s,
if matmuls, elementwise operators and attention ran one after the other. A real GPU reaches only a
share of these rates. The micro-batch is one document of {TOKENS:,} tokens, all supervised, with T = {DEPTHS}
and `train.loss_chunk_rows={{chunk_rows}}`. No GPU is used: operators are counted on tensors without
data. `eager` counts the tensors that every elementwise operator reads and writes. `compiled`
(`train.compile=true`) counts the arguments and results of each fused function once, which is the
least that fused kernels can move.

| target | head | mode | matmul s | elementwise s | attention s | tokens/s at most | elementwise traffic |
|---|---|---|---|---|---|---|---|
{{rows}}

Written by `python -m mtptrain.planning.roofline`.
"""


@errors_as_lines()
def main() -> None:
    chunk_rows = TrainConfig().loss_chunk_rows
    rows = [
        row(
            target,
            head,
            "compiled" if is_compiled else "eager",
            costs(target, HEADS[head].Config(ttt_steps=DEPTHS, **settings), is_compiled),
        )
        for target in TARGETS
        for head, settings in HEAD_SETTINGS.items()
        for is_compiled in (False, True)
    ]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(TEXT.format(chunk_rows=chunk_rows, rows="\n".join(rows)))
    print(PAGE.read_text())


def costs(target: str, head: HeadConfig, is_compiled: bool) -> StepCosts:
    micro_batch = MicroBatch(head, TARGETS[target], torch.bfloat16, [TOKENS], 1.0, TrainConfig().loss_chunk_rows)
    return step_costs(micro_batch, is_compiled)


def row(target: str, head: str, kind: str, step: StepCosts) -> str:
    """Returns one line of the table."""
    attention = step.attention_flops / FLOPS_PER_S
    matmul, elementwise = step.flops / FLOPS_PER_S - attention, step.elementwise_bytes / BYTES_PER_S
    rate = TOKENS / (matmul + elementwise + attention)
    cells = f"{matmul:.4f} | {elementwise:.4f} | {attention:.4f} | {rate:,.0f} | {step.elementwise_bytes / 1e9:,.1f} GB"
    return f"| {target} | {head} | {kind} | {cells} |"


if __name__ == "__main__":
    main()
