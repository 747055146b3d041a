"""Tiny models of every family in sizes that other programs recognise, their inputs, and our
predictions.

The tools of this folder compare another program with ours over the same files. Weights are random,
in fp32.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core import LoraConfig, load
from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.loading.model import Model
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_flux2 import FLUX2
from ditkit_flux2.presets import Flux2Arch
from ditkit_wan import WAN
from ditkit_wan.conditioning.camera import moving, path_of
from ditkit_wan.presets import AnimateArch, MusicArch, SpeechArch, WanArch
from ditkit_zimage import ZIMAGE
from ditkit_zimage.presets import ZImageArch

SIGMA, GUIDANCE = 0.7, 3.5
"""Noise level of the predictions, and the guidance that FLUX.2 dev is told."""
_WAN = WanArch(dim=256, ffn_dim=512, heads=2, layers=4)
_FLUX2 = Flux2Arch(dim=256, heads=2, double_layers=2, single_layers=2, text_dim=384, guidance=False)
ARCHS: Mapping[str, tuple[ModelSpec, Any]] = {
    "t2v": (WAN, _WAN),
    "i2v": (WAN, replace(_WAN, in_channels=36, image_dim=1280)),
    "flf2v": (WAN, replace(_WAN, in_channels=36, image_dim=1280, image_positions=514)),
    "i2v22": (WAN, replace(_WAN, in_channels=36)),
    "ti2v": (WAN, replace(_WAN, in_channels=48, out_channels=48, token_times=True)),
    "vace": (WAN, replace(_WAN, vace_layers=(0, 2))),
    "s2v": (WAN, replace(_WAN, layers=40, ffn_dim=256, speech=SpeechArch())),
    "animate": (
        WAN,
        replace(
            _WAN, layers=10, in_channels=36, image_dim=1280, animate=AnimateArch(layers=(0, 5))
        ),
    ),
    "control": (WAN, replace(_WAN, in_channels=48, image_dim=1280, ref_conv=True, fun=True)),
    "camera": (
        WAN,
        replace(_WAN, in_channels=32, image_dim=1280, camera_channels=24, fun=True),
    ),
    "dance": (
        WAN,
        replace(
            _WAN,
            layers=28,
            ffn_dim=256,
            in_channels=36,
            image_dim=1280,
            ref_conv=True,
            music=MusicArch(),
        ),
    ),
    "klein": (FLUX2, _FLUX2),
    "dev": (FLUX2, replace(_FLUX2, guidance=True)),
    "zimage": (ZIMAGE, ZImageArch(dim=1152, heads=9, layers=2, text_dim=96)),
}
"""By name, a family and an architecture of it."""


def spec_of(name: str) -> ModelSpec:
    """The family's spec with the tiny architecture as the preset `tiny`."""
    spec, arch = ARCHS[name]
    presets = {**spec.architecture.presets, "tiny": arch}
    return replace(spec, architecture=replace(spec.architecture, presets=presets))


def randomise(module: nn.Module) -> nn.Module:
    """Give every parameter a value of the size that trained models have."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and "modulation" not in name.split(".")[-1]:
                noise *= parameter[0].numel() ** -0.5
            elif name.endswith("bias"):
                noise *= 0.05
            elif "norm" in name:
                noise = 1 + 0.1 * noise
            else:
                noise *= 0.3
            parameter.copy_(noise)
    return module


def base_file(folder: Path, name: str, form: str = "official", dtype: str = "fp32") -> Path:
    """A tiny model's complete transformer as our exporter writes it, made once."""
    spec, arch = spec_of(name), ARCHS[name][1]
    target = folder / "bases" / name / dtype
    written = target / f"transformer_{form}"
    if not written.exists():
        module = randomise(spec.architecture.build(arch, Precision(matmul=torch.float32)))
        config = ExportConfig(forms=(form,), dtype=dtype)
        export_merged(module, spec.for_arch(arch), target, config, metadata={})
    return next(written.glob("*.safetensors"))


def load_ours(
    name: str, file: Path, adapter: LoraConfig | str | None = None, **settings: Any
) -> Model:
    """Our model over a file."""
    paths = ModelPaths(transformer=str(file), preset="tiny")
    return load(spec_of(name), paths, adapter, dtype="fp32", **settings)


def trained(name: str, file: Path, **config: Any) -> Model:
    """Our model with a random adapter of a size that changes its prediction."""
    model = load_ours(name, file, LoraConfig(**config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.trainable.items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in key:
                parameter.mul_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.35 if "lokr" in key or "hada" in key else 0.12))
    return model


def item_of(name: str, frames: int = 3, height: int = 6, width: int = 8) -> dict[str, Tensor]:
    """An encoded sample of a model: noise in place of latents, text and conditions."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spec, arch = ARCHS[name]
    if name == "dance":
        height = 8  # a frame's tokens are divided among 8 rows of music
    if spec is FLUX2:
        return {"latents": noise(128, 1, height, width), "text": noise(512, arch.text_dim)}
    if spec is ZIMAGE:
        latents = noise(16, 1, 2 * height, 2 * width)
        return {"latents": latents, "text": noise(37, arch.text_dim)}
    item = {"latents": noise(arch.out_channels, frames, height, width), "text": noise(512, 4096)}
    if arch.in_channels > arch.out_channels:
        item["y"] = noise(arch.in_channels - arch.out_channels, frames, height, width)
    if arch.image_dim:
        item["image"] = noise(arch.image_tokens, 1280)
    if arch.vace_layers:
        item["vace"] = noise(96, frames, height, width)
    if arch.speech:
        item |= {"audio": noise(25, 1024, 4 * frames), "reference": noise(16, 1, height, width)}
    if arch.animate:
        face = torch.rand(3, 4 * (frames - 1) - 3, 512, 512, generator=generator) * 2 - 1
        item |= {"pose": noise(16, frames - 1, height, width), "face": face}
    if arch.camera_channels:
        poses = moving("LeftUp", "", 4 * frames - 3)
        item["camera_path"] = path_of(poses, height=8 * height, width=8 * width)
    if arch.music:
        item |= {"music": noise(4 * frames - 3, 35), "refimage": noise(257, 1280)}
    if name == "control":
        item["reference"] = noise(16, 1, height, width)
    return item


def predict(model: Model, item: Mapping[str, Tensor]) -> Tensor:
    """Our prediction [channels, frames, height, width] for one sample."""
    with torch.no_grad():
        batch = model([item["latents"]], torch.tensor([SIGMA]), [item], GUIDANCE)
    return batch[0].float()


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a share of the expected norm."""
    return ((found - expected).norm() / expected.norm()).item()
