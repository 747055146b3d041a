"""An adapter of every variant that diffusers has is what diffusers computes with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_variants import IMAGE, SIZES, VARIANTS

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter, read_by
from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.world import make_model
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS

ALL = ("q,k,v,o,ffn.0,ffn.2,k_img,v_img",)


def adapted(variant: str, targets: tuple[str, ...] = ()) -> Any:
    return make_model(
        WAN, WanArch(**SIZES | VARIANTS[variant]), adapter=AdapterConfig(rank=4, targets=targets)
    )


def exported(model: Any, folder: Path, form: str) -> Path:
    (file,) = export_adapter(
        model, WAN, folder, "adapter", ExportConfig(forms=(form,), dtype="fp32"), metadata={}
    )
    return file


@pytest.mark.parametrize(
    ("variant", "form", "targets"),
    [
        ("i2v", "official", ()),
        ("i2v", "official", ALL),
        ("i2v", "diffusers", ALL),
        ("flf2v", "official", ALL),
        ("i2v-a14b", "official", ()),
        ("ti2v", "official", ()),
        ("vace", "diffusers", ()),
        ("vace", "diffusers", ("vace", "vace_before_proj", "after_proj")),
        ("vace", "official", ("layers.*",)),
    ],
)
def test_diffusers_computes_what_we_do(
    variant: str, form: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = adapted(variant, targets)
    assert read_by(WAN, form, model)["diffusers"] == ""
    line = DIFFUSERS.verify(exported(model, tmp_path, form), ModelPaths(), model, run_plain)
    assert "agrees with our model" in line and "cannot tell" not in line


@pytest.mark.parametrize("targets", [(), ("vace",), ("layers.*", "vace_before_proj")])
def test_diffusers_does_not_load_vace_blocks_in_the_official_form(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    """So it is said instead of tried; what is said is true."""
    model = adapted("vace", targets)
    assert "write it with --to diffusers" in read_by(WAN, "official", model)["diffusers"]
    with pytest.raises(UserError, match="diffusers does not load it"):
        DIFFUSERS.verify(exported(model, tmp_path, "official"), ModelPaths(), model, run_plain)


@pytest.mark.parametrize("more", [{"ref_conv": True}, {"camera_channels": 24}])
def test_what_diffusers_has_no_transformer_for_is_not_tried(more: dict[str, Any]) -> None:
    arch = WanArch(**SIZES | IMAGE | more)
    spec = WAN.for_arch(arch)
    model = make_model(spec, arch, adapter=AdapterConfig(rank=4))
    assert "has no such model" in read_by(spec, "official", model)["diffusers"]
    assert read_by(spec, "official", model)["ComfyUI"] == read_by(WAN, "official", model)["ComfyUI"]


def test_named_sets_of_vace() -> None:
    def kinds(targets: tuple[str, ...]) -> set[str]:
        names = [
            name for name, _ in adapted("vace", targets).named_parameters() if "lora_A" in name
        ]
        return {name.split(".")[0] for name in names}

    assert kinds(()) == {"layers", "vace_blocks"}
    assert kinds(("vace",)) == {"vace_blocks"}


def test_a_wrong_condition_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison reads image tokens: with others, outputs differ."""
    model = adapted("i2v")
    file = exported(model, tmp_path, "official")
    embed = model.embed.img_emb.forward
    monkeypatch.setattr(
        model.embed.img_emb, "forward", lambda images: torch.roll(embed(images), 1, -1)
    )
    with pytest.raises(UserError, match="differs from ours"):
        DIFFUSERS.verify(file, ModelPaths(), model, run_plain)
