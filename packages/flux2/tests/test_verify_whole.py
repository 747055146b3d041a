"""An exported whole transformer is what diffusers' own loaders read, and is compared with ours
without being in memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_flux2 import tiny_model

from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.diffusers_model import load_whole
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.errors import UserError
from ditkit_core.models.protocol import run_plain
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.verify import DIFFUSERS


def exported(folder: Path, kind: str, form: str, dtype: str = "fp32") -> tuple[Any, Path]:
    model: Any = tiny_model(kind)
    (path,) = export_merged(
        model, FLUX2, folder, ExportConfig(forms=(form,), dtype=dtype), metadata={}
    )
    return model, path


@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("kind", ["dev", "klein base"])
def test_diffusers_computes_with_an_exported_transformer_what_we_do(
    tmp_path: Path, kind: str, form: str
) -> None:
    model, folder = exported(tmp_path, kind, form)
    line = DIFFUSERS.verify_whole(folder, form, model, run_plain)
    assert (
        line.startswith(f"diffusers loads {tmp_path.name}/transformer_{form} (")
        and "\n" not in line
    )


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_the_tensors_are_those_that_diffusers_own_loaders_read(tmp_path: Path, form: str) -> None:
    """The official form has q, k and v in one tensor, and scale and shift of the head the other way
    round."""
    model, folder = exported(tmp_path, "dev", form, "bf16")
    ours = DIFFUSERS.empty(model)
    ours.save_config(tmp_path / "config")
    load_whole(ours, folder, DIFFUSERS.convert if form == "official" else None)
    if form == "diffusers":
        (folder / "config.json").write_bytes((tmp_path / "config" / "config.json").read_bytes())
        theirs = type(ours).from_pretrained(
            folder, local_files_only=True, torch_dtype=torch.float32
        )
    else:
        (file,) = folder.glob("*.safetensors")
        theirs = type(ours).from_single_file(
            file, config=str(tmp_path / "config"), subfolder="", torch_dtype=torch.float32
        )
    for name, parameter in theirs.named_parameters():
        owner, _, leaf = name.rpartition(".")
        assert torch.equal(getattr(ours.get_submodule(owner), leaf), parameter), name


def test_a_conversion_without_the_swap_of_scale_and_shift_is_noticed(tmp_path: Path) -> None:
    model, folder = exported(tmp_path, "dev", "official")
    convert = DIFFUSERS.convert

    def wrong(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converted = convert(state)
        halves = converted["norm_out.linear.weight"].chunk(2)
        return converted | {"norm_out.linear.weight": torch.cat(halves[::-1])}

    with pytest.raises(
        UserError, match=r"diffusers' output differs from ours by .* export it again$"
    ):
        replace(DIFFUSERS, convert=wrong).verify_whole(folder, "official", model, run_plain)
