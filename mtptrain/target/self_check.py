"""Compares a loaded target, as mtptrain runs it, with the model's own plain forward, before any long work.

So a target is supported if it passes. The texts are short, and windows and chunks are made shorter still while they are
read, so that a text is longer than any of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace

import torch

from mtptrain.target.causal_attention import MaskOf
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError, error_summary

SHORT = 6
"""Windows, chunks and other limits of attention in the check, in tokens."""
LIMITS = ("sliding_window", "attention_chunk_size", "index_topk", "floor_scale")
"""Settings of transformers' configs that limit how far a token sees, or change attention after so many tokens."""
NUM_TOKENS, NUM_PROMPT_TOKENS, NUM_DRAFTS = 16, 9, 3
EXACT, ROUNDED = 1e-3, 0.1
"""Largest difference from the model's own results, in shares of their size: in a model whose weights are all in fp32 at
any token, and at the median token in one that rounds more, where a mixture may choose another expert."""


@torch.no_grad()
def check_target(target: Target) -> None:
    """Compare logits of texts, with and without rejected drafts, with those of the model's own forward."""
    ids = check_texts(target)
    positions = torch.arange(NUM_TOKENS, device=target.device).repeat(len(ids), 1)
    with short_limits(target):
        with refusing_errors(target, "the forward of transformers"), target.attention("eager"):
            own = target.model(input_ids=ids, use_cache=False).logits.to(target.device)
        with refusing_errors(target, "the forward of a text over a cache"):
            whole = target.forward(ids, positions, target.cache(NUM_TOKENS), (len(target.layers),))
            refuse_difference(target, "the logits of a text", target.logits(whole.postnorm_states), own)
            last = whole.read_by((len(target.layers),))[..., 0, :]
            rebuilt = target.parts.logits(target.parts.final_norm(last))
            refuse_difference(target, "the logits of the last stream", rebuilt, own)
            reread = _with_rejected_drafts(target, ids, positions)
            # Only the tokens after the prompt: the median must not be that of a prompt.
            ours, theirs = target.logits(reread[:, NUM_PROMPT_TOKENS:]), own[:, NUM_PROMPT_TOKENS:]
            refuse_difference(target, "the logits after rejected drafts", ours, theirs)


def check_texts(target: Target) -> torch.Tensor:
    """Returns the token ids [2, NUM_TOKENS] of the texts of the check."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.config.vocab_size, (2, NUM_TOKENS), generator=generator).to(target.device)


def _with_rejected_drafts(target: Target, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the post-norm states of texts, whose tokens after the prompt are read after other ones in their place."""
    cache = target.cache(NUM_TOKENS + NUM_DRAFTS)
    states = [target.forward(ids[:, :NUM_PROMPT_TOKENS], positions[:, :NUM_PROMPT_TOKENS], cache).postnorm_states]
    for start in range(NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_DRAFTS):
        drafts = positions[:, :NUM_DRAFTS] + start
        target.forward(ids[:, :NUM_DRAFTS], drafts, cache)
        read = slice(start, min(start + NUM_DRAFTS, NUM_TOKENS))
        states.append(target.forward(ids[:, read], positions[:, read], cache).postnorm_states)
    return torch.cat(states, dim=1)


@contextmanager
def short_limits(target: Target) -> Iterator[None]:
    """Makes windows and chunks of attention at most `SHORT` inside this context."""
    form, places = target.form, [target.config, *target.model.modules()]
    found = [(place, name, getattr(place, name)) for place in places for name in LIMITS if hasattr(place, name)]
    changed = [(place, name, value) for place, name, value in found if isinstance(value, int) and value > SHORT]
    for place, name, _ in changed:
        setattr(place, name, SHORT)
    masks = (mask and MaskOf(*(size and min(size, SHORT) for size in astuple(mask))) for mask in form.masks)
    target.form = replace(form, masks=tuple(masks))
    try:
        yield
    finally:
        target.form = form
        for place, name, value in changed:
            setattr(place, name, value)


@contextmanager
def refusing_errors(target: Target, step: str) -> Iterator[None]:
    """Makes an error of the model's code a refusal of the target, which names the step."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's code may raise anything
        raise UserError(
            f"target.path: {step} must run for a {target.config.model_type}, but reports {error_summary(error)}: "
            "mtptrain cannot run this model; choose another target"
        ) from error


def refuse_difference(target: Target, name: str, ours: torch.Tensor, own: torch.Tensor) -> None:
    """Raises UserError if states or logits [..., D] are not the model's own."""
    size = own.float().norm(dim=-1)
    errors = (ours.float() - own.float()).norm(dim=-1) / size.clamp(min=1e-9)
    is_quantised = getattr(target.config, "quantization_config", None) is not None
    # Not by the logits: some families return them in fp32 in any case.
    dtypes = {weight.dtype for weight in target.model.parameters() if weight.is_floating_point()}
    is_exact = dtypes <= {torch.float32, torch.float64} and not is_quantised
    error, tolerance = float(errors.max() if is_exact else errors.median()), EXACT if is_exact else ROUNDED
    if not error <= tolerance:
        raise UserError(
            f"target.path: {name} must be those of transformers' own forward, to within {tolerance:g}, but differ by "
            f"{error:.2g} for a {target.config.model_type} in {own.dtype}: mtptrain cannot run this model; choose "
            "another target"
        )
