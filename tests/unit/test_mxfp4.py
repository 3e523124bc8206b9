"""MXFP4: exact in one direction, the best possible block in the other, and the same bytes again where nothing is lost."""

import math

import pytest
import torch

from megatron_gptoss.checkpoint.mxfp4 import MAGNITUDES, Loss, dequantise, packed_shapes, quantise


def random_packed(rows: int, blocks: int, seed: int, scales: tuple[int, int] = (0, 253)):
    g = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (rows, blocks, 16), generator=g, dtype=torch.uint8)
    return made, torch.randint(*scales, (rows, blocks), generator=g, dtype=torch.uint8)


def numbers_by_hand(blocks, scales) -> torch.Tensor:
    """The definition, one number at a time, in Python's float64."""
    rows = []
    for row, row_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        numbers = []
        for block, scale in zip(row, row_scales, strict=True):
            for byte in block:
                for code in (byte & 15, byte >> 4):
                    numbers.append((-1.0 if code & 8 else 1.0) * MAGNITUDES[code & 7] * 2.0 ** (scale - 127))
        rows.append(numbers)
    return torch.tensor(rows, dtype=torch.float64)


def all_scales():
    """Every byte value somewhere in a block, at every scale at which bfloat16 holds them all."""
    scales = torch.arange(253, dtype=torch.uint8).repeat_interleave(16).view(-1, 4)
    return torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(253, 1).view(-1, 4, 16), scales


def test_a_block_worked_by_hand():
    block = torch.zeros(1, 1, 16, dtype=torch.uint8)
    block[0, 0, 0], block[0, 0, 15] = 0x2F, 0x81  # -6 then 1; 0.5 then -0
    numbers = dequantise(block, torch.tensor([[128]], dtype=torch.uint8)).flatten().tolist()
    assert numbers[:2] == [-12.0, 2.0] and numbers[30:] == [1.0, 0.0] and math.copysign(1, numbers[31]) == -1


def test_numbers_are_the_definition_at_every_byte_and_scale():
    blocks, scales = all_scales()
    ours = dequantise(blocks, scales)
    assert ours.dtype == torch.bfloat16 and ours.shape == (len(blocks), 128)
    by_hand = numbers_by_hand(blocks, scales)
    assert torch.equal(ours.double(), by_hand) and torch.equal(ours.signbit(), by_hand.signbit())


def test_what_is_no_number_is_seen():
    blocks = torch.full((2, 16), 0x77, dtype=torch.uint8)
    numbers = dequantise(blocks, torch.tensor([255, 254], dtype=torch.uint8))
    assert numbers[:32].isnan().all() and numbers[32:].isinf().all()


def test_transformers_reads_the_same_numbers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_packed(6 * 10, 3, seed=1, scales=(100, 130))
    theirs = convert_moe_packed_tensors(blocks.view(6, 10, 3, 16), scales.view(6, 10, 3))  # [experts, in, out]
    assert torch.equal(theirs, dequantise(blocks, scales).view(6, 10, 96).transpose(1, 2))


def test_shapes_are_the_published_ones():
    assert packed_shapes((32, 5760, 2880)) == ((32, 5760, 90, 16), (32, 5760, 90))
    with pytest.raises(ValueError, match="33"):
        packed_shapes((4, 33))


def test_representable_numbers_come_back_as_they_were_and_canonical_blocks_byte_for_byte():
    blocks, scales = all_scales()
    blocks[::3] &= 0xBB  # no code above 3: these fit at a smaller scale too
    numbers = dequantise(blocks, scales)
    again, new_scales, loss = quantise(numbers)
    assert torch.equal(dequantise(again, new_scales), numbers) and torch.equal(dequantise(again, new_scales).signbit(), numbers.signbit())
    assert loss.max_abs == loss.squared_error == loss.relative == 0
    codes = torch.stack([blocks & 7, blocks >> 4 & 7], -1).flatten(-2)
    canonical = (codes.amax(-1) >= 6) | ((codes.amax(-1) > 0) & (scales == 0))
    assert canonical.sum() > 2000 and (~canonical).sum() > 100
    assert torch.equal(again[canonical], blocks[canonical]) and torch.equal(new_scales[canonical], scales[canonical])
    magnitudes = torch.stack([again & 7, again >> 4 & 7], -1).flatten(-2).amax(-1)
    assert ((magnitudes >= 6) | (new_scales == 0)).all(), "the smallest scale that fits"


