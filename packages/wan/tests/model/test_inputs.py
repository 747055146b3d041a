"""What noised latents and training items become: clean first frames, channels behind the latents,
references in front of them."""

from dataclasses import replace

import pytest
import torch
from media_files import picture

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import first_frame_mask
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.planned_step import largest_bucket
from ditkit_core.testing.world import make_model
from ditkit_core.training.flow_matching import NoisedBatch, velocity_errors
from ditkit_wan.model.inputs import assemble, empty_item, make_inputs, num_tokens
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import PRESETS, WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.variants import experts

SIGMA = torch.tensor([0.73125, 0.25])
TINY = WanArch(
    dim=24,
    ffn_dim=32,
    heads=2,
    layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=5,
    text_tokens=3,
    freq_dim=8,
)


def item(
    frames: int = 3, height: int = 4, width: int = 6, **more: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {"latents": torch.randn(4, frames, height, width), "text": torch.randn(3, 5), **more}


def test_a_first_frame_takes_the_place_of_the_first_latent_frame_at_time_zero():
    items = [item(first_frame=torch.full((4, 1, 4, 6), 7.0)), item()]
    noised = [torch.randn(4, 3, 4, 6) for _ in items]
    made = make_inputs(noised, SIGMA, items, 1.0)
    assert torch.equal(made.latents[0][:, 0], torch.full((4, 4, 6), 7.0))
    assert torch.equal(made.latents[0][:, 1:], noised[0][:, 1:]) and torch.equal(
        made.latents[1], noised[1]
    )
    assert made.timestep.dtype == torch.float32
    assert made.timestep.tolist() == [[0, 731.25], [0, 250]]
    assert made.late.tolist() == [[False] * 6 + [True] * 12, [True] * 18]


def test_modulation_is_two_rows_per_sample_at_most():
    """A row per token would be gigabytes, and each block would make as much again."""
    items = [item(first_frame=torch.zeros(4, 1, 4, 6)), item()]
    model = WanTransformer(replace(TINY, token_times=True), Precision(matmul=torch.float32))
    made = make_inputs([i["latents"] for i in items], SIGMA, items, 1.0)
    assert model.embed(made).modulation.shape == (2, 2, 6, 24)
    items = [item(), item()]
    made = make_inputs([i["latents"] for i in items], SIGMA, items, 1.0)
    assert made.timestep.tolist() == [731.25, 250.0] and made.late is None
    assert model.embed(made).modulation.shape == (2, 1, 6, 24)


def test_in_a_batch_of_different_sizes_each_sample_has_its_own_first_tokens():
    items = [
        item(width=4, first_frame=torch.zeros(4, 1, 4, 4)),
        item(first_frame=torch.zeros(4, 1, 4, 6)),
    ]
    made = make_inputs([i["latents"] for i in items], SIGMA, items, 1.0)
    assert made.late.shape == (2, 18) and (~made.late).sum(1).tolist() == [4, 6]


def test_a_still_has_nothing_to_learn_after_its_first_frame_and_starts_with_none():
    still = item(frames=1, first_frame=torch.zeros(4, 1, 4, 6))
    made = make_inputs([still["latents"]], SIGMA[:1], [still], 1.0)
    assert made.timestep.tolist() == [731.25] and torch.equal(made.latents[0], still["latents"])
    assert first_frame_mask(still) is None


def test_the_first_frame_is_not_learnt():
    given = item(first_frame=torch.zeros(4, 1, 4, 6))
    mask = first_frame_mask(given)
    assert mask is not None and mask.dtype == torch.float32
    assert mask.expand(4, 3, 4, 6)[0, :, 0, 0].tolist() == [0, 1, 1]
    assert first_frame_mask(item()) is None


def test_the_loss_is_the_same_whatever_is_predicted_in_the_first_frame():
    model = make_model(WAN, replace(TINY, token_times=True))
    given = item(first_frame=torch.randn(4, 1, 4, 6))
    noise = torch.randn(4, 3, 4, 6)

    def error(given: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return velocity_errors(
                Model(model, run_plain, WAN), NoisedBatch([given], SIGMA[:1], [noise]), 1.0
            )

    before = error(given)
    given["latents"][:, 0] += 5  # neither an input, as the clean frame stands there, nor a target
    assert torch.equal(error(given), before)
    given["latents"][:, 1] += 5
    assert not torch.equal(error(given), before)


@pytest.mark.parametrize("name", ["y", "image", "vace"])
def test_a_condition_goes_with_all_samples_of_a_batch_or_none(name):
    items = [item(**{name: torch.zeros(1)}), item()]
    with pytest.raises(UserError, match=f"1 of 2 samples of a batch have '{name}'"):
        make_inputs([i["latents"] for i in items], SIGMA, items, 1.0)


@pytest.mark.parametrize(
    ("more", "given", "message"),
    [
        ({"in_channels": 10}, {}, "conditioned on 'y'"),
        (
            {"in_channels": 10},
            {"y": (5, 3, 4, 6)},
            "takes 10 channels, .* 4 of latents and 5 of 'y'",
        ),
        ({"image_dim": 6}, {}, "conditioned on 'image'"),
        (
            {"image_dim": 6, "image_positions": 8},
            {"image": (4, 6)},
            "has 4 tokens, and this model takes 8",
        ),
        ({"vace_layers": (0,), "vace_channels": 6}, {}, "conditioned on 'vace'"),
        ({}, {"y": (6, 3, 4, 6)}, "takes none"),
        ({}, {"vace": (6, 3, 4, 6)}, "takes none"),
        ({}, {"first_frame": (4, 1, 4, 6)}, "takes none"),
    ],
)
def test_conditions_that_are_not_the_models_are_one_line(more, given, message):
    model = WanTransformer(replace(TINY, **more), Precision(matmul=torch.float32))
    sample = item(**{name: torch.zeros(shape) for name, shape in given.items()})
    with pytest.raises(UserError, match=message) as caught:
        model(make_inputs([sample["latents"]], SIGMA[:1], [sample], 1.0))
    assert "\n" not in str(caught.value)


def test_references_of_vace_are_frames_in_front_of_the_clips():
    cached = item(vace=torch.zeros(96, 5, 4, 6), vace_reference=torch.full((4, 2, 4, 6), 3.0))
    made = assemble(cached)
    assert set(made) == {"latents", "text", "vace"} and "vace_reference" in cached
    assert torch.equal(
        made["latents"], torch.cat([torch.full((4, 2, 4, 6), 3.0), cached["latents"]], 1)
    )
    plain = item(vace=torch.zeros(96, 3, 4, 6))
    assert torch.equal(assemble(plain)["latents"], plain["latents"])


# Published: tokens of a clip of a size.
@pytest.mark.parametrize(
    ("preset", "size", "tokens"),
    [
        ("t2v-14b", (81, 480, 832), 32_760),
        ("i2v-14b-720p", (81, 720, 1280), 75_600),
        ("vace-14b", (81, 480, 832), 32_760),
        ("ti2v-5b", (121, 704, 1280), 27_280),
        ("ti2v-5b", (49, 480, 832), 5_070),
    ],
)
def test_tokens_of_a_clip(preset, size, tokens):
    with torch.device("meta"):
        assert num_tokens(empty_item(PRESETS[preset], size)) == tokens


def test_reference_columns_of_vace_are_tokens_of_the_plan(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / "clips" / f"{name}.png", (64, 96), "red")
        (tmp_path / "clips" / f"{name}.txt").write_text(name)
    for number in ("", "_2"):
        picture(tmp_path / f"refs{number}" / "b.png", (64, 96), "navy")
    controls = tuple(
        f"vace_reference_image{number}={tmp_path / f'refs{number}'}" for number in ("", "_2")
    )
    data = {
        "data.folder": str(tmp_path / "clips"),
        "data.frames": 9,
        "data.height": 64,
        "data.width": 96,
    }
    run = create_run(
        WAN,
        resolve(RunConfig, flags={**data, "model.preset": "vace-1.3b", "data.controls": controls}),
    )
    bucket = largest_bucket(run.data, run.arch)
    assert bucket.references == ((64, 96), (64, 96))
    assert num_tokens(bucket.items[0]) == 3 * (64 // 16) * (96 // 16), (
        "the picture and two references"
    )
    assert bucket.items[0]["vace"].shape == (96, 3, 8, 12)


def test_outlines_with_references_are_items_that_vace_takes_and_others_have_none():
    arch = PRESETS["vace-1.3b"]
    with torch.device("meta"):
        sample = WAN.training.empty_item(arch, (9, 64, 96), ((64, 96),) * 3)
        model = WanTransformer(
            replace(arch, layers=1, vace_layers=(0,)), Precision(matmul=torch.float32)
        )
        (velocity,) = model(
            WAN.training.make_inputs([sample["latents"]], torch.zeros(1), [sample], 1.0)
        )
        plain = WAN.training.empty_item(PRESETS["t2v-1.3b"], (9, 64, 96), ((64, 96),))
    assert velocity.shape == sample["latents"].shape == (16, 6, 8, 12)
    assert plain["latents"].shape == (16, 3, 8, 12)


def of_each_kind() -> list[str]:
    """A preset for each architecture, whatever its size and its experts."""
    kinds = {
        replace(
            arch,
            dim=128,
            ffn_dim=1,
            heads=1,
            layers=1,
            vace_layers=arch.vace_layers[:1],
            boundary=0,
        ): name
        for name, arch in PRESETS.items()
    }
    return list(kinds.values())


@pytest.mark.parametrize("preset", of_each_kind())
def test_the_outline_of_a_clip_is_an_item_that_the_model_takes(preset):
    arch = PRESETS[preset]
    with torch.device("meta"):
        sample = WAN.training.empty_item(arch, (9, 64, 96), ())
        model = WanTransformer(
            replace(arch, layers=1, vace_layers=arch.vace_layers[:1]),
            Precision(matmul=torch.float32),
        )
        make = WAN.for_arch(arch).training.make_inputs
        (velocity,) = model(make([sample["latents"]], torch.zeros(1), [sample], 1.0))
    assert velocity.shape == sample["latents"].shape
    assert velocity.shape[0] == (48 if preset.endswith("-5b") else 16)


def test_ti2v_has_its_own_sizes():
    changed = WAN.for_arch(PRESETS["ti2v-5b"])
    assert (changed.data.fps, changed.data.size, changed.data.size_step) == (
        24,
        (121, 704, 1280),
        32,
    )
    assert (WAN.training.control_dropout, changed.training.control_dropout) == (0, 0.5), (
        "it draws from text alone as well as from a picture"
    )
    plain = WAN.for_arch(PRESETS["t2v-14b"])
    assert (plain.training, plain.data, plain.adapters) == (WAN.training, WAN.data, WAN.adapters)
    long_only = {
        name for name, arch in PRESETS.items() if WAN.for_arch(arch).training.fewest_frames == 5
    }
    begun = {
        name
        for name in PRESETS
        if name.startswith("fun-") and ("-inp-" in name or "-camera-" in name)
    }
    assert long_only == {
        "i2v-14b-480p",
        "i2v-14b-720p",
        "i2v-a14b",
        "flf2v-14b-720p",
        "s2v-14b",
        *begun,
    }
    fun = WAN.for_arch(PRESETS["fun-inp-5b"])
    assert (fun.data, fun.training.control_dropout) == (changed.data, 0), (
        "its image is in `y` too, which is there always"
    )


# wan/configs of Wan 2.2; config/wan2.2 and examples/wan2.2_fun, wan2.2_vace_fun of VideoX-Fun
@pytest.mark.parametrize(
    ("preset", "boundary", "guidance"),
    [
        ("t2v-a14b", 0.875, [4.0, 3.0]),
        ("i2v-a14b", 0.9, [3.5, 3.5]),
        *((f"fun-{kind}-a14b", 0.9, [6.0, 6.0]) for kind in ("inp", "control", "control-camera")),
        ("vace-fun-a14b", 0.875, [5.0, 5.0]),
    ],
)
def test_experts_meet_at_the_boundary(preset, boundary, guidance):
    high, low = experts(PRESETS[preset])
    assert (high.part, low.part) == ("transformer", "transformer_2")
    assert (high.min_sigma, high.max_sigma) == (boundary, 1) and (low.min_sigma, low.max_sigma) == (
        0,
        boundary,
    )
    assert [high.guidance, low.guidance] == guidance
    assert WAN.auxiliary.sample_defaults(PRESETS[preset]).guidance == guidance[0]


def test_one_transformer_has_no_experts():
    assert all(experts(arch) == () for name, arch in PRESETS.items() if "a14b" not in name)


def test_steps_are_the_authors():
    steps = {name: WAN.auxiliary.sample_defaults(arch).steps for name, arch in PRESETS.items()}
    assert {name for name, number in steps.items() if number == 40} >= {
        "i2v-14b-480p",
        "t2v-a14b",
        "i2v-a14b",
    }
    assert [steps[name] for name in ("t2v-14b", "flf2v-14b-720p", "vace-14b", "ti2v-5b")] == [
        50
    ] * 4
    assert {steps[name] for name, arch in PRESETS.items() if arch.fun} == {50}


def test_negative_prompts_are_the_authors():
    """`sample_neg_prompt` in wan/configs of Wan2.1, whose flf2v takes that of i2v, and of Wan2.2,
    whose i2v has no prefix."""
    found = {name: WAN.auxiliary.sample_defaults(arch).negative for name, arch in PRESETS.items()}
    plain = found["t2v-14b"]
    assert (
        plain.startswith("色调艳丽，过曝，")
        and plain.endswith("，背景人很多，倒着走")
        and len(plain.split("，")) == 28
    )
    # wan/configs/wan_s2v_14B.py
    assert found.pop("s2v-14b").startswith(
        "画面模糊，最差质量，画面模糊，细节模糊不清，情绪激动剧烈，手快速抖动，字幕，丑陋的，"
    )
    prefixed = {name: text.removesuffix(plain) for name, text in found.items() if text != plain}
    assert prefixed == {
        "i2v-14b-480p": "镜头晃动，", "i2v-14b-720p": "镜头晃动，", "flf2v-14b-720p": "镜头切换，镜头晃动，",
    }  # fmt: skip
