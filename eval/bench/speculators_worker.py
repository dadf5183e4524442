"""Runs EAGLE-3 training steps of vLLM Speculators. Requests on stdin and answers on stdout are JSON lines.

`eval.bench.train` starts this worker with `bench.peer_python`, a Python without mtptrain. The benchmark and this worker
both import `step_memory`. There are two kinds of request:

- `{"device": ..., "hidden_size": ..., "lengths": [...], ...}` builds a model and a batch, trains a few steps, and
  answers with the memory of a step. `lengths` and `prompts` are the numbers of tokens of each document, in all and
  before its answer, `depths` is T, and `autocasts` chooses bf16;
- `{"steps": n}` answers with the seconds that n steps take.
"""

import json
import sys
import time

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from step_memory import tensor_bytes  # beside this script, in the first directory of sys.path
from transformers import LlamaConfig


class Peer:
    """Trains one model on one batch with fp32 weights.

    With `autocasts`, it computes in bf16, as Speculators' trainer does on a GPU.
    """

    def __init__(self, request: dict) -> None:
        hidden_size, vocab_size = request["hidden_size"], request["vocab_size"]
        self.device = torch.device(request["device"])
        layer = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=request["intermediate_size"],
            num_attention_heads=request["num_attention_heads"],
            num_key_value_heads=request["num_key_value_heads"],
            num_hidden_layers=1,
            vocab_size=vocab_size,
            max_position_embeddings=131072,
            attn_implementation="sdpa",
        )
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
        self.autocasts = request["autocasts"]
        dtype = torch.bfloat16 if self.autocasts else torch.float32
        lengths = torch.tensor(request["lengths"])
        num_tokens = int(lengths.sum())
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        batch = {
            "hidden_states": torch.randn(1, num_tokens, 3 * hidden_size, dtype=dtype),
            "verifier_last_hidden_states": torch.randn(1, num_tokens, hidden_size, dtype=dtype),
            "input_ids": torch.randint(0, vocab_size, (1, num_tokens)),
            "document_ids": torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
            "position_ids": positions[None] + 1,
            "loss_mask": (positions >= torch.repeat_interleave(torch.tensor(request["prompts"]), lengths))[None],
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
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        if "hidden_size" in request:
            peer = Peer(request)
            for _ in range(3):
                peer.step()  # allocate optimizer states and warm up
            answer = {"peak_bytes": tensor_bytes(peer.step, peer.device)}
        else:
            assert peer is not None, "the first request must build a model"
            started = time.perf_counter()
            for _ in range(request["steps"]):
                peer.step()
            answer = {"seconds": time.perf_counter() - started}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
