"""What S2V is conditioned on: speech in a clip or next to it, a reference image, poses, and the
frames before."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conditions_help import (
    CPU,
    controls,
    encoded,
    image_file,
    noise,
    sound_file,
    tiny_vae,
    video_file,
)
from safetensors.torch import load_file, save_file

from ditkit_core.data.media.clip import read_clip, write_video
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning.columns import conditioners
from ditkit_wan.conditioning.speech import Motion, Poses, Speech, SpeechReference, rows_of_frames
from ditkit_wan.demo.models import SPEECH_DIM, SPEECH_STATES, build_audio_encoder
from ditkit_wan.encoders.speech import RATE, SpeechEncoder
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN

FRAMES, FPS = 9, 16.0
SIZE = {"height": 64, "width": 64}


def speech(seconds: float = 2.0, rate: int = RATE) -> np.ndarray:
    """Sound that is different at every moment."""
    return (np.sin(np.cumsum(np.linspace(0.02, 0.4, round(seconds * rate)))) / 2).astype(np.float32)


@pytest.fixture(scope="module")
def encoder(speech_folder: Path) -> SpeechEncoder:
    loaded = SpeechEncoder(
        ModelPaths(audio_encoder=str(speech_folder)), CPU, states=SPEECH_STATES, features=SPEECH_DIM
    )
    loaded.load()
    return loaded


def rows(states: torch.Tensor, frames: int, fps: float) -> torch.Tensor:
    """The official code's steps one by one: 50 rows a second to 30 by linear interpolation, then
    one for each frame, zeros after the end."""
    seconds = states.shape[1] / 50
    count = int(seconds * 30)
    positions = np.linspace(0, states.shape[1] - 1, count)
    resampled = np.stack(
        [
            [np.interp(positions, np.arange(len(column)), column) for column in state.T.numpy()]
            for state in states
        ]
    )
    times = np.linspace(0, frames / fps, frames, endpoint=False)
    chosen = np.round(times * 30).astype(int)
    result = np.zeros((*resampled.shape[:2], frames))
    for frame, row in enumerate(chosen):
        if row < count:
            result[:, :, frame] = resampled[:, :, row]
    return torch.from_numpy(result).float()


@pytest.mark.parametrize(("length", "frames"), [(249, 80), (24, 8), (24, 12), (1, 4)])
def test_each_frame_takes_the_row_of_its_time(length: int, frames: int) -> None:
    states = torch.randn(3, length, 5, generator=torch.Generator().manual_seed(length))
    if int(length / 50 * 30) == 0:
        with pytest.raises(UserError, match="too short"):
            rows_of_frames(states, frames, FPS)
        return
    torch.testing.assert_close(
        rows_of_frames(states, frames, FPS), rows(states, frames, FPS), rtol=1e-4, atol=1e-4
    )


def test_hidden_states_are_those_of_the_authors_call(
    encoder: SpeechEncoder, speech_folder: Path, tmp_path: Path
) -> None:
    """`Wav2Vec2ForCTC` behind its processor, with all hidden states; 1e-5: the mean of the sound is
    summed in another order."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    sound = speech(0.5)
    tensors = load_file(speech_folder / "model.safetensors")
    config = json.loads((speech_folder / "config.json").read_text())
    theirs = Wav2Vec2ForCTC(Wav2Vec2Config.from_dict(config | {"vocab_size": 33})).eval()
    theirs.wav2vec2.load_state_dict(tensors)
    values = Wav2Vec2FeatureExtractor(do_normalize=True)(
        sound, sampling_rate=RATE, return_tensors="pt"
    ).input_values
    with torch.no_grad():
        expected = torch.cat(theirs(values, output_hidden_states=True).hidden_states)
    (result,) = encoder.encode([torch.from_numpy(sound)])
    assert result["states"].dtype == torch.float32 and result["states"].shape == (
        SPEECH_STATES,
        24,
        SPEECH_DIM,
    )
    torch.testing.assert_close(result["states"], expected, rtol=1e-5, atol=1e-5)

    # as the published file names them: with a prefix, torch's old weight norm, and the layers that
    # are not used
    old = {"original0": "weight_g", "original1": "weight_v"}
    names = {name: name.replace("parametrizations.weight.original", "weight_") for name in tensors}
    published = {
        f"wav2vec2.{names[name][:-1] + old[name[-9:]][-1] if name[-9:] in old else name}": t
        for name, t in tensors.items()
    }
    published |= {
        "lm_head.weight": torch.zeros(33, SPEECH_DIM),
        "wav2vec2.masked_spec_embed": torch.zeros(SPEECH_DIM),
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["Wav2Vec2ForCTC"], "mask_time_prob": 0.05})
    )
    save_file(published, tmp_path / "model.safetensors")
    other = SpeechEncoder(
        ModelPaths(audio_encoder=str(tmp_path)), CPU, states=SPEECH_STATES, features=SPEECH_DIM
    )
    other.load()
    assert torch.equal(other.encode([torch.from_numpy(sound)])[0]["states"], result["states"])
    with pytest.raises(
        UserError, match="has 3 hidden states of 32, and the model takes 25 of 1024"
    ):
        SpeechEncoder(ModelPaths(audio_encoder=str(tmp_path)), CPU, states=25, features=1024)
    with pytest.raises(UserError, match="set model.audio_encoder"):
        SpeechEncoder(ModelPaths(), CPU, states=25, features=1024)


