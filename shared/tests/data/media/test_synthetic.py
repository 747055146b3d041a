"""What the demos' inputs are made with: a folder that is whole, weights sampled by name, images of
shapes."""

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from ditkit_core.data.media.synthetic import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    isometry,
    paint,
    randomise,
    write_inputs,
)
from ditkit_core.errors import UserError


def one_file(folder):
    (folder / "file").write_text("whole")


def test_a_half_written_folder_is_written_again_and_a_whole_one_left_alone(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "left-over").write_text("old")
    write_inputs(tmp_path, {"part": one_file})
    assert [file.name for file in (tmp_path / "part").iterdir()] == ["file"]
    (tmp_path / "part" / "file").unlink()
    write_inputs(tmp_path, {"part": one_file})
    assert list((tmp_path / "part").iterdir()) == []
    write_inputs(tmp_path, {"part": one_file, "of the next version": one_file})
    assert (
        list((tmp_path / "part").iterdir()) == []
        and (tmp_path / "of the next version" / "file").exists()
    )


def test_a_folder_whose_writing_fails_is_not_complete(tmp_path):
    def broken(folder):
        raise KeyError("a fault of ours")

    with pytest.raises(KeyError):
        write_inputs(tmp_path, {"first": one_file, "second": broken})
    write_inputs(tmp_path, {"first": one_file, "second": one_file})
    assert (tmp_path / "complete").exists() and (tmp_path / "second" / "file").exists()


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left\n(os error 28)"), OSError(28, "No space")]
)
def test_a_full_disk_is_one_line(tmp_path, error):
    def full(folder):
        raise error

    with pytest.raises(
        UserError, match=r"cannot write the demo into .*No space.*; free some space"
    ) as caught:
        write_inputs(tmp_path, {"part": full})
    assert "\n" not in str(caught.value)


def test_weights_depend_on_names_alone():
    def drawn(name):
        model = nn.ModuleDict({"a": nn.Linear(64, 8), "norm": nn.LayerNorm(8)})
        before = torch.random.get_rng_state()
        randomise(model, name)
        assert torch.equal(before, torch.random.get_rng_state())
        return model.state_dict()

    first, again, other = drawn("one"), drawn("one"), drawn("two")
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    assert not torch.equal(first["a.weight"], other["a.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(8)) and torch.equal(
        first["a.bias"], torch.zeros(8)
    )
    assert 0.8 < first["a.weight"].norm() / 8**0.5 < 1.2, "rows of about unit length"


def test_an_isometry_keeps_lengths():
    columns = isometry(12, 5, "test")
    # fp32 rounding
    torch.testing.assert_close(columns.T @ columns, torch.eye(5), rtol=0, atol=1e-6)
    assert torch.equal(columns, isometry(12, 5, "test")) and not torch.equal(
        columns, isometry(12, 5, "other")
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_has_the_shape_in_its_colour_at_its_place(shape):
    picture = paint(
        40, 60, shape=shape, colour="green", background="dark", centre=(20.0, 40.0), radius=8.0
    )
    assert picture.dtype == np.uint8 and picture.shape == (40, 60, 3)
    assert (
        tuple(picture[20, 40]) == COLOURS["green"] and tuple(picture[35, 10]) == BACKGROUNDS["dark"]
    )
    rows, columns = np.nonzero((picture == COLOURS["green"]).all(-1))
    assert abs(columns.mean() - 40) < 0.5 and rows.max() <= 28
    assert rows.min() >= (4 if shape == "triangle" else 12), "a triangle is three radii high"
