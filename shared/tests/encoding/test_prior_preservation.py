"""Prior preservation: which class images go with which samples, what they weigh, and where missing
ones come from."""

import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_training import toy_model
from toy_world import World, equal

from ditkit_core.data.media import image as still
from ditkit_core.data.media.clip import write_image
from ditkit_core.encoding.cache import Cache, key
from ditkit_core.encoding.config import PriorConfig
from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, BatchSize, TrainDataLoader
from ditkit_core.encoding.prior_preservation import PriorDataLoader, count_media
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.encoders import Denoiser, GenerationRequest
from ditkit_core.models.spec import SampleDefaults
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToySampler, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, micro_batches
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import (
    LossMask,
    NoisedBatch,
    matching_base,
    sample_noise,
    velocity_errors,
)
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step


def stored(
    folder: Path, name: str, count: int, widths: tuple[int, ...] = (2,)
) -> list[EncodedSample]:
    """Samples in a cache, of these widths in turn."""
    cache, made = Cache(folder), []
    random = torch.Generator().manual_seed(len(name))
    cache.put("text", key(""), {"text": torch.zeros(1, 8)}, {})
    for i in range(count):
        id = f"{name}{i}"
        latents = torch.randn(4, 1, 2, widths[i % len(widths)], generator=random)
        cache.put("media", key(id), {"latents": latents}, {})
        cache.put("text", key(id), {"text": torch.randn(3, 8, generator=random)}, {})
        made.append(
            EncodedSample(
                id=id, cache=cache, media_key=key(id), text_keys=(key(id),), empty_text_key=key("")
            )
        )
    return made


def paired(
    folder: Path, *, size: BatchSize, widths: tuple[int, ...] = (2,), **given: Any
) -> PriorDataLoader:
    data = TrainDataLoader(stored(folder, "dog", 5, widths), seed=1, batch_size=size)
    prior = stored(folder, "class", 4, given.pop("prior_widths", (2,)))
    return PriorDataLoader(data, prior, **{"seed": 1, "batch_size": size, "weight": 0.5, **given})


@pytest.mark.parametrize("widths", [(2,), (2, 3)])
@pytest.mark.parametrize("prior_widths", [(2,), (4, 2, 4)])
def test_each_micro_batch_is_followed_by_as_many_of_the_prior(
    tmp_path: Path, widths: tuple[int, ...], prior_widths: tuple[int, ...]
) -> None:
    data = paired(tmp_path, size=BatchSize(samples=2), widths=widths, prior_widths=prior_widths)
    used: list[str] = []
    for index in range(12):
        instance, *prior = data.micro_batches(index)
        ids = [id for batch in prior for id in batch.ids]
        assert len(ids) == len(instance.ids) and all(id.startswith("class") for id in ids)
        assert instance.counted != 0 and not instance.weights
        for batch in prior:
            assert (list(batch.weights), batch.counted) == ([0.5] * len(batch.ids), 0)
            assert len({item["latents"].shape for item in batch.items}) == 1
        used += ids
    for epoch in range(4):
        assert sorted(used[4 * epoch : 4 * epoch + 4]) == [f"class{i}" for i in range(4)]


def test_the_pairs_are_a_function_of_seed_and_index(tmp_path: Path) -> None:
    def drawn(order: Any, **given: Any) -> dict[int, list[list[str]]]:
        data = paired(
            tmp_path, size=BatchSize(samples=2), widths=(2, 3), prior_widths=(2, 3), **given
        )
        return {index: [batch.ids for batch in data.micro_batches(index)] for index in order}

    forwards = drawn(range(20))
    assert drawn(reversed(range(20))) == forwards
    other = drawn(range(20), seed=2)
    assert [ids[0] for ids in other.values()] == [ids[0] for ids in forwards.values()]
    assert other != forwards


def test_a_budget_of_tokens_holds_for_the_prior_too(tmp_path: Path) -> None:
    size = BatchSize(tokens=8, num_tokens=TOY.training.num_tokens)
    for index in range(6):
        instance, *prior = paired(tmp_path, size=size, prior_widths=(4,)).micro_batches(index)
        assert [len(instance.ids), *(len(batch.ids) for batch in prior)] == [2, 1, 1]


