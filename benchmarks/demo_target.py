"""Trains the demo target, a 6M-parameter Llama, or a smaller draft model for it, on the Python standard library.

The result ships in `mtptrain/demo_target/` so that `make demo` needs no network. Reads the `.py` files of the running
Python's standard library, and writes the tokenizer, config, bf16 weights and `figures.json` (data split, training,
held-out loss by position).

    python -m benchmarks.demo_target --output-dir mtptrain/demo_target
    python -m benchmarks.demo_target --output-dir runs/small_model --draft-for mtptrain/demo_target
    python -m benchmarks.demo_target --output-dir runs/deep --hidden-size 192 --layers 12
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_prep.text_files import STANDARD_LIBRARY, read_text_files
from mtptrain.data.prompt_files import is_held_out
from mtptrain.utils.errors import UserError, errors_as_lines

# Files that are not part of the library, or differ between machines. The recipe quickstart excludes them too.
EXCLUDE = ("site-packages/*", "dist-packages/*", "*_sysconfigdata_*")
VOCAB_SIZE = 4096
CONTEXT_TOKENS = 2048
END_OF_TEXT = "<|endoftext|>"
# A user turn becomes a docstring and the assistant turn the code below it, which resembles the training text.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|endoftext|>' }}{% endgeneration %}"
    "{% else %}{{ '\"\"\"' + message['content'] + '\"\"\"\\n' }}{% endif %}"
    "{% endfor %}"
)

PEAK_LR = 4e-3
BATCH_TOKENS = 16_384
MICRO_BATCH_TOKENS = 4_096
WARMUP_FRACTION, DECAY_FRACTION = 0.02, 0.5


@dataclass(frozen=True)
class Phase:
    """Describes a training schedule, which has fresh optimizer states and a learning rate that ends at zero."""

    tokens: int
    row_tokens: dict[float, int]
    """Tokens per row, keyed by the fraction of the phase at which that length starts."""
    lr_scale: float


# Short rows are cheap, but a model fails beyond the length of its rows, so training ends with rows of the whole
# context. The last positions of a row are trained least, so a short second phase uses rows longer than the context that
# the model supports.
PHASES = (
    Phase(28_000_000, {0.0: 256, 0.5: 512, 0.75: CONTEXT_TOKENS}, lr_scale=1.0),
    Phase(800_000, {0.0: 3 * CONTEXT_TOKENS // 2}, lr_scale=0.08),
)
DRAFT_PHASES = (Phase(4_000_000, {0.0: 256}, lr_scale=1.0),)
# Generated files of the library: documentation as one string, and character tables.
GENERATED = ("pydoc_data/*", "encodings/*")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of 4,096 tokens, with `<|endoftext|>` as its only special token (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def demo_config(hidden_size: int, num_layers: int) -> LlamaConfig:
    heads = hidden_size // 64
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    """Returns the token ids of each text, after `<|endoftext|>`."""
    return [np.array([0, *ids], dtype=np.int32) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def row_batches(documents: list[np.ndarray], row_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches of rows [B, row_tokens] endlessly, cut from shuffled and concatenated documents."""
    epoch = 0
    while True:
        rng = np.random.default_rng([seed, epoch])
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        start = int(rng.integers(row_tokens))
        rows = stream[start : start + (len(stream) - start) // row_tokens * row_tokens].reshape(-1, row_tokens)
        rows = rows[rng.permutation(len(rows))]
        batch_rows = BATCH_TOKENS // row_tokens
        for i in range(0, len(rows) - batch_rows + 1, batch_rows):
            yield torch.from_numpy(rows[i : i + batch_rows]).long()
        epoch += 1


def train(model: LlamaForCausalLM, documents: list[np.ndarray], phase: Phase, seed: int) -> None:
    """Trains bf16 weights with fp32 master copies: Muon for the matrices of the layers, AdamW for the rest."""
    model.bfloat16()
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    embeddings, *rest = masters  # Muon's updates are scaled to the RMS of AdamW's, so the learning rates are equal
    vectors = [master for master in rest if master.ndim == 1]
    matrices = [master for master in rest if master.ndim == 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([embeddings, *vectors], lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]

    def loss_sum(rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    compiled_loss_sum = torch.compile(loss_sum, dynamic=False)
    num_steps = phase.tokens // BATCH_TOKENS
    row_tokens_from = {int(num_steps * fraction): row_tokens for fraction, row_tokens in phase.row_tokens.items()}
    bar = tqdm(range(num_steps), unit="step", desc="demo target")
    for step in bar:
        if step in row_tokens_from:
            batches = row_batches(documents, row_tokens_from[step], seed + step)
        rows = next(batches)
        total = 0.0
        for micro_batch in rows.split(max(1, MICRO_BATCH_TOKENS // rows.shape[1])):
            loss = compiled_loss_sum(micro_batch) / (rows.shape[0] * (rows.shape[1] - 1))
            loss.backward()
            total += loss.item()
        progress = (step + 1) / num_steps  # the learning rate warms up, stays, then falls to zero
        scale = phase.lr_scale * min(1.0, progress / WARMUP_FRACTION, (1.0 - progress) / DECAY_FRACTION)
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = PEAK_LR * scale
            optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        if not math.isfinite(total):
            raise UserError(f"demo target: the loss must be finite, but is {total} at step {step}; lower PEAK_LR")
        bar.set_postfix(loss=f"{total:.3f}", tokens=f"{(step + 1) * BATCH_TOKENS / 1e6:.1f}M")


@torch.no_grad()
def token_losses(model: LlamaForCausalLM, ids: np.ndarray) -> torch.Tensor:
    """Returns the loss of each token but the first, in nats."""
    tokens = torch.from_numpy(ids).long()
    return F.cross_entropy(model(tokens[None, :-1], use_cache=False).logits[0].float(), tokens[1:], reduction="none")


def loss_by_position(model: LlamaForCausalLM, documents: list[np.ndarray]) -> dict[str, object]:
    """Returns the mean loss by position, over *the same tokens at every position*.

    Windows of the whole context start every 256 tokens of the held-out stream, so that position bucket b of window w
    scores block w + b of the stream. Only blocks that every bucket scores count.
    """
    stream, buckets = np.concatenate(documents), CONTEXT_TOKENS // 256
    windows = [stream[start : start + CONTEXT_TOKENS + 1] for start in range(0, len(stream) - CONTEXT_TOKENS, 256)]
    bar = tqdm(windows, desc="held-out loss", unit="window")
    losses = torch.stack([token_losses(model, window).view(buckets, 256).mean(1) for window in bar])
    num_blocks = len(losses) - buckets + 1
    fine = [losses[buckets - 1 - b :, b][:num_blocks].mean().item() for b in range(buckets)]
    ranges = {"0-255": fine[:1], "256-511": fine[1:2], "512-1023": fine[2:4], "1024-2047": fine[4:]}
    return {
        "nats_per_token": {name: round(sum(found) / len(found), 4) for name, found in ranges.items()},
        "nats_per_token_by_256_positions": [round(loss, 4) for loss in fine],
        "tokens_per_256_positions": num_blocks * 256,
    }


@errors_as_lines()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--draft-for", type=Path, help="train a small model with the tokenizer of this target")
    parser.add_argument("--hidden-size", type=int, help="a multiple of 64; by default 256, or 128 with --draft-for")
    parser.add_argument("--layers", type=int, help="decoder layers; by default 6, or 2 with --draft-for")
    args = parser.parse_args()
    if args.draft_for is not None and args.output_dir.resolve() == args.draft_for.resolve():
        parser.error("--draft-for: must differ from --output-dir")
    is_draft = args.draft_for is not None
    hidden_size, layers = args.hidden_size or (128 if is_draft else 256), args.layers or (2 if is_draft else 6)
    if hidden_size < 64 or hidden_size % 64:
        parser.error(f"--hidden-size: must be a multiple of 64, but is {hidden_size}")
    make(args.output_dir, args.draft_for, demo_config(hidden_size, layers), DRAFT_PHASES if is_draft else PHASES)


def make(output_dir: Path, draft_for: Path | None, config: LlamaConfig, phases: tuple[Phase, ...]) -> None:
    """Train a model, and write it with its tokenizer and figures."""
    torch.manual_seed(0)
    texts, _ = read_text_files([STANDARD_LIBRARY], "*.py", EXCLUDE)
    held_out = {name for name in texts if is_held_out(name, 0.05)}
    source = [text for name, text in texts.items() if name in held_out and not any(fnmatch(name, x) for x in GENERATED)]
    training = [text for name, text in texts.items() if name not in held_out]
    if draft_for is None:
        tokenizer = train_tokenizer(training)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(draft_for)
        if len(tokenizer) != VOCAB_SIZE:
            raise UserError(
                f"--draft-for: must be a demo target, with {VOCAB_SIZE} tokens, but has {len(tokenizer)}; correct it"
            )
    tokenizer.save_pretrained(output_dir)
    documents = encode(tokenizer, training)
    print(f"{len(documents)} training files, {sum(map(len, documents)):,} tokens")
    model = LlamaForCausalLM(config)
    for number, phase in enumerate(phases):
        train(model, documents, phase, seed=number)
        model.save_pretrained(output_dir)
    figures = {
        "python": sys.version.split()[0],
        "training": {
            "files": len(training),
            "tokens_in_files": sum(map(len, documents)),
            "tokens_seen": sum(phase.tokens // BATCH_TOKENS * BATCH_TOKENS for phase in phases),
        },
        "held_out_source_by_position": loss_by_position(model, encode(tokenizer, source)),
    }
    (output_dir / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
