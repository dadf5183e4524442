"""Regenerates conversations in batches, with transformers in this process."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from mtptrain.decoding.sampler import History, Sampler
from mtptrain.target.model import Target

from .dialogue import Dialogue, Prompt, RegeneratedConversation, Response, Sampling

SHARE_TO_DROP = 1 / 8
"""Dropping finished responses copies the cache, which is worth it once they are this share of the batch."""


@torch.no_grad()
def generate(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, on_step: Callable[[int], None]
) -> list[Response]:
    """Generate responses to a batch of prompts, with the seed of the first prompt.

    Finished responses leave the batch once they are a `SHARE_TO_DROP` of it, so that the target no longer reads them.
    After each step `on_step` gets the number of new tokens.
    """
    # 1. The target reads the prompts, padded on the right, and chooses the first token of each response.
    sampler = Sampler(seed=prompts[0].seed, **sampling.settings)
    lengths, device = torch.tensor([len(prompt.token_ids) for prompt in prompts]), target.device
    padded = pad_sequence([torch.tensor(prompt.token_ids) for prompt in prompts], batch_first=True)  # [B, S]
    cache = target.cache(padded.shape[1] + sampling.max_new_tokens, lengths.tolist())
    states = target.forward(
        padded.to(device), torch.arange(padded.shape[1], device=device).expand(len(prompts), -1), cache
    )
    last = states.postnorm_states[torch.arange(len(prompts), device=device), (lengths - 1).to(device)]  # [B, H]
    responses: list[list[int]] = [[] for _ in prompts]
    rows = torch.arange(len(prompts))  # the prompts that are still in the batch

    def choose(logits: torch.Tensor) -> torch.Tensor:
        """Returns the next token [B] of each row."""
        if sampler.changes_logits:
            texts = [[*prompts[row].token_ids, *responses[row]] for row in rows.tolist()]
            tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
            num_tokens = torch.tensor([len(text) for text in texts], device=device)
            history = History.of(tokens, lengths[rows].to(device), num_tokens)
            logits = sampler.processed(logits[:, None], history)[:, 0]
        return sampler.choose(logits).cpu()

    newest = choose(target.logits(last))
    while True:
        # 2. Append the newest token of each response that has not ended.
        grown = [
            (row, token)
            for row, token in zip(rows.tolist(), newest.tolist(), strict=True)
            if not _has_ended(responses[row], sampling)
        ]
        for row, token in grown:
            responses[row].append(token)
        on_step(len(grown))
        is_running = torch.tensor([not _has_ended(responses[row], sampling) for row in rows.tolist()])
        if not is_running.any():
            return [
                Response(ids[:-1], ids[-1:], False) if ids[-1] in sampling.stop_token_ids else Response(ids, [], True)
                for ids in responses
            ]
        if (~is_running).float().mean() >= SHARE_TO_DROP:
            rows, newest = rows[is_running], newest[is_running]
            cache.select(is_running)
        # 3. The target reads the newest tokens and chooses the next ones.
        positions = torch.tensor([int(lengths[row]) + len(responses[row]) - 1 for row in rows.tolist()], device=device)
        states = target.forward(newest[:, None].to(device), positions[:, None], cache)
        newest = choose(target.logits(states.postnorm_states[:, 0]))


def _has_ended(tokens: Sequence[int], sampling: Sampling) -> bool:
    return len(tokens) == sampling.max_new_tokens or bool(tokens and tokens[-1] in sampling.stop_token_ids)


def regenerate_with_target(
    target: Target, batches: Iterable[list[Dialogue]], sampling: Sampling, on_step: Callable[[int], None]
) -> Iterator[RegeneratedConversation]:
    """Regenerate the conversations of each batch turn by turn; finished ones drop out of the batch."""
    for batch in batches:
        while running := [(dialogue, prompt) for dialogue in batch if (prompt := dialogue.next_prompt()) is not None]:
            responses = generate(target, [prompt for _, prompt in running], sampling, on_step)
            for (dialogue, _), response in zip(running, responses, strict=True):
                dialogue.add_response(response)
        yield from (dialogue.regenerated for dialogue in batch)