def test_the_loss_is_the_mean_over_the_instance_plus_a_weighted_mean_over_the_prior(
    tmp_path: Path,
) -> None:
    """By hand, one sample at a time, over two micro-batches of two with their prior of another
    shape."""
    data = paired(tmp_path, size=BatchSize(samples=2), prior_widths=(4,), weight=0.25)
    made = [batch for index in range(2) for batch in data.micro_batches(index)]
    model, trainable = toy_model()
    result = training_step(
        Model(model, BlockEngine(), TOY),
        made,
        NamedOptimizer(trainable, OptimConfig()),
        StepContext(step=3, seed=1, flow=FlowConfig()),
        lr=0.01,
        clip_norm=0.0,
    )
    reference, expected = toy_model()
    losses: dict[bool, list[Tensor]] = {True: [], False: []}
    named = [(id, item) for batch in made for id, item in zip(batch.ids, batch.items, strict=True)]
    for place, (id, item) in enumerate(named):
        sigma, noise = sample_noise(item["latents"], FlowConfig(), 5.0, 1, "noise", 3, place, id)
        noised = (1 - sigma) * item["latents"] + sigma * noise
        velocity = reference(ToyInputs([noised], sigma[None], [item["text"]]))[0]
        losses[id.startswith("class")].append(
            (velocity - (noise - item["latents"])).square().mean()
        )
    assert [len(losses[False]), len(losses[True])] == [4, 4]
    total = torch.stack(losses[False]).mean() + 0.25 * torch.stack(losses[True]).mean()
    total.backward()
    assert result.loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in expected.items():
        scale = float(parameter.grad.abs().max())
        # fp32 sums over another order of samples
        assert torch.allclose(trainable[name].grad, parameter.grad, rtol=1e-4, atol=1e-6 * scale), (
            name
        )


@pytest.mark.parametrize("fields", [{"images": 0}, {"weight": 0.0}, {"weight": -1.0}])
def test_settings_without_meaning_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"prior.{next(iter(fields))} = .*; set") as caught:
        PriorConfig(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "  "}, "prior.prompt is blank"),
        ({"weight": 2.0}, "without prior.folder, prior.prompt or prior.match_base"),
        ({"images": 20}, "needs prior.prompt"),
        ({"images": 20, "folder": "class"}, "needs prior.prompt"),
    ],
)
def test_settings_that_would_not_be_used_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        PriorConfig(**fields)
    PriorConfig(prompt="a dog", images=20, weight=2.0)


# In a run


