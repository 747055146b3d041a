"""Positions over four axes, and their angles by formula."""

import torch

from ditkit_core.models.precision import Precision
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import rotary_angles, token_positions
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import Flux2Arch

CPU = torch.device("cpu")


def test_text_counts_on_the_last_axis_images_on_the_middle_ones_and_references_on_the_first():
    positions = token_positions(2, (2, 3), [(1, 2), (2, 1)], CPU)
    text = [[0, 0, 0, 0], [0, 0, 0, 1]]
    target = [[0, row, column, 0] for row in range(2) for column in range(3)]
    references = [[10, 0, 0, 0], [10, 0, 1, 0], [20, 0, 0, 0], [20, 1, 0, 0]]
    assert positions.tolist() == text + target + references


def test_positions_are_those_of_diffusers_pipeline():
    from diffusers import Flux2Pipeline

    text = Flux2Pipeline._prepare_text_ids(torch.zeros(1, 4, 8))[0]
    target = Flux2Pipeline._prepare_latent_ids(torch.zeros(1, 128, 2, 3))[0]
    references = Flux2Pipeline._prepare_image_ids(
        [torch.zeros(1, 128, 3, 2), torch.zeros(1, 128, 1, 4)]
    )[0]
    assert torch.equal(
        token_positions(4, (2, 3), [(3, 2), (1, 4)], CPU), torch.cat([text, target, references])
    )


def test_an_angle_is_position_times_frequency_of_its_axis():
    positions = torch.tensor([[10, 3, 5, 0], [0, 0, 0, 7]])
    angles = rotary_angles(positions, (32, 32, 32, 32), 2000.0)
    expected = [
        [position * 2000.0 ** (-2 * j / 32) for position in row for j in range(16)]
        for row in positions.tolist()
    ]
    assert angles.dtype == torch.float64
    torch.testing.assert_close(
        angles, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


def embedded(sizes: list[list[tuple[int, int]]]):
    """The carry of samples of these sizes: the target's, then those of its references."""
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=1, single_layers=1, text_dim=6, text_tokens=3,
        guidance=False, in_channels=4,
        out_channels=4, freq_dim=8, axes=(4, 4, 4, 4),
    )  # fmt: skip
    model = Flux2Transformer(arch, Precision(matmul=torch.float32))
    pictures = [[torch.randn(4, 1, *size) for size in sample] for sample in sizes]
    count = len(sizes)
    return model.embed(
        Flux2Inputs([sample[0] for sample in pictures], torch.full((count,), 0.5), None,
        [torch.randn(3, 6)] * count,
                    [sample[1:] for sample in pictures])
    )  # fmt: skip


def test_samples_of_one_layout_share_a_table_and_need_no_mask():
    carry = embedded([[(2, 3), (1, 2)]] * 2)
    assert carry.rotary.shape == (1, 3 + 6 + 2, 1, 8, 2) and carry.padding_mask is None


def test_samples_of_one_length_in_other_layouts_have_tables_of_their_own_and_need_no_mask():
    carry = embedded([[(2, 3), (1, 2)], [(1, 2), (2, 3)]])
    assert carry.rotary.shape == (2, 3 + 8, 1, 8, 2) and carry.padding_mask is None
    assert not torch.equal(carry.rotary[0, ..., 0], carry.rotary[1, ..., 0])


def test_padding_is_at_the_end_unrotated_and_masked():
    carry = embedded([[(2, 2)], [(2, 3), (1, 2)]])
    assert carry.padding_mask.tolist() == [[True] * 7 + [False] * 4, [True] * 11]
    cos, sin = carry.rotary[0, 7:].unbind(-1)
    assert torch.equal(cos, torch.ones(4, 1, 8)) and torch.equal(sin, torch.zeros(4, 1, 8))
    assert carry.grids == ((2, 2), (2, 3))
