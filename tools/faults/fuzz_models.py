"""The kinds of hostile files that need the model packages: configurations and indexes of
transformers; tokenizers and encoders."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hostile import KINDS, VALUES, Kind, damaged_bytes, damaged_json
from safetensors.torch import load_file, save_file
from tiny_encoders import tiny_vae, write_qwen

from ditkit_core.errors import UserError
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.paths import ModelPaths
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.spec import FLUX2
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.encoders.clip import ImageEncoder
from ditkit_wan.encoders.text import TextEncoder
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.spec import WAN
from fuzz_media import MEDIA_KINDS

CPU = torch.device("cpu")
SIZES = (*VALUES, 2, 3, 7, 16, 64, 100_000, 10**9, -5, [2, 2], "gelu", [1] * 100)
"""What may stand where a configuration has a size."""
FLUX2_CONFIG = {
    "_class_name": "Flux2Transformer2DModel", "attention_head_dim": 16, "axes_dims_rope": [4, 4, 4,
    4], "guidance_embeds": False,
    "in_channels": 128, "joint_attention_dim": 48, "mlp_ratio": 3.0, "num_attention_heads": 2,
    "num_layers": 1, "num_single_layers": 1,
    "patch_size": 1, "rope_theta": 2000, "timestep_guidance_channels": 256, "eps": 1e-6,
}  # fmt: skip


class Models:
    """`config.json`, `model_index.json` and sharded indexes of transformers."""

    def prepare(self, folder: Path) -> None:
        checkpoint = folder / "checkpoint"
        write_checkpoint(checkpoint, ["a caption"])
        self.base = folder / "base"
        self.base.mkdir()
        transformer = self.base / "transformer"
        shutil.copytree(checkpoint / "transformer", transformer)
        (file,) = transformer.glob("*.safetensors")
        state = load_file(file)
        file.unlink()
        names = sorted(state)
        shards = {
            "a-00001-of-00002.safetensors": names[::2],
            "a-00002-of-00002.safetensors": names[1::2],
        }
        for name, inside in shards.items():
            save_file({key: state[key] for key in inside}, transformer / name)
        weight_map = {key: name for name, inside in shards.items() for key in inside}
        (transformer / "a.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        )
        shutil.copy(checkpoint / "model_index.json", self.base)

    def use(self, draw: random.Random, folder: Path) -> None:
        base = folder / "base"
        shutil.copytree(self.base, base)
        spec = draw.choice((WAN, WAN, FLUX2))
        if spec is FLUX2:
            (base / "transformer" / "config.json").write_text(json.dumps(FLUX2_CONFIG))
        for name in draw.choice(
            (
                ("transformer/config.json",),
                ("transformer/a.safetensors.index.json",),
                ("model_index.json", "transformer/config.json"),
            )
        ):
            path = base / name
            path.write_bytes(damaged_json(draw, json.loads(path.read_bytes()), SIZES))
        model = ModelPaths(base=str(base))
        try:
            arch_here(spec, model)
        finally:
            source = open_weights(model.locate("transformer"))
            source.fingerprint()


class Encoders:
    """Tokenizers, and configurations of text encoders, VAEs and image encoders."""

    def prepare(self, folder: Path) -> None:
        self.wan, self.flux2 = folder / "wan", folder / "flux2"
        write_checkpoint(self.wan, ["a red circle moves right"])
        write_qwen(self.flux2)
        tiny_vae().save_pretrained(self.flux2 / "vae")
        image, clip = torch.zeros(3, 1, 16, 16), torch.zeros(3, 1, 32, 32)
        self.uses: list[tuple[Path, str, tuple[str, ...], Callable[[ModelPaths], Any], Any]] = [
            (
                self.wan,
                "tokenizer",
                ("tokenizer.json", "tokenizer_config.json"),
                self._wan_text,
                "a red circle",
            ),
            (self.wan, "text_encoder", ("config.json",), self._wan_text, "a red circle"),
            (self.wan, "vae", ("config.json",), lambda model: VaeEncoder(model, CPU), clip),
            (self.flux2, "tokenizer", ("tokenizer.json",), self._flux2_text, "a red circle"),
            (self.flux2, "text_encoder", ("config.json",), self._flux2_text, "a red circle"),
            (
                self.flux2,
                "vae",
                ("config.json",),
                lambda model: DiffusersVae(VAE, model, CPU),
                clip,
            ),
        ]
        if (self.wan / "image_encoder").is_dir():
            self.uses.append(
                (
                    self.wan,
                    "image_encoder",
                    ("config.json",),
                    lambda model: ImageEncoder(model, CPU, torch.float32),
                    image,
                )
            )

    @staticmethod
    def _wan_text(model: ModelPaths) -> TextEncoder:
        return TextEncoder(model, CPU, torch.float32)

    @staticmethod
    def _flux2_text(model: ModelPaths) -> LanguageModelEncoder:
        return LanguageModelEncoder(TEXT, model, CPU, torch.float32, "never")

    def use(self, draw: random.Random, folder: Path) -> None:
        base, part, names, make, item = draw.choice(self.uses)
        own = folder / part
        shutil.copytree(base / part, own)
        for name in draw.sample(names, draw.randint(1, len(names))):
            data = (own / name).read_bytes()
            mixed = draw.random() < 0.9
            (own / name).write_bytes(
                damaged_json(draw, json.loads(data), SIZES) if mixed else damaged_bytes(draw, data)
            )
        encoder = make(ModelPaths(base=str(base), **{part: str(own)}))
        assert encoder.identity
        encoder.load()
        encoder.encode([item])


ALL_KINDS: Mapping[str, Callable[[], Kind]] = {
    **KINDS,
    "models": Models,
    "encoders": Encoders,
    **MEDIA_KINDS,
}
__all__ = ["ALL_KINDS", "UserError"]
