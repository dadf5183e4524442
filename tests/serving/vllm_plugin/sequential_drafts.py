"""A plugin of vLLM with which its V1 runner, the one for CPUs, drafts with DSpark and DFlash 2.

vLLM serves both with its V2 runner alone, which needs a GPU. Their model classes run on a CPU. This plugin lets the
class `DFlashDraftModel` be one of them, by the settings in config.json, and replaces V1's choice of drafts by the walk
from left to right of V2's speculators. So config, weights, attention and the model's own scores are vLLM's; the walk is
written here. Each vLLM process loads it if this folder is on its path.
"""

from typing import Any


def register() -> None:
    """Called by vLLM in every process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.v1.spec_decode.dflash import DFlashProposer

    class DFlashDraftModel(DFlashQwen3ForCausalLM):  # type: ignore[misc]
        def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
            config = vllm_config.speculative_config.draft_model_config.hf_config
            if "selector_rank" in config.dflash_config:
                return DFlash2Qwen3ForCausalLM(vllm_config=vllm_config, prefix=prefix)
            assert not config.sample_from_anchor, "V1 has a block of K + 1 tokens"
            return Qwen3DSparkForCausalLM(vllm_config=vllm_config, prefix=prefix)

    ModelRegistry.register_model("DFlashDraftModel", DFlashDraftModel)
    DFlashProposer._greedy_sample = choose_from_left_to_right


def choose_from_left_to_right(proposer: Any, hidden_states: Any) -> Any:
    """Returns the drafts i64[B * K] for the states of the mask tokens [B * K, H], request by request."""
    import torch

    model, num_drafts = proposer.model, proposer.num_speculative_tokens
    states = hidden_states.unflatten(0, (-1, num_drafts))  # [B, K, H]
    newest = proposer.input_ids[: len(states) * (1 + num_drafts) : 1 + num_drafts].long()  # [B]
    drafts = []
    if hasattr(model, "compute_candidates"):
        ids, logits = (each.unflatten(0, (-1, num_drafts)) for each in model.compute_candidates(hidden_states))
        scores = model.model.candidate_selector(ids, logits, states, newest)  # [B, K, candidate before, candidate]
        chosen = torch.zeros(len(states), 1, dtype=torch.long)
        for step in range(num_drafts):
            chosen = scores[:, step].gather(1, chosen[..., None].expand(-1, -1, scores.shape[-1])).argmax(-1)
            drafts.append(ids[:, step].gather(1, chosen)[:, 0])
        return torch.stack(drafts, 1).flatten()
    logits, previous = model.compute_draft_logits(hidden_states).unflatten(0, (-1, num_drafts)), newest
    for step in range(num_drafts):
        corrected = logits[:, step] + model.markov_bias(model.markov_embed(previous))
        previous = model.map_draft_to_target(corrected.argmax(-1))
        drafts.append(previous)
    return torch.stack(drafts, 1).flatten()
