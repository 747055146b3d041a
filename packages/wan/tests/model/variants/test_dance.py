"""WanToDance against recordings of DiffSynth-Studio: sampled between keyframes (local), keyframes
(global), guidance's other side."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.testing.full_size_split import balanced, divided_step
from ditkit_core.testing.world import make_model
from ditkit_wan.model.rope import rotary_angles
from ditkit_wan.model.variants.music import frame_steps
from ditkit_wan.presets import MusicArch, WanArch
from ditkit_wan.spec import WAN

GIVEN = {
    "latents": "latents", "y": "y", "text": "context", "image": "clip_feature",
    "music": "music_feature",
    "refimage": "wantodance_refimage_feature",
}  # fmt: skip
MUSIC = MusicArch(layers=(0,), features=5, width=8, heads=2, ffn_dim=12, skipped=1)
ARCH = WanArch(
    dim=24, ffn_dim=32, heads=2, layers=2, in_channels=12, out_channels=4, text_dim=20,
    text_tokens=6, freq_dim=16,
    image_dim=8, ref_conv=True, music=MUSIC,
)  # fmt: skip


def item(
    seed: int, size: tuple[int, int, int] = (2, 4, 8), *, step: int = 1
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    made = {
        "latents": draw(4, *size),
        "y": draw(8, *size),
        "text": draw(3, 20),
        "image": draw(5, 8),
    }
    return made | {"music": draw(step * (4 * size[0] - 3), 5), "refimage": draw(5, 8)}


def run(model, *items, **extra):
    inputs = WAN.training.make_inputs(
        [one["latents"] for one in items], torch.full((len(items),), 0.4), items, 1.0
    )
    with torch.no_grad():
        return model(inputs._replace(**extra))


@pytest.fixture(scope="module")
def recorded(recording):
    return recording("diffsynth_wantodance_fp32")


@pytest.fixture(scope="module")
def theirs(recorded):
    c = recorded.config
    music = MusicArch(
        layers=tuple(c["wantodance_music_inject_layers"]),
        width=c["music_width"],
        ffn_dim=c["music_ffn"],
    )
    return recorded.model(ref_conv=True, music=music)


@pytest.mark.parametrize("case", ["local", "global"])
def test_outputs_and_gradients_equal_the_recordings(recorded, theirs, case):
    recorded.check(theirs, case, GIVEN)
    used = {name for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    apart = {
        "global": ("embed.patch_embedding_global.", "head.head_global."),
        "local": ("embed.patch_embedding.", "head.head."),
    }
    for form, prefixes in apart.items():
        for prefix in prefixes:
            assert any(name.startswith(prefix) for name in used) == (form == case), prefix


def test_without_a_reference_image_the_first_frames_tokens_take_its_place(recorded, theirs):
    recorded.check(
        theirs, "plain", {field: name for field, name in GIVEN.items() if field != "refimage"}
    )


def test_queries_and_keys_of_music_have_no_say_in_the_recordings_either(recorded):
    """Why they are not computed: over one key a softmax is 1, and all of these were recorded as
    zeros."""
    dead = {f"{case}.music_injector.injector.{number}.{name}" for case in ("local",
        "global") for number in range(3)
            for name in ("q.weight", "q.bias", "k.weight", "k.bias", "norm_q.weight",
            "norm_k.weight")}  # fmt: skip
    assert recorded.without_gradient == dead


def test_the_negative_side_of_guidance_leaves_out_the_ninth_block(recorded, theirs):
    given = {name: recorded.tensors[f"in.local.{name}"] for name in (*GIVEN.values(), "timestep")}
    items = {
        field: given[name] if field == "music" else given[name][0] for field, name in GIVEN.items()
    }
    inputs = WAN.training.make_inputs([items["latents"]], given["timestep"] / 1000, [items], 1.0)
    with torch.no_grad():
        (skipped,) = theirs(inputs._replace(skips=True, timestep=given["timestep"]))
    expected = recorded.tensors["out.local.skipped"][0]
    assert float((skipped - expected).norm() / expected.norm()) <= 2e-6
    assert float((skipped - recorded.tensors["out.local.0"][0]).norm() / expected.norm()) > 0.1


@pytest.mark.parametrize(
    "steps", [(1, 1, 1), (4, 4, 4), (1, 4, 2)], ids=["local", "global", "both"]
)
def test_each_sample_of_a_batch_hears_its_own_music(steps):
    """Sizes, lengths of music and rates differ. 1e-5: padding changes the order of summation."""
    model = make_model(WAN, ARCH)
    sizes = [(2, 4, 8), (3, 4, 8), (1, 8, 8)]
    items = [
        item(i, size, step=step) for i, (size, step) in enumerate(zip(sizes, steps, strict=True))
    ]
    together = run(model, *items)
    for one, velocity in zip(items, together, strict=True):
        (alone,) = run(model, one)
        assert velocity.shape == one["latents"].shape
        torch.testing.assert_close(velocity, alone, rtol=1e-5, atol=1e-5)
    (other,) = run(model, items[0] | {"music": item(9, step=steps[0])["music"]})
    assert (other - together[0]).norm() > 1e-3 * together[0].norm()


def test_music_crosses_between_blocks_in_the_carry_alone():
    """No attribute of the model holds any of it: two forwards at once, block by block in turns,
    disturb each other in nothing."""
    model = make_model(WAN, ARCH)
    items = [item(0), item(1, (2, 8, 8), step=4)]
    expected = [run(model, one)[0] for one in items]
    with torch.no_grad():
        carries = [
            model.embed(WAN.training.make_inputs([one["latents"]], torch.tensor([0.4]), [one], 1.0))
            for one in items
        ]
        for block in model.blocks():
            carries = [block(carry) for carry in carries]
        assert all(
            torch.equal(model.head(carry)[0], velocity)
            for carry, velocity in zip(carries, expected, strict=True)
        )
    assert [carry.music.rows.shape for carry in carries] == [(1, 16, 24), (1, 16, 24)]


def test_a_reference_in_front_hears_the_beginning():
    """The authors' code counts it as one more frame of the music too."""
    model, one = make_model(WAN, ARCH), item(0)
    one["reference"] = torch.ones(16, 1, 4, 8)
    carry = model.embed(WAN.training.make_inputs([one["latents"]], torch.tensor([0.4]), [one], 1.0))
    assert carry.music.rows.shape[1] == 8 * 3 and carry.grids == ((3, 2, 4),)
    assert run(model, one)[0].shape == (4, 2, 4, 8)


