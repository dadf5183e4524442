"""States in eight bits: e4m3 values, with one scale for each token and layer, a power of two.

Such scales lose nothing: three bits of fraction are three bits wherever the point is, and decoding into bf16 is exact.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
CACHED_VALUES = 2**18
"""Decoded at once on a CPU, so that every pass but the first reads its cache."""


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round states to eight bits.

    Args:
        states: [..., H], finite.

    Returns:
        Values e4m3 [..., H] and scales f32 [...]; states are values times scales, within a sixteenth of a value.
    """
    wide = states.float()
    _, exponents = torch.frexp(wide.abs().amax(-1) / LARGEST)  # [...]
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.clamp(min=-126))
    return (wide / scales[..., None]).to(FP8), scales


def decode(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States [..., H] in `dtype`, exact from bf16 upwards, from values e4m3 [..., H] and scales f32 [...]."""
    if values.is_cuda:
        return (values.to(torch.bfloat16) * scales.to(torch.bfloat16)[..., None]).to(dtype)
    states = torch.empty(values.shape, dtype=torch.bfloat16)
    decode_into(states, values, scales)
    return states.to(dtype)


def decode_into(out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Decode values e4m3 [..., H] with scales f32 [...] into contiguous bf16 [..., H], all on the CPU.

    Faster there than its conversion from e4m3: the bits are moved to where bf16 has them, and 2^120 corrects the exponent.
    """
    rows, row_values, row_scales = out.flatten(0, -2), values.flatten(0, -2), scales.flatten()[:, None]
    is_small = bool((scales < 2**7).all())  # else the product of both factors would be beyond bf16
    factors = (row_scales * 2.0**120 if is_small else row_scales).to(torch.bfloat16)
    step = max(1, CACHED_VALUES // out.shape[-1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        part.view(torch.int16).copy_(row_values[start : start + step].view(torch.int8)).mul_(16).bitwise_and_(-0x7810)
        if not is_small:
            part.mul_(2.0**120)
        part.mul_(factors[start : start + step])
