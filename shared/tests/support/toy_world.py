"""A folder with everything that the toy's commands need, for the tests of the stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import picture
from safetensors.torch import load_file, save_file

from ditkit_core.commands import cli
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.killed import Killed
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyMediaEncoder, ToyTextEncoder, official_name
from ditkit_core.testing.world import make_model


class World:
    """A folder with a toy checkpoint and captioned images, and the commands at work in it.

    Args:
        folder: The folder, which is empty.
        captions: `sample.captions` of its runs; 0 where a test looks at no sample. None for the
            default.
    """

    def __init__(self, folder: Path, captions: int | None = None):
        self.folder, self.captions = folder, captions
        self.media, self.text = ToyMediaEncoder(), ToyTextEncoder()
        self.spec: ModelSpec = altered(
            TOY,
            media_encoder=lambda *_: self.media,
            text_encoder=lambda *_: self.text,
            infer_arch=None,
        )
        state = {
            official_name(name): t.contiguous()
            for name, t in make_model(TOY, TOY.architecture.presets["tiny"]).state_dict().items()
        }
        save_file(state, folder / "toy.safetensors")
        for i, colour in enumerate(("teal", "red", "navy", "gold", "white")):
            self.add(f"clips/{i}.png", (16, 16), colour, f"picture number {i}")

    def add(self, name: str, size: tuple[int, int], colour: str, caption: str) -> None:
        """Write an image, and its caption next to it."""
        path = picture(self.folder / name, size, colour)
        path.with_suffix(".txt").write_text(caption)

    @property
    def common(self) -> list[str]:
        """The flags that all its commands have."""
        common = [
            "--model.preset",
            "tiny",
            "--model.transformer",
            str(self.folder / "toy.safetensors"),
        ]
        common += [
            "--model.dtype",
            "fp32",
            "--data.folder",
            str(self.folder / "clips"),
            "--adapter.rank",
            "2",
        ]
        common += [
            "--data.height",
            "16",
            "--data.width",
            "16",
            "--data.frames",
            "1",
            "--log.tensorboard",
            "false",
        ]
        common += [
            "--encode.cache",
            str(self.folder / "cache"),
            "--sample.steps",
            "2",
            "--adapter.dropout",
            "0.1",
        ]
        if self.captions is not None:
            common += ["--sample.captions", str(self.captions)]
        return common

    def run(self, command: str, *flags: str) -> int:
        return cli.run(self.spec, command, [*self.common, *flags])

    def train(self, name: str, steps: int, *flags: str) -> int:
        return self.run(
            "train", "--run.folder", str(self.folder / name), "--train.steps", str(steps), *flags
        )

    def kill(self, train: Callable[[], object], saved: Path) -> None:
        """Train, and end in the third micro-batch after a save as a kill ends a run: nothing
        handles it."""
        plain, left = self.spec, [3]

        def dying(*given: Any) -> Any:
            if saved.is_dir() and torch.is_grad_enabled():  # not while measuring
                left[0] -= 1
                if not left[0]:
                    raise Killed
            return plain.training.make_inputs(*given)

        self.spec = altered(plain, make_inputs=dying)
        with pytest.raises(Killed):
            train()
        self.spec = plain

    def adapter(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "exports" / f"{Path(name).name}.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
