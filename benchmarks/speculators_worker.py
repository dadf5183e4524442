"""Runs EAGLE-3 training steps of vLLM Speculators, with the model and the batch that JSON on stdin describes.

`benchmarks.training_step` starts this worker with a Python without mtptrain. `documents` are pairs of the number of
tokens in a document and in its prompt, `depths` is T, and `autocasts` chooses bf16. The answer, JSON on stdout, is the
memory and the seconds of a step.
"""

import json
import sys
import time
from typing import Any

import torch
from measuring import tensor_bytes  # beside this script, in the first directory of sys.path
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig


class Peer:
    """Trains one model on one batch with fp32 weights.

    With `autocasts`, it computes in bf16, as Speculators' trainer does on a GPU.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.device, self.autocasts = torch.device(request["device"]), request["autocasts"]
        layer = LlamaConfig(**request["target"], num_hidden_layers=1, max_position_embeddings=131_072)
        hidden_size, vocab_size = layer.hidden_size, layer.vocab_size
        torch.manual_seed(0)
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=vocab_size, eagle_aux_hidden_state_layer_ids=[1, 2, 3]
        )
        self.model = Eagle3DraftModel(config).to(self.device)
        for frozen in (self.model.embed_tokens, self.model.lm_head, self.model.verifier_lm_head):
            torch.nn.init.normal_(frozen.weight, std=hidden_size**-0.5)
        self.model.lm_head.weight.requires_grad_(False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        dtype = torch.bfloat16 if self.autocasts else torch.float32
        lengths, prompts = torch.tensor(request["documents"]).T
        num_tokens = int(lengths.sum())
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        batch = {
            "hidden_states": torch.randn(1, num_tokens, 3 * hidden_size, dtype=dtype),
            "verifier_last_hidden_states": torch.randn(1, num_tokens, hidden_size, dtype=dtype),
            "input_ids": torch.randint(0, vocab_size, (1, num_tokens)),
            "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
            "position_ids": positions[None] + 1,
            "loss_mask": (positions >= torch.repeat_interleave(prompts, lengths))[None],
            "ttt_steps": request["depths"],
            "ttt_step_loss_decay": 0.8,
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }
        self.batch = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}

    def step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocasts):
            _, loss, _ = self.model(**self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        assert torch.isfinite(loss), "the peer's loss is not finite"


def main() -> None:
    peer = Peer(json.load(sys.stdin))
    for _ in range(3):
        peer.step()  # allocate optimizer states and warm up
    peak_bytes, started = tensor_bytes(peer.step, peer.device), time.perf_counter()
    peer.step()
    print(json.dumps({"peak_bytes": peak_bytes, "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