def test_the_rate_follows_from_how_many_rows_of_music_a_frame_lasts():
    """149 frames: the authors' rule is 30 / int(rows / 149 + 0.5), and librosa returns a row more
    than there are frames."""
    latents = [torch.empty(16, 38, 4, 8, device="meta")] * 6
    rows = [torch.empty(num, 35, device="meta") for num in (149, 150, 596, 597, 1788, 100)]
    assert frame_steps(rows, latents) == (1, 1, 4, 4, 12, 1)


def test_keyframes_stand_where_their_frames_would():
    """Three frames that last 4 positions each are at 0, 4 and, the last, 11."""
    far = rotary_angles((12, 1, 2), 24, torch.device("cpu")).unflatten(0, (12, 2))
    near = rotary_angles((3, 1, 2), 24, torch.device("cpu"), 4).unflatten(0, (3, 2))
    assert torch.equal(near, far[[0, 4, 11]])
    assert torch.equal(rotary_angles((1, 1, 2), 24, torch.device("cpu"), 1), far[0])


def test_clips_that_music_cannot_be_spread_over_are_refused():
    with pytest.raises(UserError, match=r"48 × 32 pixels are 6 tokens"):
        run(make_model(WAN, ARCH), item(0, (2, 4, 6)))
    with pytest.raises(UserError, match="no row"):
        run(make_model(WAN, ARCH), item(0) | {"music": torch.zeros(0, 5)})
    with pytest.raises(UserError, match="conditioned on 'music'"):
        run(
            make_model(WAN, ARCH),
            {name: tensor for name, tensor in item(0).items() if name != "music"},
        )


@pytest.mark.parametrize(
    ("preset", "rows"), [("wantodance-14b", 149), ("wantodance-14b-global", 596)]
)
def test_a_plan_has_all_that_the_form_is_given(preset, rows):
    planned = WAN.training.empty_item(WAN.architecture.presets[preset], (149, 1280, 720), ())
    assert planned["music"].shape == (rows, 35)
    assert planned["refimage"].shape == planned["image"].shape == (257, 1280)
    assert planned["y"].shape == (20, 38, 160, 90)
    assert "reference" not in planned


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["wantodance-14b", "wantodance-14b-global"])
def test_at_its_published_size_it_is_divided_over_devices_that_refuse_to_mix(preset, monkeypatch):
    """The case that was seen to fail: music was an attribute, used on whatever device the tokens
    were."""
    published = WAN.architecture.presets[preset]
    arch = replace(published, layers=5, music=replace(published.music, layers=(0, 4)))
    with torch.device("meta"):
        planned = [WAN.training.empty_item(arch, (149, 1280, 720), ())]
    divided = divided_step(
        WAN, arch, balanced(WAN, 3), planned, policy="full", rank=32, patch=monkeypatch
    )
    divided.check()
    # tokens, modulation, time, rotary table, text, image, music; of these the tokens alone come
    # from an adapter
    assert [(carry["tensors"], carry["gradients"]) for carry in divided.carried] == [(7, 1)] * 2