class Recording(ToySampler):
    """The toy's sampler, which remembers its jobs and whether adapters had been trained."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.jobs: list[GenerationRequest] = []
        self.base: list[bool] = []
        self.stop_after: int | None = None
        self.loaded = False

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        if self.stop_after is not None and len(self.jobs) >= self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        steps = super().denoise(job)
        denoiser = yield next(steps)
        model: Any = denoiser.model
        up = [p for name, p in model.named_parameters() if "lora_B" in name]
        self.base.append(all(not p.any() for p in up) and not model.training)
        for _ in range(job.steps - 1):
            denoiser = yield steps.send(denoiser)
        with pytest.raises(StopIteration) as done:
            steps.send(denoiser)
        return done.value.value

    def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
        self.loaded = True
        return super().decode(latents)

    def unload(self) -> None:
        self.loaded = False


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    world.sampler = Recording()  # type: ignore[attr-defined]
    world.spec = altered(world.spec, sampler=lambda *_: world.sampler)  # type: ignore[attr-defined]
    return world


def prior_run(world: World, name: str, steps: int, *flags: str) -> int:
    return world.train(
        name,
        steps,
        "--prior.prompt",
        "a class",
        "--prior.images",
        "3",
        "--sample.captions",
        "0",
        *flags,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_missing_class_images_are_generated_with_the_base_before_training(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prior_run(world, "run", 2) == 0
    folder = world.folder / "run" / "prior"
    assert list(contents(folder)) == [
        f"class-0000{i}.{suffix}" for i in range(3) for suffix in ("png", "txt")
    ]
    assert {path.read_text() for path in folder.glob("*.txt")} == {"a class\n"}
    assert still.image_size(folder / "class-00000.png") == (16, 16)
    recorded = world.sampler  # type: ignore[attr-defined]
    assert [job.seed for job in recorded.jobs] == [0, 1, 2] and recorded.base == [True] * 3
    assert not recorded.loaded, "memory is given back before training"
    assert {(job.frames, job.height, job.width, job.steps) for job in recorded.jobs} == {
        (1, 16, 16, 2)
    }
    assert "generating 3 images of 'a class'" in capsys.readouterr().out
    used = json.loads((world.folder / "run" / "data.json").read_text())
    assert {"prior: class-00000", "prior: class-00001", "prior: class-00002"} < used.keys()
    assert world.text.loads == 1, "the prompt is encoded with the captions"
    assert prior_run(world, "run", 3) == 0
    assert len(recorded.jobs) == 3


@pytest.mark.parametrize(("defaults", "guided"), [("negative", True), ("embedding", False)])
def test_class_images_are_generated_as_the_models_authors_do(
    world: World, defaults: Any, guided: bool
) -> None:
    own = SampleDefaults(steps=3, guidance=2.5, guided_by=defaults)
    world.spec = altered(world.spec, sample_defaults=lambda arch: own)
    assert prior_run(world, "run", 1, "--sample.steps", "0") == 0
    jobs = world.sampler.jobs  # type: ignore[attr-defined]
    assert {(job.steps, job.guidance, job.negative is not None) for job in jobs} == {
        (3, 2.5, guided)
    }


def test_sampling_that_was_interrupted_goes_on_where_it_stopped(world: World) -> None:
    assert prior_run(world, "whole", 1) == 0
    recorded = world.sampler  # type: ignore[attr-defined]
    recorded.jobs, recorded.stop_after = [], 2
    assert prior_run(world, "parts", 1) == 130
    assert len(contents(world.folder / "parts" / "prior")) == 4
    recorded.stop_after = None
    assert prior_run(world, "parts", 1) == 0
    assert [job.seed for job in recorded.jobs] == [0, 1, 2]
    assert contents(world.folder / "whole" / "prior") == contents(world.folder / "parts" / "prior")
    assert equal(world.adapter("whole"), world.adapter("parts"))


def test_images_of_ones_own_count_and_only_the_rest_is_generated(world: World) -> None:
    world.add("regular/mine.png", (16, 16), "pink", "a class of mine")
    assert prior_run(world, "run", 1, "--prior.folder", "regular") == 0
    assert [job.seed for job in world.sampler.jobs] == [0, 1]  # type: ignore[attr-defined]
    assert len(list((world.folder / "regular").glob("*.png"))) == 3
    assert not (world.folder / "run" / "prior").exists()


def test_masks_of_class_images_are_no_class_images(world: World) -> None:
    world.add("regular/mine.png", (16, 16), "pink", "a class of mine")
    world.add("regular/a-mask.png", (16, 16), "pink", "a photo of a mask")
    world.add("regular/a.png", (16, 16), "pink", "a face")
    write_image(world.folder / "regular" / "mine-mask.png", torch.ones(3, 16, 16))
    assert count_media(world.folder / "regular") == 3


def test_the_prior_changes_what_is_learned_and_resuming_does_not(world: World) -> None:
    for i, colour in enumerate(("pink", "lime", "black")):
        world.add(f"regular/{i}.png", (16, 32), colour, f"class {i}")
    flags = (
        "--prior.folder",
        "regular",
        "--train.batch_size",
        "2",
        "--data.buckets",
        "true",
        "--data.bucket_step",
        "4",
    )
    assert world.train("without", 4) == 0
    assert world.train("whole", 4, *flags) == 0
    assert world.train("parts", 2, *flags) == 0
    assert world.train("parts", 4, *flags) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))
    assert not equal(world.adapter("whole"), world.adapter("without"))
    assert len(world.sampler.jobs) == 8, "two samples at the end of each, no class picture"  # type: ignore[attr-defined]


def refused(world: World, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert prior_run(world, "run", 1, *flags) == 1
    error = capsys.readouterr().err
    warned, _, error = error.rpartition("error: ")
    assert error.count("\n") == 1 and "error: " not in warned
    assert (world.media.loads, world.text.loads) == (0, 0)
    return error


def test_what_cannot_be_sampled_is_said_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(world, capsys, "--adapter.method", "full")
    assert "3 class images are missing" in said and "adapter.method = full" in said
    world.add("regular/0.png", (16, 16), "pink", "x")
    (world.folder / "regular" / "metadata.jsonl").write_text('{"image": "0.png", "text": "x"}')
    said = refused(world, capsys, "--prior.folder", "regular")
    assert "metadata.jsonl" in said and "prior.images = 1" in said


def test_a_folder_that_is_missing_is_named_by_its_own_key(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1, "--prior.folder", "nowhere") == 1
    assert "prior.folder nowhere does not exist" in capsys.readouterr().err


def test_class_images_that_changed_are_noticed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prior_run(world, "run", 1) == 0
    world.add("run/prior/class-00001.png", (16, 16), "pink", "a class")
    assert prior_run(world, "run", 2) == 1
    assert "1 changed, first 'prior: class-00001'" in capsys.readouterr().err


def test_an_adapter_that_starts_from_a_file_generates_none(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not the untrained model; with the images there it trains."""
    assert world.train("first", 1) == 0
    loads = world.text.loads
    init = ("--adapter.init", str(world.folder / "first" / "exports" / "first.safetensors"))
    capsys.readouterr()
    assert prior_run(world, "run", 1, *init) == 1
    error = capsys.readouterr().err
    assert "adapter.rank = 2 has no effect" in error
    assert (
        "with adapter.init they are not generated; put them there" in error
        and error.count("\n") == 2
    )
    assert world.text.loads == loads
    for i in range(3):
        world.add(f"regular/{i}.png", (16, 16), "pink", "a class")
    assert prior_run(world, "run", 1, *init, "--prior.folder", "regular") == 0


