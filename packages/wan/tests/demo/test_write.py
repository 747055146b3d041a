"""The demo's inputs: whole, the same every time, readable by the libraries and by our own
reader."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.clip import read_clip
from ditkit_core.encoding.loader import split_held_out
from ditkit_core.errors import UserError
from ditkit_core.families.demo_motions import (
    CLIPS,
    DIRECTIONS,
    FPS,
    FRAMES,
    NEW,
    SIDE,
    UNSEEN,
)
from ditkit_core.io.files import file_hash
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.demo.write import write_demo
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.spec import WAN


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "inputs"
    write_demo(folder)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file_hash(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_a_half_written_folder_is_written_again_to_the_same_bytes_and_a_whole_one_left_alone(
    inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "clip00.mp4").write_bytes(b"half")
    (tmp_path / "clips" / "left-over.mp4").write_bytes(b"old")
    before = torch.random.get_rng_state()
    write_demo(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
    written = hashes(inputs)
    assert hashes(tmp_path) == written and len(written) > 30
    (tmp_path / "clips" / "clip00.mp4").unlink()
    write_demo(tmp_path)
    assert not (tmp_path / "clips" / "clip00.mp4").exists()


def test_every_part_of_the_checkpoint_is_safetensors_and_loads_as_a_pipeline(inputs: Path) -> None:
    from diffusers import DiffusionPipeline, WanPipeline

    weights = {file.parent.name for file in (inputs / "checkpoint").rglob("*.safetensors")}
    assert weights == {"transformer", "vae", "text_encoder"}
    assert not [
        file for file in inputs.rglob("*") if file.suffix in (".bin", ".pth", ".pt", ".pkl")
    ]
    pipeline = DiffusionPipeline.from_pretrained(inputs / "checkpoint", local_files_only=True)
    assert type(pipeline) is WanPipeline
    pipeline.set_progress_bar_config(disable=True)
    arguments = {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "output_type": "np",
    }
    frames = pipeline(
        "a red circle", generator=torch.Generator().manual_seed(0), **arguments
    ).frames
    assert frames.shape == (1, 5, 32, 32, 3) and np.isfinite(frames).all() and frames.std() > 0


def test_the_tokenizer_knows_the_captions_words_and_spells_others(inputs: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        inputs / "checkpoint" / "tokenizer", local_files_only=True
    )
    ids = tokenizer(CLIPS[0].caption).input_ids
    assert len(ids) == len(CLIPS[0].caption.split()) + 1 and ids[-1] == tokenizer.eos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == CLIPS[0].caption
    assert tokenizer.unk_token_id not in tokenizer("a drake").input_ids
    assert tokenizer("", padding="max_length", max_length=3).input_ids == [1, 0, 0]


def test_the_clips_are_real_videos_of_many_sizes_rates_and_lengths(inputs: Path) -> None:
    import av

    seen = set()
    for index, clip in enumerate(CLIPS):
        path = inputs / "clips" / f"clip{index:02d}.mp4"
        with av.open(str(path)) as container:
            frames = list(container.decode(video=0))
            rate = container.streams.video[0].average_rate
        assert (
            len(frames) == clip.frames and rate == clip.fps and 0.5 <= clip.frames / clip.fps <= 2
        )
        assert (frames[0].height, frames[0].width) == (clip.height, clip.width)
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in frames[::4]])
        times = [number * FPS / clip.fps for number in range(0, clip.frames, 4)]
        painted = clip.scene.paint(clip.height, clip.width, times)
        # yuv420p halves the colour's resolution, H.264 rounds: the shapes stay what they were
        assert np.abs(decoded.astype(float) - painted).mean() < 6
        assert path.with_suffix(".txt").read_text(encoding="utf-8") == clip.caption + "\n"
        seen.add((clip.height, clip.width, clip.fps, clip.frames))
    assert len(seen) == len(CLIPS) == 28 and len({clip.caption for clip in CLIPS}) == 20


def test_the_shape_moves_as_its_caption_says() -> None:
    for clip in CLIPS:
        ends = [0.0, (clip.frames - 1) * FPS / clip.fps]
        frames = np.round(clip.scene.paint(clip.height, clip.width, ends))
        weight = np.abs(frames - frames[0, 0, 0]).sum(-1)
        rows, columns = np.mgrid[: clip.height, : clip.width]
        first, last = (
            np.array([(w * axis).sum() / w.sum() for axis in (rows, columns)])
            for w in (weight[0], weight[-1])
        )
        way = np.array(DIRECTIONS[clip.direction])
        cosine = way @ (last - first) / np.linalg.norm(way) / np.linalg.norm(last - first)
        assert cosine > 0.99 and np.linalg.norm(last - first) > 20


def test_the_new_motion_is_of_some_shapes_only_and_is_what_is_validated() -> None:
    shown = [f"{clip.scene.colour} {clip.scene.shape}" for clip in CLIPS if clip.direction == NEW]
    assert len(shown) == 16 and not set(shown) & set(UNSEEN) and len({*shown, *UNSEEN}) == 12
    names = {f"clip{index:02d}": clip for index, clip in enumerate(CLIPS)}
    held_out = split_held_out(
        list(names), tomllib.loads(WAN.demo.config.read_text())["held_out"]["clips"]
    )[1]
    assert len(held_out) == 6 and {names[name].direction for name in held_out} == {NEW}


def test_latents_of_the_clips_as_training_reads_them_have_about_unit_variance(inputs: Path) -> None:
    config = DataConfig(folder=str(inputs / "clips"), frames=FRAMES, height=SIDE, width=SIDE)
    dataset = scan(config, WAN.data)
    assert len(dataset.samples) == 28 and not dataset.excluded
    encoder = VaeEncoder(ModelPaths(base=str(inputs / "checkpoint")), torch.device("cpu"))
    encoder.load()
    latents = torch.stack(
        [
            encoder.encode(
                [read_clip(s.media, frames=FRAMES, fps=dataset.fps, height=SIDE, width=SIDE)]
            )[0]["latents"]
            for s in dataset.samples[::4]
        ]
    )
    assert latents.shape == (7, 16, 3, 8, 8)
    deviation = latents.transpose(0, 1).flatten(1).std(dim=1)
    assert latents.mean().abs() < 0.2 and 0.7 < deviation.min() and deviation.max() < 1.4


def test_the_checkpoints_architecture_is_found(inputs: Path) -> None:
    from ditkit_wan.presets import arch_from_config

    arch = arch_from_config(
        json.loads((inputs / "checkpoint" / "transformer" / "config.json").read_text()), {}
    )
    assert (arch.heads, arch.head_dim, arch.layers, arch.text_dim) == (4, 24, 4, 32)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "inputs").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write the demo") as caught:
        write_demo(tmp_path / "inputs")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left\n(os error 28)"), OSError(28, "No space")]
)
def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("ditkit_wan.demo.write.write_clips", lambda folder: None)
    with pytest.raises(
        UserError, match="cannot write the demo into .*No space.*; free some space"
    ) as caught:
        write_demo(tmp_path / "inputs")
    assert "\n" not in str(caught.value)
