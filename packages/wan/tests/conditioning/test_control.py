"""What the Fun models are controlled by: control videos, references, and the rays of a moving
camera."""

import math
from pathlib import Path

import pytest
import torch
from conditions_help import (
    CPU,
    FRAMES,
    HEIGHT,
    WIDTH,
    controls,
    encoded,
    image_file,
    tiny_vae,
    video_file,
)

from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Conditioner, alternatives_of
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning import camera
from ditkit_wan.conditioning.columns import columns
from ditkit_wan.conditioning.control import (
    Camera,
    Control,
    ControlVision,
    FirstLatent,
    MaskedControl,
    Reference,
)
from ditkit_wan.conditioning.images import FirstLast
from ditkit_wan.encoders.clip import ImageEncoder
from ditkit_wan.presets import PRESETS


def read(path: str, frames: int = FRAMES) -> torch.Tensor:
    return read_clip(Path(path), frames=frames, fps=16.0, height=HEIGHT, width=WIDTH)


def test_y_is_the_control_video_then_the_first_image_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    vae = tiny_vae(checkpoint)
    files = {
        "control_video": video_file(tmp_path / "v.mp4", 1),
        "input_image": image_file(tmp_path / "a.png", 2),
    }
    conditioner = Control(vae)
    assert isinstance(conditioner, Conditioner) and conditioner.uses(
        controls(None, files)
    ) == tuple(files)
    y = encoded(conditioner, controls(None, files))["y"]
    vae.load()
    control, begin = (
        vae.encode([pixels])[0]["latents"]
        for pixels in (read(files["control_video"]), read(files["input_image"], 1))
    )
    assert y.shape == (32, 3, HEIGHT // 8, WIDTH // 8)
    assert (
        torch.equal(y[:16], control) and torch.equal(y[16:, :1], begin) and (y[16:, 1:] == 0).all()
    )
    without = encoded(conditioner, controls(None, {"control_video": files["control_video"]}))["y"]
    assert torch.equal(without[:16], control) and (without[16:] == 0).all()
    with pytest.raises(UserError, match=r"clip\.mp4 has no control_video"):
        conditioner.uses(controls("clip.mp4"))


def test_a_control_video_begins_where_the_clip_begins(checkpoint: Path, tmp_path: Path) -> None:
    files = {"control_video": video_file(tmp_path / "v.mp4", 1, frames=14)}
    late = encoded(Control(tiny_vae(checkpoint)), controls(None, files, start_seconds=4 / 16))["y"]
    vae = tiny_vae(checkpoint)
    vae.load()
    window = read_clip(
        Path(files["control_video"]),
        frames=FRAMES,
        fps=16.0,
        height=HEIGHT,
        width=WIDTH,
        start_seconds=0.25,
    )
    assert torch.equal(late[:16], vae.encode([window])[0]["latents"])


def test_a_camera_starts_at_an_image_and_zero_latents(checkpoint: Path, tmp_path: Path) -> None:
    vae = tiny_vae(checkpoint)
    clip = video_file(tmp_path / "v.mp4", 1)
    y = encoded(FirstLatent(vae), controls(clip))["y"]
    vae.load()
    assert (
        torch.equal(y[:, :1], vae.encode([read(clip)[:, :1]])[0]["latents"])
        and (y[:, 1:] == 0).all()
    )
    assert y.shape == (16, 3, HEIGHT // 8, WIDTH // 8)
    with pytest.raises(UserError, match="a moving camera needs an image"):
        FirstLatent(vae).uses(controls(None))


def test_a_reference_is_encoded_where_there_is_one(
    checkpoint: Path, tmp_path: Path, clip_folder: Path
) -> None:
    vae, clip = (
        tiny_vae(checkpoint),
        ImageEncoder(ModelPaths(image_encoder=str(clip_folder)), CPU, torch.float32),
    )
    files = {
        "reference_image": image_file(tmp_path / "r.png", 1),
        "input_image": image_file(tmp_path / "a.png", 2),
    }
    reference, vision = Reference(vae), ControlVision(clip, ("reference_image", "input_image"))
    assert reference.optional and reference.uses(controls("clip.mp4")) == ()
    latents = encoded(reference, controls(None, files))["reference"]
    vae.load()
    clip.load()
    assert torch.equal(latents, vae.encode([read(files["reference_image"], 1)])[0]["latents"])
    seen = {name: clip.encode([read(path, 1)])[0]["image"] for name, path in files.items()}
    for name, given in (
        ("reference_image", files),
        ("input_image", {"input_image": files["input_image"]}),
    ):
        assert vision.uses(controls(None, given)) == (name,)
        assert torch.equal(encoded(vision, controls(None, given))["image"], seen[name])
    nothing = encoded(vision, controls("clip.mp4"))["image"]
    assert vision.uses(controls("clip.mp4")) == ("",) and torch.equal(
        nothing, torch.zeros(clip.tokens, clip.dim)
    )


def test_rays_are_those_of_the_official_controller() -> None:
    # numbers that its own code gave for these pixels
    recorded = {
        ("LeftUp", 0.0185, 5, 48, 64): [
            0.0,
            0.0,
            0.0,
            0.0,
            -0.462298,
            -0.508276,
            -0.352835,
            0.828435,
        ],
        ("In", 0.05, 9, 64, 32): [
            0.099422,
            0.159075,
            -0.051024,
            0.0,
            -0.12756,
            -0.12756,
            -0.397686,
            0.908611,
        ],
    }
    for (direction, speed, frames, height, width), expected in recorded.items():
        path = camera.path_of(
            camera.moving(direction, str(speed), frames), height=height, width=width
        )
        rays = camera.rays(path, height=height, width=width)
        assert path.shape == (frames, 16) and rays.shape == (24, 1 + frames // 4, height, width)
        found = rays[[0, 3, 7, 11, 12, 15, 16, 23], -1, 5, 7]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_ray_is_its_moment_and_direction_and_each_frame_a_channel() -> None:
    """Written out pixel by pixel for a camera that turns and moves."""
    height, width, frames, turn = 16, 40, 5, 0.1
    poses = torch.tensor(
        [[0, 0.6, 0.9, 0.5, 0.4, 0, 0, *torch.eye(4)[:3].flatten().tolist()]], dtype=torch.float64
    ).repeat(frames, 1)
    for frame in range(frames):
        cos, sin = math.cos(turn * frame), math.sin(turn * frame)
        poses[frame, 7:] = torch.tensor(
            [cos, 0, sin, 0.2 * frame, 0, 1, 0, -0.1, -sin, 0, cos, 0.3]
        )
    rays = camera.rays(
        camera.path_of(poses, height=height, width=width), height=height, width=width
    )
    # wider than 16:9: the vertical focal length is the one that grows
    focal = (0.6 * width, 0.9 * width / (1280 / 720) / height * height)
    first = torch.eye(4, dtype=torch.float64)
    first[:3] = poses[0, 7:].view(3, 4)
    for frame, row, column in ((0, 0, 0), (1, 3, 8), (3, 15, 39), (4, 7, 20)):
        own = torch.eye(4, dtype=torch.float64)
        own[:3] = poses[frame, 7:].view(3, 4)
        to_first = first @ torch.linalg.inv(own)
        seen = torch.tensor(
            [(column + 0.5 - 0.5 * width) / focal[0], (row + 0.5 - 0.4 * height) / focal[1], 1.0],
            dtype=torch.float64,
        )
        direction = to_first[:3, :3] @ (seen / seen.norm())
        moment = torch.linalg.cross(to_first[:3, 3], direction)
        latent, channel = (0, 3) if frame == 0 else (1, frame - 1)
        found = rays[channel::4, latent, row, column]
        torch.testing.assert_close(
            found.double(), torch.cat([moment, direction]), atol=1e-6, rtol=0
        )
    assert torch.equal(rays[0::4, 0], rays[3::4, 0])  # the first frame stands for four


def test_a_masked_control_gives_the_frames_that_it_has_images_of(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As in pipeline_wan2_2_fun_control.py of VideoX-Fun: mask and latents are zeros without
    images, and otherwise those of image to video."""
    vae = tiny_vae(checkpoint)
    clip, files = tmp_path / "clip.mp4", {"control_video": video_file(tmp_path / "c.mp4", 1)}
    ends = {
        name: image_file(tmp_path / f"{name}.png", 2 + i)
        for i, name in enumerate(("input_image", "end_image"))
    }
    bare = encoded(MaskedControl(vae, clean_first=True), controls(clip, files))
    assert bare.keys() == {"y"} and bare["y"][16:].count_nonzero() == 0
    assert torch.equal(bare["y"][:16], encoded(Control(vae), controls(clip, files))["y"][:16])
    both = encoded(MaskedControl(vae, clean_first=True), controls(clip, files | ends))
    between = encoded(FirstLast(vae, both=False), controls(clip, ends))["y"]
    assert torch.equal(both["y"], torch.cat([bare["y"][:16], between]))
    assert torch.equal(both["first_frame"], between[4:, :1])
    assert encoded(MaskedControl(vae), controls(clip, files | ends)).keys() == {"y"}
    last = encoded(
        MaskedControl(vae, clean_first=True),
        controls(clip, files | {"end_image": ends["end_image"]}),
    )
    assert last.keys() == {"y"} and last["y"][16:20, :, 0, 0].tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_a_direction_or_a_file_says_how_the_camera_moves(tmp_path: Path) -> None:
    conditioner = Camera()
    assert isinstance(conditioner, Conditioner)
    named = controls(
        "clip.mp4", {"camera_control_direction": "Left", "camera_control_speed": "0.1"}
    )
    assert conditioner.uses(named) == ("camera_control_direction", "camera_control_speed")
    path = encoded(conditioner, named)["camera_path"]
    expected = camera.path_of(camera.moving("Left", "0.1", FRAMES), height=HEIGHT, width=WIDTH)
    assert torch.equal(path, expected)
    usual = encoded(conditioner, controls("clip.mp4", {"camera_control_direction": "Left"}))[
        "camera_path"
    ]
    assert torch.equal(
        usual,
        camera.path_of(camera.moving("Left", str(1 / 54), FRAMES), height=HEIGHT, width=WIDTH),
    )
    with pytest.raises(UserError, match="has no camera_control_direction and no camera_file"):
        conditioner.uses(controls("clip.mp4"))
    with pytest.raises(
        UserError,
        match="a sample has no .*; give one of the columns in sample.controls, or with --control",
    ):
        conditioner.uses(controls(None))
    file = pose_file(tmp_path / "poses.txt", camera.moving("Up", "0.1", FRAMES))
    both = {**named.files, "camera_file": file}
    assert conditioner.uses(controls("clip.mp4", both)) == ("camera_file", ""), (
        "the file stands in place of the others"
    )
    path = encoded(conditioner, controls(None, both))["camera_path"]
    assert torch.equal(
        path, encoded(conditioner, controls(None, {"camera_file": file}))["camera_path"]
    )
    assert (
        alternatives_of(columns(PRESETS["fun-v1.1-control-camera-1.3b"]), ["camera_file"])
        == named.files.keys()
    )
    # before hours of encoding
    with pytest.raises(UserError, match="camera_control_direction = 'Forward'"):
        conditioner.uses(controls("clip.mp4", {"camera_control_direction": "Forward"}))


def test_the_poses_of_a_file_are_spread_over_the_clip_that_it_was_made_for(tmp_path: Path) -> None:
    clip = video_file(tmp_path / "clip.mp4", 1, frames=17)
    poses = camera.moving("Right", "0.05", 11)
    file = pose_file(tmp_path / "poses.txt", poses)
    given = controls(clip, {"camera_file": file}, start_seconds=4 / 16)
    assert Camera().uses(given) == ("camera_file", "")
    path = encoded(Camera(), given)["camera_path"]
    # a steady move is a straight line: what is between poses is known, from the first frame to the
    # seventeenth
    between = camera.moving("Right", "0.05", 1).repeat(FRAMES, 1)
    between[:, 9] -= 0.05 * 10 * (4 + torch.arange(FRAMES, dtype=torch.float64)) / 16
    torch.testing.assert_close(
        path, camera.path_of(between, height=HEIGHT, width=WIDTH), atol=1e-5, rtol=1e-5
    )
    drawn = encoded(Camera(), controls(None, {"camera_file": file}))["camera_path"]
    torch.testing.assert_close(
        drawn, camera.path_of(poses[:FRAMES], height=HEIGHT, width=WIDTH), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(UserError, match="has 11 poses for 13 frames"):
        encoded(Camera(), controls(None, {"camera_file": file}, frames=13))


@pytest.mark.parametrize(("rows", "of"), [(81, 81), (17, 17), (11, 17), (30, 17), (1, 5), (2, 1)])
def test_the_first_and_the_last_pose_are_the_first_and_the_last_frames(rows: int, of: int) -> None:
    """As VideoX-Fun stretches a table of poses: interpolation of two dimensions, the other one as
    it is, corners aligned."""
    poses = torch.randn(
        rows, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
    )
    expected = torch.nn.functional.interpolate(
        poses[None, None], (of, 19), mode="bilinear", align_corners=True
    )[0, 0]
    found = camera.at(poses, torch.arange(of), of=of)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    if rows == of:
        assert torch.equal(found, poses)
    assert torch.equal(camera.at(poses, torch.tensor([of + 5]), of=of)[0], found[-1])


def test_a_pose_for_each_image_of_a_folder_and_for_frames_of_another_rate(tmp_path: Path) -> None:
    """A folder that names no rate has no seconds; of a video at twice the rate every second pose is
    taken."""
    (tmp_path / "shot").mkdir()
    for number in range(FRAMES):
        image_file(tmp_path / "shot" / f"{number:04d}.png", number)
    poses = camera.moving("UpIn", "0.03", FRAMES)
    file = pose_file(tmp_path / "poses.txt", poses)
    path = encoded(Camera(), controls(tmp_path / "shot", {"camera_file": file}))["camera_path"]
    torch.testing.assert_close(
        path, camera.path_of(poses, height=HEIGHT, width=WIDTH), atol=1e-5, rtol=1e-5
    )
    many = camera.moving("UpIn", "0.03", 18)
    fast = controls(
        video_file(tmp_path / "v.mp4", 1, frames=18, fps=32.0),
        {"camera_file": pose_file(tmp_path / "p.txt", many)},
    )
    path = encoded(Camera(), fast)["camera_path"]
    torch.testing.assert_close(
        path, camera.path_of(many[::2], height=HEIGHT, width=WIDTH), atol=1e-5, rtol=1e-5
    )


def pose_file(path: Path, poses: torch.Tensor) -> str:
    lines = [" ".join(f"{number:.9g}" for number in pose) for pose in poses.tolist()]
    path.write_text("\n".join(["the address of the video", *lines]) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no camera pose"),
        ("only a first line\n", "has no camera pose"),
        ("first\n1 2 3\n", "line 2 is not a camera pose"),
        ("first\n" + " ".join(["nan"] * 19) + "\n", "line 2 is not a camera pose"),
        ("first\n0 0 1 .5 .5 0 0 1 0 0 0 0 1 0 0 0 0 1 0\n", "line 2 is not a camera pose"),
        ("first\n0 1 1 .5 .5 0 0 1 0 0 0 1 0 0 0 0 0 1 0\n", "has a singular matrix"),
        ("first\n\xff\xfe", "cannot be read as a file of camera poses"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_poses_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "poses.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        camera.read_poses(tmp_path / "poses.txt")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        camera.read_poses(tmp_path / "absent.txt")


@pytest.mark.parametrize(
    ("direction", "speed"),
    [("left", ""), ("", ""), ("Left;Up", ""), ("Left", "fast"), ("Left", "nan"), ("Left", "inf")],
)
def test_a_direction_or_speed_that_is_none_is_one_line(direction: str, speed: str) -> None:
    with pytest.raises(UserError, match=r"camera_control_(direction|speed)"):
        camera.moving(direction, speed, 5)