def test_the_full_encoder_is_planned_at_its_published_size() -> None:
    """315,438,720 parameters in the published file, without the row of masks and the layer of
    letters."""
    arch = PRESETS["s2v-14b"]
    (model,) = (
        model
        for model in WAN.auxiliary.models(arch, ModelPaths())
        if model.name == "speech encoder"
    )
    assert (
        sum(parameter.numel() for parameter in model.build(torch.float32).parameters())
        == 315_437_696
    )


def test_speech_is_the_sound_of_the_frames_after_the_first(
    encoder: SpeechEncoder, tmp_path: Path
) -> None:
    conditioner = Speech(encoder, FPS)
    assert isinstance(conditioner, Conditioner)
    path = sound_file(tmp_path / "a.wav", speech(), RATE)
    for start in (0.0, 0.75):
        inputs = controls("clip.mp4", {"input_audio": path}, frames=FRAMES, start_seconds=start)
        assert conditioner.uses(inputs) == ("input_audio",)
        conditioner.check(inputs)
        audio = encoded(conditioner, inputs)["audio"]
        begin = round((start + 1 / FPS) * RATE)
        (states,) = encoder_states(encoder, speech()[begin : begin + RATE // 2])
        assert audio.shape == (SPEECH_STATES, SPEECH_DIM, FRAMES - 1)
        torch.testing.assert_close(
            audio, rows_of_frames(states, FRAMES - 1, FPS), rtol=1e-4, atol=1e-4
        )


def encoder_states(encoder: SpeechEncoder, sound: np.ndarray) -> list[torch.Tensor]:
    encoder.load()
    return [result["states"] for result in encoder.encode([torch.from_numpy(sound)])]


def test_a_clips_own_sound_track_is_the_default(encoder: SpeechEncoder, tmp_path: Path) -> None:
    import av

    file = video_file(tmp_path / "silent.mp4", 1, frames=32)
    spoken = tmp_path / "spoken.mkv"
    with av.open(file) as source, av.open(str(spoken), "w") as target:
        pictures = target.add_stream_from_template(source.streams.video[0])
        sound = target.add_stream("flac", rate=RATE, layout="mono")
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = pictures
                target.mux(packet)
        frame = av.AudioFrame.from_ndarray(
            (speech() * 32767).astype(np.int16)[None], format="s16", layout="mono"
        )
        frame.sample_rate, frame.pts = RATE, 0
        target.mux(sound.encode(frame))
        target.mux(sound.encode(None))
    conditioner = Speech(encoder, FPS)
    in_clip = controls(spoken, frames=FRAMES, start_seconds=0.5)
    assert conditioner.uses(in_clip) == ("",)
    beside = controls(
        spoken,
        {"input_audio": sound_file(tmp_path / "a.wav", speech(), RATE)},
        frames=FRAMES,
        start_seconds=0.5,
    )
    ours, theirs = (encoded(conditioner, inputs)["audio"] for inputs in (in_clip, beside))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)  # 16 bits a sample and 32
    with pytest.raises(UserError, match=r"silent\.mp4 has no sound"):
        conditioner.check(controls(file, frames=FRAMES))


def test_what_speech_cannot_be_is_one_line(encoder: SpeechEncoder, tmp_path: Path) -> None:
    conditioner = Speech(None, FPS)
    with pytest.raises(UserError, match="a sample has no input_audio, .* --control input_audio="):
        conditioner.uses(controls(None, frames=FRAMES))
    with pytest.raises(UserError, match=r"has 1 frame\(s\), and S2V learns those after the first"):
        conditioner.uses(controls("clip.mp4", {"input_audio": "a.wav"}, frames=1))
    short = sound_file(tmp_path / "short.wav", speech(0.6), RATE)
    late = controls("clip.mp4", {"input_audio": short}, frames=33)
    with pytest.raises(
        UserError, match=r"short\.wav has 0\.6 s of sound and the clip needs 2\.1 s"
    ):
        conditioner.check(late)
    # half a second may be missing: zeros, as in the official code
    nearly = controls(
        "clip.mp4", {"input_audio": sound_file(tmp_path / "b.wav", speech(1.0), RATE)}, frames=21
    )
    audio = encoded(Speech(encoder, FPS), nearly)["audio"]
    missing = audio.abs().sum((0, 1)) == 0
    assert missing.tolist() == [False] * 15 + [True] * 5


def test_reference_and_poses(checkpoint: Path, tmp_path: Path) -> None:
    """A copy of the first pose is encoded in front, as in speech2video.py; the clip's first frame
    is the reference unless there is an image."""
    vae = tiny_vae(checkpoint)
    clip = video_file(tmp_path / "clip.mp4", 1)
    files = {
        "s2v_pose_video": video_file(tmp_path / "p.mp4", 2),
        "reference_image": image_file(tmp_path / "r.png", 3, 64, 64),
    }
    pose = encoded(Poses(vae), controls(clip, files, **SIZE))["pose"]
    pixels = read_clip(Path(files["s2v_pose_video"]), frames=FRAMES, fps=FPS, **SIZE)[:, 1:]
    vae.load()
    expected = vae.encode([torch.cat([pixels[:, :1], pixels], 1)])[0]["latents"][:, 1:]
    assert pose.shape == (16, 2, 8, 8) and torch.equal(pose, expected)
    assert Poses(vae).uses(controls(clip)) == () and Poses(vae).optional
    first = read_clip(Path(clip), frames=1, fps=FPS, **SIZE)
    first_image = encoded(SpeechReference(vae), controls(clip, **SIZE))["reference"]
    vae.load()
    assert torch.equal(first_image, vae.encode([first])[0]["latents"])
    other = encoded(SpeechReference(vae), controls(clip, files, **SIZE))["reference"]
    assert other.shape == first_image.shape == (16, 1, 8, 8) and not torch.equal(first_image, other)


def test_frames_before_a_window_are_its_motion_and_change_how_it_is_encoded(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As in train_s2v.py of VideoX-Fun: the 73 frames and the clip are encoded together."""
    vae = tiny_vae(checkpoint)
    long = tmp_path / "long.mp4"
    write_video(long, noise(1, 96, 16, 16), FPS)
    size = {"height": 16, "width": 16}
    conditioner = Motion(vae)
    assert conditioner.optional and conditioner.uses(controls(long, start_seconds=71 / FPS)) == ()
    window = controls(long, start_seconds=72 / FPS, frames=FRAMES, **size)
    assert conditioner.uses(window) == ("",)
    result = encoded(conditioner, window)
    pixels = read_clip(long, frames=81, fps=FPS, **size)
    vae.load()
    together = vae.encode([pixels])[0]["latents"]
    assert torch.equal(result["motion"], together[:, :19]) and torch.equal(
        result["continued"], together[:, 19:]
    )
    alone = vae.encode([pixels[:, 72:]])[0]["latents"]
    assert result["continued"].shape == alone[:, 1:].shape and not torch.equal(
        result["continued"], alone[:, 1:]
    )
    item = WAN.training.assemble({"latents": alone, "audio": torch.zeros(3, 5, 8), **result})
    assert torch.equal(item["latents"], result["continued"]) and "continued" not in item
    item = WAN.training.assemble({"latents": alone, "audio": torch.zeros(3, 5, 8)})
    assert torch.equal(item["latents"], alone[:, 1:])

    # another video's last frames, for a clip and for a sample
    clip = video_file(tmp_path / "clip.mp4", 5)
    inputs = controls(clip, {"motion_video": str(long)}, frames=FRAMES, **size)
    assert conditioner.uses(inputs) == ("motion_video", "")
    before = read_clip(long, frames=73, fps=FPS, start_seconds=23 / FPS, **size)
    expected = encode(vae, before)
    of_sample = controls(None, inputs.files, frames=FRAMES, **size)
    assert torch.equal(encoded(conditioner, of_sample)["motion"], expected)
    assert torch.equal(encoded(conditioner, inputs)["motion"], expected)
    with pytest.raises(UserError, match="is shorter than the 73 frames"):
        encoded(
            conditioner,
            controls(
                clip, {"motion_video": video_file(tmp_path / "s.mp4", 4)}, frames=FRAMES, **size
            ),
        )


def encode(vae: object, pixels: torch.Tensor) -> torch.Tensor:
    vae.load()  # type: ignore[attr-defined]
    latents: torch.Tensor = vae.encode([pixels])[0]["latents"]  # type: ignore[attr-defined]
    return latents


def test_the_doctor_reads_speech_without_an_encoder(tmp_path: Path) -> None:
    path = sound_file(tmp_path / "a.wav", speech(1.0), 8000)
    clip = video_file(tmp_path / "clip.mp4", 1)
    for conditioner in conditioners(PRESETS["s2v-14b"], None, CPU, VaeMode()):
        conditioner.check(controls(clip, {"input_audio": path}, frames=FRAMES, **SIZE))
    assert build_audio_encoder().config.num_hidden_layers == SPEECH_STATES - 1
