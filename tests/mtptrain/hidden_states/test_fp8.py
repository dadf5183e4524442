"""Tests that eight-bit states have the expected rounding error, and that decoding them is exact."""

from itertools import product

import torch

from mtptrain.hidden_states.fp8 import CACHED_VALUES, FP8, LARGEST, decode, encode

EVERY_VALUE = torch.arange(256, dtype=torch.uint8).view(FP8)
FINITE = EVERY_VALUE[~EVERY_VALUE.float().isnan()]


def test_every_value_is_decoded_exactly_at_every_scale() -> None:
    for exponent in (-126, -20, 0, 6, 7, 40, 118):
        scale = torch.tensor(2.0).pow(exponent)
        expected = (FINITE.double() * scale.double()).to(torch.bfloat16)  # bf16 has no step finer than 2^-133
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(decode(FINITE[None], scale[None], dtype)[0], expected.to(dtype))


def test_states_come_back_within_a_sixteenth_of_a_value_and_the_largest_ones_stay_finite() -> None:
    states = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [3.0e38, 1.0], [448.0, -449.0], [1.0, 0.94]])
    values, scales = encode(states)
    assert torch.isfinite(values.float()).all() and torch.isfinite(scales).all() and (scales > 0).all()
    decoded = decode(values, scales, torch.float32)
    assert decoded[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(decoded[2:].abs().amax(1), states[2:].abs().amax(1), rtol=1 / 16, atol=0)


def plain_encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values and scales of all rows at once, divided in fp32."""
    wide = states.float()
    _, exponents = torch.frexp(wide.abs().amax(-1) / LARGEST)
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.clamp(min=-126))
    return (wide / scales[..., None]).to(FP8), scales


def test_states_are_encoded_and_decoded_part_by_part_to_the_bits_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]  # values of every magnitude
    shuffled = every[torch.randperm(len(every), generator=generator)][: 127 * 2 * 256].view(127, 2, 256)
    sizes = torch.exp2(torch.randint(-150, 120, (600, 2, 1), generator=generator))
    near = torch.randn(600, 2, 512, generator=generator) * sizes
    assert near[:, 1].numel() > CACHED_VALUES, "the states must need several parts"
    for states, dtype in product((shuffled, near, near[:, 1], near[:0]), (torch.bfloat16, torch.float32)):
        (values, scales), (expected, expected_scales) = encode(states.to(dtype)), plain_encode(states.to(dtype))
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, expected_scales)
        plain = (expected.float() * expected_scales[..., None]).bfloat16()
        assert torch.equal(decode(values, scales, torch.bfloat16), plain)
