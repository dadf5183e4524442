"""States in eight bits: e4m3 values, with one scale for each token and layer, a power of two.

Such scales lose nothing: three bits of fraction are three bits wherever the point is, and decoding into bf16 is exact.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
GPU_VALUES = 2**26
"""Values that a GPU encodes at a time: their fp32 copy takes 256 MB, for each thread that writes states."""
CACHED_VALUES = 2**18
"""Encoded or decoded at once on a CPU, so that every pass but the first reads its cache."""


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round states to eight bits, on the device that they are on; every device gives the same bits.

    Args:
        states: [..., H], finite.

    Returns:
        Values e4m3 [..., H] and scales f32 [...]; states are values times scales, within a sixteenth of a value.
    """
    values = torch.empty(states.shape, dtype=FP8, device=states.device)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32, device=states.device)
    row_values = max(1, states[:1].numel())
    step = max(1, (CACHED_VALUES if states.device.type == "cpu" else GPU_VALUES) // row_values)
    wide = torch.empty(min(step, len(states)), *states.shape[1:], dtype=torch.float32, device=states.device)
    for start in range(0, len(states), step):
        part = states[start : start + step]
        largest = torch.maximum(part.amax(-1), -part.amin(-1)).float()  # [...]
        _, exponents = torch.frexp(largest / LARGEST)
        exponents.clamp_(min=-126)
        scales[start : start + step] = torch.ldexp(torch.ones_like(largest), exponents)
        inverses = torch.ldexp(torch.ones_like(largest), -exponents)  # powers of two: a product is as exact as a quotient
        torch.mul(part, inverses[..., None], out=wide[: len(part)])
        values[start : start + step].copy_(wide[: len(part)])
    return values, scales


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
