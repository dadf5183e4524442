"""Encodes and decodes hidden states in eight bits: e4m3 values with a power-of-two scale per token and layer."""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
GPU_VALUES = 2**26
"""Number of values that a GPU encodes at a time. Their fp32 copy takes 268 MB per writer thread."""
CACHED_VALUES = 2**18
"""Number of values that a CPU encodes or decodes at a time. They fit into its cache: only the first pass reads RAM."""


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds finite states [..., H] to eight bits, on their device. All devices compute the same bits.

    Returns values e4m3[..., H] and scales f32[...], whose product is the rounded states. Its relative error is at most
    1/16, except where a value is subnormal in e4m3 (below 2^-6).
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
        inverses = torch.ldexp(torch.ones_like(largest), -exponents)  # exact, because these are powers of two
        torch.mul(part, inverses[..., None], out=wide[: len(part)])
        values[start : start + step].copy_(wide[: len(part)])
    return values, scales


def decode(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns states [..., H] in `dtype` from e4m3 values [..., H] and f32 scales [...]; exact in bf16 or wider."""
    if values.is_cuda:
        return (values.to(torch.bfloat16) * scales.to(torch.bfloat16)[..., None]).to(dtype)
    states = torch.empty(values.shape, dtype=torch.bfloat16)
    decode_into(states, values, scales)
    return states.to(dtype)


def decode_into(out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Decode e4m3 values [..., H] with f32 scales [...] into contiguous bf16 [..., H], all on the CPU.

    This is faster than PyTorch's conversion from e4m3: it shifts the bits to their position in bf16 and then
    multiplies by 2^120, because the exponent biases of the two formats, 127 and 7, differ by 120.
    """
    rows, row_values, row_scales = out.flatten(0, -2), values.flatten(0, -2), scales.flatten()[:, None]
    is_small = bool((scales < 2**7).all())  # otherwise the product of the two factors overflows bf16
    factors = (row_scales * 2.0**120 if is_small else row_scales).to(torch.bfloat16)
    step = max(1, CACHED_VALUES // out.shape[-1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        part.view(torch.int16).copy_(row_values[start : start + step].view(torch.int8)).mul_(16).bitwise_and_(-0x7810)
        if not is_small:
            part.mul_(2.0**120)
        part.mul_(factors[start : start + step])
