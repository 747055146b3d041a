"""Every variant from files to a sample: encode, train, export, load in diffusers where it has such
a model, draw."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conditions_help import sound_file
from safetensors.torch import load_file

from ditkit_core.data.media.clip import write_image
from ditkit_core.families.demo_motions import CLIPS, write_clip
from ditkit_core.testing.demo import Demo
from ditkit_core.testing.specs import altered
from ditkit_wan.demo.models import VARIANTS
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.spec import WAN

FEW = CLIPS[:3]
KINDS = {
    "t2v": set(), "i2v": {"first-last", "clip-vision"}, "flf2v": {"first-last", "clip-vision"},
    "ti2v": {"first-frame"},
    "t2v-a14b": set(), "i2v-a14b": {"first-last"}, "vace": {"vace"},
    "fun-control": {"control", "reference", "clip-vision"}, "fun-control-camera": {"camera",
    "first-latent", "clip-vision"},
    "wantodance": {"music", "keyframes", "clip-vision", "clip-vision-dancer"},
    "s2v": {"speech", "speech-reference", "pose"},
    "animate": {"animate", "animate-pose", "face", "clip-vision-subject"},
}  # fmt: skip
"""The conditions that a run of each leaves in its cache."""


def _control(file: Path, number: int) -> None:
    write_clip(file.with_suffix(".mp4"), CLIPS[-1])
    file.with_suffix(".txt").unlink()  # the caption, which no control has


def _reference(file: Path, number: int) -> None:
    write_image(file.with_suffix(".png"), torch.full((3, 64, 64), 0.2 * (1 + number)))


def _direction(file: Path, number: int) -> None:
    file.with_suffix(".txt").write_text(("Left", "UpIn", "Right")[number])


def _music(file: Path, number: int) -> None:
    np.save(
        file.with_suffix(".npy"),
        np.random.default_rng(number).standard_normal((90, 35)).astype(np.float32),
    )


def _speech(file: Path, number: int) -> None:
    sound = np.random.default_rng(number).standard_normal(32_000).clip(-3, 3) / 4
    sound_file(file.with_suffix(".wav"), sound.astype(np.float32), 16_000)


CONTROLS: dict[str, dict[str, Callable[[Path, int], None]]] = {
    "fun-control": {"control_video": _control, "reference_image": _reference},
    "fun-control-camera": {"camera_control_direction": _direction},
    "wantodance": {"wantodance_music_path": _music, "wantodance_reference_image": _reference},
    "s2v": {"input_audio": _speech, "s2v_pose_video": _control},
    "animate": {
        "animate_pose_video": _control,
        "animate_face_video": _control,
        "reference_image": _reference,
    },
}
"""By variant and column, what writes the file that goes with a clip."""


def write_inputs(folder: Path, variant: str) -> None:
    write_checkpoint(folder / "checkpoint", [clip.caption for clip in FEW], variant)
    (folder / "clips").mkdir(parents=True)
    for number, clip in enumerate(FEW):
        write_clip(folder / "clips" / f"{number}.mp4", clip)
    for column, write in CONTROLS.get(variant, {}).items():
        (folder / column).mkdir()
        for number in range(len(FEW)):
            write(folder / column / str(number), number)


def flags_of(variant: str, inputs: Path) -> list[str]:
    """What a run is given of a variant besides where its checkpoint is."""
    beside = [f"{column}={inputs / column}" for column in CONTROLS.get(variant, {})]
    flags = ["--data.controls", json.dumps(beside)] if beside else []
    if VARIANTS[variant].ours is not None:  # one file, which nothing but a preset describes
        flags += [
            "--model.preset",
            variant,
            "--model.transformer",
            str(inputs / "checkpoint" / "transformer.safetensors"),
        ]
    if variant in ("wantodance", "s2v", "animate"):
        layers = {"wantodance": "music", "s2v": "audio", "animate": "face"}[variant]
        flags += ["--adapter.targets", f'["q,k,v,o,ffn.0,ffn.2,{layers}"]']
    # adapters of VACE and of faces go into diffusers under its own names
    return flags + (["--export.forms", '["diffusers"]'] if variant in ("vace", "animate") else [])


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "t2v"]
)
def test_a_variant_trains_exports_verifies_and_samples(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {name: kind.ours for name, kind in VARIANTS.items() if kind.ours is not None}
    spec = altered(
        WAN,
        presets={**WAN.architecture.presets, **tiny},
        write=lambda folder: write_inputs(folder, variant),
    )
    demo = Demo.write(spec, tmp_path)
    run = tmp_path / "run"
    # a base that is there from the start says how many experts it has
    flags = [
        "--log.every_steps",
        "1",
        "--model.base",
        str(demo.inputs / "checkpoint"),
        "--data.folder",
        str(demo.inputs / "clips"),
    ]
    assert demo.train(run, *flags, *flags_of(variant, demo.inputs)) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    experts = VARIANTS[variant].experts
    exports = [
        path
        for path in sorted((run / "exports").glob("**/*.safetensors"))
        if "-step-" not in path.name
    ]
    verified = experts if VARIANTS[variant].ours is None else 0  # diffusers has no such model
    agreeing = [
        line
        for line in said.splitlines()
        if "agrees with our model" in line and "-step-" not in line
    ]
    assert len(exports) == experts and len(agreeing) == verified
    for export in exports:
        tensors = load_file(export)
        # B begins at zero: a target that nothing was learnt in is still there
        moved = {
            name for name, tensor in tensors.items() if "lora_B" in name and tensor.abs().max() > 0
        }
        assert len(moved) == sum("lora_B" in name for name in tensors)
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert len(list((run / "samples").glob("*.mp4"))) == 1
    kinds = {folder.name for folder in (tmp_path / "cache").iterdir() if folder.is_dir()}
    assert kinds - {"media", "text"} == KINDS[variant]
    metrics = sorted(run.rglob("metrics.jsonl"))
    assert len(metrics) == experts
    for file in metrics:
        records = map(json.loads, file.read_text().splitlines())
        losses = [record["loss"] for record in records if "loss" in record]
        assert losses and all(0 < loss < 100 for loss in losses)
