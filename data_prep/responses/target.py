"""Regenerates conversations in batches, with transformers in this process."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import GenerationConfig

from mtptrain.target.model import Target

from .dialogue import Dialogue, Prompt, RegeneratedConversation, Response, Sampling


def generation_config(sampling: Sampling) -> GenerationConfig:
    """Returns the config that samples with `top_k`, then `top_p`, or decodes greedily at temperature 0."""
    is_sampled = sampling.temperature > 0
    chosen = (
        {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k} if is_sampled else {}
    )
    return GenerationConfig(
        do_sample=is_sampled,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=0,
        **chosen,
    )


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Prompt], sampling: Sampling) -> list[Response]:
    """Generate responses to a batch of prompts, padded on the left, with the seed of the first prompt."""
    width, device = max(len(prompt.token_ids) for prompt in prompts), target.device
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)  # [B, S]
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids, device=device)
        attention_mask[row, width - len(prompt.token_ids) :] = 1
    torch.manual_seed(prompts[0].seed)
    # Otherwise `generate` would take other settings, such as penalties, from the checkpoint's generation_config.json.
    target.model.generation_config = GenerationConfig()
    tokens = target.model.generate(
        input_ids, attention_mask=attention_mask, generation_config=generation_config(sampling)
    )
    assert isinstance(tokens, torch.Tensor)
    return [_response(row[width:], sampling.stop_token_ids) for row in tokens.tolist()]


def _response(token_ids: list[int], stop_token_ids: Sequence[int]) -> Response:
    """Returns a response, separated from its end-of-sequence token and without the padding after that."""
    end = next((index for index, token in enumerate(token_ids) if token in stop_token_ids), None)
    if end is None:
        return Response(len(token_ids), True, token_ids)
    return Response(end + 1, False, token_ids[:end], token_ids[end])


def regenerate_with_target(
    target: Target, batches: Iterable[list[Dialogue]], sampling: Sampling
) -> Iterator[RegeneratedConversation]:
    """Regenerate the conversations of each batch turn by turn; finished ones drop out of the batch."""
    for batch in batches:
        while running := [(dialogue, prompt) for dialogue in batch if (prompt := dialogue.next_prompt()) is not None]:
            responses = generate(target, [prompt for _, prompt in running], sampling)
            for (dialogue, _), response in zip(running, responses, strict=True):
                dialogue.add_response(response)
        yield from (dialogue.regenerated for dialogue in batch)