# Without class images: steps that match the base


def test_the_target_is_what_peft_computes_with_its_adapter_switched_off():
    adapter: Any = ADAPTERS["lora"]
    model: Any = make_model(TOY, ToyArch(), adapter=adapter)
    items = toy_items(2)
    noise = [torch.randn(item["latents"].shape) for item in items]
    batch = NoisedBatch(
        items, torch.tensor([0.3, 0.8]), noise, masks=[LossMask(None, torch.zeros(1))] * 2
    )
    found = matching_base(Model(model, BlockEngine(), TOY), batch, 1.0)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    errors = velocity_errors(Model(model, BlockEngine(), TOY), found, 1.0)
    for layer in model.modules():
        if hasattr(layer, "enable_adapters"):
            layer.enable_adapters(False)
    assert velocity_errors(Model(model, BlockEngine(), TOY), found, 1.0).tolist() == [0, 0]
    assert errors.min() > 1e-4, "everywhere, whatever a mask of the subject weighs"
    assert torch.equal(found.targets[0], found.targets[0].detach())


def test_an_adapter_that_does_nothing_yet_has_no_loss_and_no_gradient():
    model: Any = make_model(TOY, ToyArch(), adapter=ADAPTERS["lora"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:
            parameter.data.zero_()
    batch = replace(micro_batches(toy_items(2), 1)[0], matches_base=True)
    optimizer = NamedOptimizer(trained, OptimConfig())
    context = StepContext(step=0, seed=1, flow=FlowConfig())
    found = training_step(
        Model(model, BlockEngine(policy="full"), TOY),
        [batch],
        optimizer,
        context,
        lr=1.0,
        clip_norm=1.0,
    )
    assert found == (0, 0)


def test_steps_are_a_function_of_seed_and_step_whatever_is_accumulated():
    one, four = (BaseSteps(share=0.25, accumulation=count) for count in (1, 4))
    chosen = [step for step in range(4000) if one.has(7, step)]
    assert 900 < len(chosen) < 1100 and chosen != [step for step in range(4000) if one.has(8, step)]
    assert [four.has(7, index) for index in range(400)] == [
        one.has(7, index // 4) for index in range(400)
    ]


def test_all_samples_of_such_a_step_have_one_caption_and_one_weight(tmp_path: Path):
    samples = stored(tmp_path, "dog", 5)
    Cache(tmp_path).put("text", key("a class"), {"text": torch.full((2, 8), 7.0)}, {})
    for name, caption in ((key("a class"), torch.full((2, 8), 7.0)), ("", torch.zeros(1, 8))):
        steps = BaseSteps(share=0.5, accumulation=1, weight=0.3, text_key=name)
        data = TrainDataLoader(samples, seed=1, batch_size=BatchSize(samples=2), base_steps=steps)
        plain = TrainDataLoader(samples, seed=1, batch_size=BatchSize(samples=2))
        for index in range(20):
            batch, other = data.micro_batch(index), plain.micro_batch(index)
            assert batch.ids == other.ids and batch.matches_base == steps.has(1, index)
            if batch.matches_base:
                assert batch.weights == [0.3, 0.3]
                assert all(torch.equal(item["text"], caption) for item in batch.items)
                assert torch.equal(batch.items[1]["latents"], other.items[1]["latents"])
            else:
                assert all(
                    torch.equal(a["text"], b["text"])
                    for a, b in zip(batch.items, other.items, strict=True)
                )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"match_base": 1.0}, "must be a share of the steps"),
        ({"match_base": -0.1}, "must be a share of the steps"),
        ({"match_base": 0.5, "folder": "class"}, "leave one of the two out"),
        ({"match_base": 0.5, "prompt": "a dog", "images": 20}, "without prior.match_base"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        PriorConfig(**fields)
    assert not PriorConfig(match_base=0.5, prompt="a dog", weight=2.0).wanted


def test_a_run_reports_both_losses_apart_and_goes_on_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    flags = ("--prior.match_base", "0.5", "--prior.prompt", "a class", "--sample.captions", "0")
    assert world.train("whole", 6, *flags) == 0
    assert world.train("parts", 3, *flags) == 0 and world.train("parts", 6, *flags) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))
    assert world.train("without", 6, *flags[4:]) == 0
    assert not equal(world.adapter("whole"), world.adapter("without"))
    lines = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    matching = [line["step"] for line in lines if "prior_loss" in line]
    assert matching == [
        step + 1 for step in range(6) if BaseSteps(share=0.5, accumulation=1).has(0, step)
    ]
    assert 0 < len(matching) < 6 and len([line for line in lines if "loss" in line]) == 6 - len(
        matching
    )
    assert (
        "loss of the steps that match the base" in (tmp_path / "whole" / "report.html").read_text()
    )
    assert not (tmp_path / "whole" / "prior").exists()
    capsys.readouterr()
    assert world.train("full", 1, *flags, "--adapter.method", "full") == 1
    assert "adapter.method = full changes the base itself" in capsys.readouterr().err


def test_the_caption_of_such_steps_is_encoded_again_if_it_is_damaged_and_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    world = World(tmp_path)
    flags = ("--prior.match_base", "0.9", "--prior.prompt", "a class", "--sample.captions", "0")
    folder = ("--run.folder", str(tmp_path / "run"))
    assert world.run("encode", *folder, *flags) == 0
    entry = Cache(tmp_path / "cache").path("text", text_key("a class", world.text))
    assert world.run("encode", *folder, *flags, "--prune-cache", "unused") == 0 and entry.exists()
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    assert capsys.readouterr() and world.train("run", 2, *flags) == 0
    assert (
        "is damaged: it is removed, and encoded again" in capsys.readouterr().err
        and entry.read_bytes() != data
    )
    other = (
        "--run.folder",
        str(tmp_path / "other"),
        "--sample.captions",
        "0",
        "--prune-cache",
        "unused",
    )
    assert world.run("encode", *other) == 0 and entry.exists(), (
        "another run's pruning knows what this one needs"
    )
    # The caption is no part of the data that stays.
    assert world.train("run", 3, "--prior.match_base", "0.5", *flags[2:]) == 0
