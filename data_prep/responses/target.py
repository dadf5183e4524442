"""The target in this process, with transformers: answers to batches of prompts."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import GenerationConfig

from mtptrain.target.model import Target

from .dialogue import Answer, AnsweredConversation, Dialogue, Prompt, Sampling


def generation_config(sampling: Sampling) -> GenerationConfig:
    """Sampling from the `top_k` most likely tokens, and of these from the first that hold `top_p` of the mass."""
    is_sampled = sampling.temperature > 0
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k} if is_sampled else {}
    return GenerationConfig(
        do_sample=is_sampled,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=0,
        **chosen,
    )


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Prompt], sampling: Sampling) -> list[Answer]:
    """Answer prompts together, padded on their left; the seed of the first is that of the batch."""
    width, device = max(len(prompt.token_ids) for prompt in prompts), target.device
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)  # [B, S]
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids, device=device)
        attention_mask[row, width - len(prompt.token_ids) :] = 1
    torch.manual_seed(prompts[0].seed)
    # What the settings leave open would come from the checkpoint's own generation_config.json: penalties, say.
    target.model.generation_config = GenerationConfig()
    tokens = target.model.generate(input_ids, attention_mask=attention_mask, generation_config=generation_config(sampling))
    assert isinstance(tokens, torch.Tensor)
    return [_answer(row[width:], sampling.stop_token_ids) for row in tokens.tolist()]


def _answer(token_ids: list[int], stop_token_ids: Sequence[int]) -> Answer:
    """Cut what pads the batch behind the first token that ends an answer."""
    end = next((place for place, token in enumerate(token_ids) if token in stop_token_ids), None)
    if end is None:
        return Answer(len(token_ids), True, token_ids)
    return Answer(end + 1, False, token_ids[:end], token_ids[end])


def answer_with_target(target: Target, batches: Iterable[list[Dialogue]], sampling: Sampling) -> Iterator[AnsweredConversation]:
    """Answer the conversations of each batch turn by turn; those that have ended leave it."""
    for batch in batches:
        while asked := [(dialogue, prompt) for dialogue in batch if (prompt := dialogue.next_prompt()) is not None]:
            answers = generate(target, [prompt for _, prompt in asked], sampling)
            for (dialogue, _), answer in zip(asked, answers, strict=True):
                dialogue.take(answer)
        yield from (dialogue.answered for dialogue in batch)