def test_like_gives_every_block_its_own_bytes_back_and_is_ignored_where_it_would_lose():
    blocks, scales = random_packed(50, 8, seed=2)
    blocks[:25] &= 0x99  # codes 0 and 1 only, and zeros: at home at many scales
    blocks[:5] = 0
    numbers = dequantise(blocks, scales)
    again, new_scales, _ = quantise(numbers, like=scales)
    assert torch.equal(again, blocks) and torch.equal(new_scales, scales)
    g = torch.Generator().manual_seed(3)
    real = torch.randn(20, 64, generator=g)
    best = quantise(real)[:2]
    for hint in (torch.zeros_like(best[1]), torch.full_like(best[1], 255), best[1] - 1, best[1] + 1):
        assert all(torch.equal(a, b) for a, b in zip(quantise(real, like=hint)[:2], best, strict=True))


def nearest(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Each number's squared distance to the grid at 2^exponent, by looking at the whole grid."""
    grid = torch.tensor(MAGNITUDES, dtype=torch.float64) * 2.0**exponent
    return (x.double().abs().unsqueeze(-1) - grid).square().amin(-1)


@pytest.mark.parametrize("spread", ["normal", "flat", "outlier", "near a power of two", "tiny"])
def test_no_scale_of_all_254_would_lose_less(spread):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(300, 32, generator=g)
    if spread == "flat":
        x = 1 + 7 * torch.rand(300, 32, generator=g)
    elif spread == "outlier":
        x[:, 5] *= 20 * torch.rand(300, generator=g)
    elif spread == "near a power of two":
        x = torch.where(torch.rand(300, 32, generator=g) < 0.5, x, 8 - 1.5 * torch.rand(300, 32, generator=g))
    elif spread == "tiny":
        x *= 2.0**-128
    blocks, scales, loss = quantise(x)
    lost = (x.double() - dequantise(blocks, scales).double().view(300, 32)).square().sum(1)
    best = torch.stack([nearest(x, e).sum(1) for e in range(-127, 128)]).amin(0)
    assert torch.allclose(lost, best, rtol=1e-5, atol=0)
    assert loss.squared_error == pytest.approx(lost.sum().item(), rel=1e-4)
    assert loss.max_abs == pytest.approx((x - dequantise(blocks, scales).view(300, 32)).abs().max().item(), rel=1e-5)
    assert loss.relative == pytest.approx(math.sqrt(lost.sum() / x.double().square().sum()), rel=1e-4)


def test_sometimes_another_scale_than_the_largest_numbers_wins():
    """Both neighbours do; without them the test above could not tell."""
    up, down = torch.zeros(32), torch.full((32,), 1.5)
    up[0], down[0] = 7.9, 8.1  # cut to 6 at OCP's scale; and an outlier that is cheaper to cut than to spoil all others
    for x, step in ((up, 1), (down, -1)):
        ocp = math.floor(math.log2(x.max())) - 2
        assert int(quantise(x)[1]) - 127 == ocp + step


def test_ties_go_to_the_even_code():
    x = torch.zeros(32)
    x[:8] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    blocks, scales, _ = quantise(x)
    assert int(scales) == 127
    assert dequantise(blocks, scales)[:8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


def test_losses_of_parts_add_up():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(5))
    parts = sum((quantise(row)[2] for row in x), Loss())
    whole = quantise(x)[2]
    assert (parts.max_abs, parts.largest) == (whole.max_abs, whole.largest)
    assert parts.relative == pytest.approx(whole.relative)
