"""What Wan's tests share: the demo's tiny checkpoint, written once in each process. Imports no
torch: pytest-xdist's controller reads it too."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny Wan checkpoint in diffusers layout; tests only read it."""
    from ditkit_wan.demo.write import write_checkpoint

    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(
        folder, ["a red circle moves right on a dark background", "a blue square moves left"]
    )
    return folder


class Recording:
    """Forwards and backwards of one model of DiffSynth-Studio, by case, in fp32 on the CPU; the
    file's header says how it was built."""

    def __init__(self, name: str):
        with safe_open(Path(__file__).parent / "golden" / f"{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.without_gradient = set(json.loads(file.metadata()["zero_gradients"]))
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)

    def group(self, prefix: str) -> "dict[str, torch.Tensor]":
        """Tensors whose names begin so, by what follows."""
        return {
            key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)
        }

    def model(self, **extra: object) -> "torch.nn.Module":
        """Ours with the recorded weights; `extra` are fields of the architecture besides those that
        all have."""
        import torch

        from ditkit_core.models.precision import Precision
        from ditkit_wan.model.transformer import WanTransformer
        from ditkit_wan.presets import WanArch
        from ditkit_wan.state_dict import to_native

        c = self.config
        arch = WanArch(
            dim=c["dim"], ffn_dim=c["ffn_dim"], heads=c["num_heads"], layers=c["num_layers"],
            in_channels=c["in_dim"],
            out_channels=c["out_dim"], text_dim=c["text_dim"], text_tokens=6,
            freq_dim=c["freq_dim"], image_dim=c["image_dim"],
            **extra,
        )  # fmt: skip
        model = WanTransformer(arch, Precision(matmul=torch.float32))
        model.load_state_dict({to_native(key): tensor for key, tensor in self.group("sd.").items()})
        return model

    def check(
        self, model: "torch.nn.Module", case: str, given: Mapping[str, str]
    ) -> "torch.Tensor":
        """Hold a forward and backward against the recorded case, and return the output.

        Args:
            model: What `model` returned.
            case: Its name.
            given: Recorded inputs by the fields of `WanInputs` that they are.
        """
        from ditkit_wan.model.inputs import WanInputs
        from ditkit_wan.state_dict import to_native

        recorded = self.group(f"in.{case}.")
        leaves = {}
        for field, name in given.items():
            tensor = recorded[name]
            if field == "reference" or tensor.shape[0] == 1:
                tensor = tensor[0]
            leaves[field] = tensor.clone().requires_grad_()
        (out,) = model(
            WanInputs(
                timestep=recorded["timestep"], **{field: [leaf] for field, leaf in leaves.items()}
            )
        )
        # 2e-6 and 2e-5: the order of summation over the blocks, as for the other recordings in fp32
        expected = self.tensors[f"out.{case}.0"][0]
        assert relative(out, expected) <= 2e-6, case
        model.zero_grad()
        loss = (out - recorded["target"][0]).square().mean()
        loss.backward()
        assert relative(loss, self.tensors[f"{case}.loss"]) <= 2e-6, case
        for field, name in given.items():
            assert (
                relative(
                    leaves[field].grad,
                    self.tensors[f"gi.{case}.{name}"].reshape(leaves[field].shape),
                )
                <= 2e-5
            ), field
        gradients = {
            to_native(name): gradient for name, gradient in self.group(f"gp.{case}.").items()
        }
        if gradients:
            found = {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            assert found.keys() == gradients.keys()
            norm = max(float(gradient.norm()) for gradient in gradients.values())
            for name, gradient in gradients.items():
                # k.bias has a gradient of exactly zero in exact arithmetic: compare on the scale of
                # the whole gradient too
                off = float((found[name] - gradient).norm())
                assert off <= 2e-5 * float(gradient.norm()) or off <= 1e-7 * norm, name
        return out.detach()


def relative(ours: "torch.Tensor", theirs: "torch.Tensor") -> float:
    """Norm of the difference by the norm of what was recorded."""
    difference = ours.detach().double() - theirs.detach().double()
    return float(difference.norm() / theirs.detach().double().norm().clamp_min(1e-30))


@pytest.fixture(scope="session")
def recording() -> Callable[[str], Recording]:
    """A recording by name."""
    return Recording


@pytest.fixture(scope="session")
def vae_2_2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow VAE of Wan 2.2, as diffusers stores it; tests only read it."""
    from narrow_vae import NARROW_2_2, narrow

    return narrow(tmp_path_factory.mktemp("vae_2_2") / "vae", **NARROW_2_2)


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP vision encoder of three narrow layers, as transformers stores it; tests only read
    it."""
    from ditkit_wan.demo.models import build_image_encoder

    folder = tmp_path_factory.mktemp("clip") / "image_encoder"
    build_image_encoder().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wav2vec2 of two narrow layers, as transformers stores it; tests only read it."""
    from ditkit_wan.demo.write import write_audio_encoder

    folder = tmp_path_factory.mktemp("speech") / "audio_encoder"
    write_audio_encoder(folder)
    return folder
