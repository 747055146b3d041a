"""`sample.adapter`: an adapter that samples have and training does not."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from preview_runs import check_equal, samples
from safetensors.torch import load_file, save_file
from sampling_child import children
from toy_world import World
from two_experts import TwoExperts

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.data.media.image import read_image
from ditkit_core.previews import generate
from ditkit_core.testing.specs import altered


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    return World(tmp_path)


def donor(world: World, *flags: str, name: str = "donor") -> str:
    """An adapter file of another run."""
    flags = ("--optim.lr", "0.05", "--sample.captions", "0", *flags)
    assert (
        world.run("train", "--run.folder", str(world.folder / name), "--train.steps", "2", *flags)
        == 0
    )
    return str(next((world.folder / name / "exports").glob(f"{name}*.safetensors")))


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Adapter files of other runs. Each is trained once for all tests, which read it alone."""
    world = World(tmp_path_factory.mktemp("donors"))

    numbers = count()

    @cache
    def trained(*flags: str) -> str:
        return donor(world, *flags, name=f"donor-{next(numbers)}")

    return trained


LEVERS = {
    "lora": (),
    "dora": ("--adapter.use_dora", "true"),
    "lokr": ("--adapter.method", "lokr", "--adapter.dropout", "0"),
    "full": ("--adapter.method", "full"),
    "int8": ("--base.quantize", "int8"),
    "streamed": ("--train.swap_blocks", "2", "--adapter.targets", "attention"),
    "on another device": ("--sample.device", "cpu"),
    "in another process": ("--sample.device", "cpu"),
}


METHODS = {
    "lora": (),
    "dora": ("--adapter.use_dora", "true"),
    "lokr": ("--adapter.method", "lokr", "--adapter.dropout", "0"),
    "loha": ("--adapter.method", "loha", "--adapter.dropout", "0"),
}


def levers(*without: str) -> list[Any]:
    """Those for a test; a real process is for the night. In the default set are streamed blocks
    next to resident ones, and what stands in for a process."""
    default = dict.fromkeys(("streamed", "on another device"), ())
    marks = {"in another process": pytest.mark.exhaustive, **default}
    return [
        pytest.param(name, marks=marks.get(name, pytest.mark.slow))
        for name in LEVERS
        if name not in without
    ]


@contextmanager
def drawn_elsewhere(world: World, lever: str) -> Iterator[None]:
    """Previews are sampled by what stands in for a process, if this is the lever."""
    if lever != "on another device":
        yield
        return
    with children(world.spec, "draws") as started:
        yield
    assert started


@pytest.mark.parametrize("lever", levers())
def test_training_is_bitwise_what_it_is_without_and_samples_differ(
    world: World, file_of: Callable[..., str], lever: str
) -> None:
    file = file_of("--adapter.targets", '["qkv", "mlp.0"]')
    flags = (
        *LEVERS[lever],
        "--ema.decay",
        "0.5",
        "--save.every_steps",
        "1",
        "--save.keep_last",
        "9",
    )
    previews = ("--sample.every_steps", "1", "--sample.captions", "1")
    with drawn_elsewhere(world, lever):
        assert world.train("plain", 2, *flags, *previews) == 0
        assert world.train("added", 2, *flags, *previews, "--sample.adapter", file) == 0
    plain, added = world.folder / "plain", world.folder / "added"
    check_equal(plain, added)
    for kept in (plain / "exports").glob("*.safetensors"):
        theirs = load_file(added / "exports" / kept.name.replace("plain", "added"))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_file(kept).items())
    drawn, others = samples(plain), samples(added)
    pictures = [name for name in drawn if name.endswith(".png")]
    assert drawn.keys() == others.keys() and len(pictures) == 3
    assert all(drawn[name] != others[name] for name in pictures)


def outputs(world: World, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the model computes of fixed inputs whenever samples are generated from now on."""
    made: list[torch.Tensor] = []
    render = generate.render_samples

    def keeping(stages, sampler, requests, *rest):
        with stages[0].opened() as (model, engine):
            assert all(name.count("lora_") for name in trainable_parameters(model))
            inputs = world.spec.training.make_inputs(
                [torch.ones(4, 1, 4, 4)], torch.tensor([0.5]), [{"text": torch.ones(3, 8)}], 1.0
            )
            model.eval()  # as `denoise.py` does: the trained adapter has dropout
            with torch.no_grad():
                made.append(engine(model, inputs)[0])
        layers = {type(module).__name__ for module in model.modules()}
        assert not layers & {"AddedLora", "AddedFactors", "AddedDoras"}
        return render(stages, sampler, requests, *rest)

    monkeypatch.setattr(generate, "render_samples", keeping)
    return made


@pytest.mark.parametrize("lever", levers("full", "dora"))
def test_training_has_an_assistant_and_samples_are_without_it(
    world: World, file_of: Callable[..., str], lever: str
) -> None:
    file = file_of("--adapter.targets", '["qkv", "mlp.0"]') + "@0.5"
    flags = (
        *LEVERS[lever],
        "--save.every_steps",
        "1",
        "--sample.every_steps",
        "1",
        "--sample.captions",
        "1",
    )
    with drawn_elsewhere(world, lever):
        assert world.train("assisted", 2, *flags, "--base.assistant", file) == 0
        assert world.train("merged", 2, *flags, "--base.merge", json.dumps([file])) == 0
    trained = world.adapter("assisted")
    assert trained and all(
        torch.equal(tensor, world.adapter("merged")[name]) for name, tensor in trained.items()
    )
    assisted, merged = samples(world.folder / "assisted"), samples(world.folder / "merged")
    pictures = [name for name in assisted if name.endswith(".png")]
    assert len(pictures) == 3 and all(assisted[name] != merged[name] for name in pictures)


@pytest.mark.parametrize(
    ("dtype", "method", "trained"),
    [
        ("fp32", "lora", "dora"),
        ("bf16", "dora", "lora"),
        pytest.param("fp32", "lora", "lora", marks=pytest.mark.slow),
        pytest.param("bf16", "lora", "lora", marks=pytest.mark.slow),
        pytest.param("bf16", "lora", "dora", marks=pytest.mark.slow),
        pytest.param("fp32", "dora", "lora", marks=pytest.mark.slow),
    ],
)
def test_samples_of_an_assisted_run_are_those_of_the_bare_base(
    world: World,
    file_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    method: str,
    trained: str,
) -> None:
    file = file_of(*METHODS[method])
    flags = (
        "--optim.lr",
        "0.05",
        "--sample.captions",
        "0",
        "--model.dtype",
        dtype,
        *METHODS[trained],
    )
    assert world.train("run", 2, *flags, "--base.assistant", f"{file}@0.5") == 0
    made = outputs(world, monkeypatch)
    base = ("sample", "--run", str(world.folder / "run"), "--prompt", "a")
    assert world.run(*base) == 0
    assert world.run(*base, "--base.assistant", "") == 0
    assert (
        world.run(*base, "--base.assistant", "", "--base.merge", json.dumps([f"{file}@0.5"])) == 0
    )
    taken_out, without, with_ = made
    if dtype == "fp32":
        # in another order: the low rank's product is rounded on its own, or with the weight
        torch.testing.assert_close(taken_out, without, atol=1e-5, rtol=1e-5)
    else:  # the sum of weight and product was rounded to bf16, and so is each product with it: 2^-9 relative, many times
        assert (taken_out - without).norm() < 0.02 * without.norm()
    assert (with_ - without).norm() > 0.05 * without.norm()


def pixels(file: Path) -> torch.Tensor:
    return torch.from_numpy(read_image(file)).int()


@pytest.mark.slow
def test_class_images_of_an_assisted_run_are_of_the_bare_base(
    world: World, file_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of()
    world.spec = altered(world.spec, advice=lambda arch: "a poor start")
    capsys.readouterr()
    flags = ("--prior.prompt", "a picture", "--prior.images", "1", "--sample.captions", "0")
    ways = {
        "plain": (),
        "assisted": ("--base.assistant", file),
        "merged": ("--base.merge", json.dumps([file])),
    }
    for name, way in ways.items():
        assert world.train(name, 1, *flags, *way) == 0
        assert capsys.readouterr().err.count("a poor start") == (name != "assisted")
    plain, assisted, merged = (
        pixels(next((world.folder / name).rglob("class-*.png"))) for name in ways
    )
    # of 255: rounded from fp32
    assert (plain - assisted).abs().max() <= 1 < (plain - merged).abs().max()


@pytest.mark.slow
def test_each_expert_has_its_own_assistant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained as over a base with the file merged, and sampled without."""
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    donor(world)
    high, low = (
        str(tmp_path / "donor" / "exports" / f"donor_{name}.safetensors")
        for name in ("high_noise", "low_noise")
    )
    flags = ("--train.steps", "1", "--optim.lr", "0.05", "--sample.captions", "0")
    assistants = ("--base.assistant", high, "--base.assistant_low", low)
    assert world.run("train", "--run.folder", "run", *flags, *assistants) == 0
    assert world.run("train", "--run.folder", "plain", *flags) == 0
    for name, key, file in (("high_noise", "merge", high), ("low_noise", "merge_low", low)):
        merged = ("--experts.train", name, f"--base.{key}", json.dumps([file]))
        assert world.run("train", "--run.folder", name, *flags, *merged) == 0
        alone = load_file(tmp_path / name / "exports" / f"{name}.safetensors")
        joint = load_file(tmp_path / "run" / "exports" / f"run_{name}.safetensors")
        assert all(torch.equal(tensor, joint[key]) for key, tensor in alone.items())
    without = ("--base.assistant", "", "--base.assistant_low", "")
    for name, more in (("out", ()), ("bare", without)):
        assert world.run("sample", "--run", "run", "--prompt", "a", "--out", name, *more) == 0
    taken_out, bare = (pixels(next((tmp_path / name).glob("*.png"))) for name in ("out", "bare"))
    assert (taken_out - bare).abs().max() <= 1
    capsys.readouterr()
    assert world.run("train", "--run.folder", "other", *flags, "--base.assistant", low) == 1
    assert "is named after the low_noise expert" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_fine_tune_over_a_merged_adapter_is_sampled_and_written_without_it(
    world: World,
) -> None:
    """As the page says, with `base.merge` in place of `base.assistant`."""
    file = donor(world)
    flags = (
        "--adapter.method",
        "full",
        "--base.merge",
        json.dumps([file]),
        "--export.dtype",
        "fp32",
    )
    without = ("--sample.adapter", json.dumps([f"{file}@-1"]))
    assert world.train("run", 2, *flags, *without, "--sample.captions", "0") == 0
    exported = world.folder / "run" / "exports" / "transformer_official"
    merged = (
        "--adapter",
        file,
        "--merge",
        "--base",
        str(exported),
        "--strength",
        "-1",
        "--dtype",
        "fp32",
    )
    assert world.run("export", *merged, "--out", "out") == 0
    (written,) = (world.folder / "out").rglob("*.safetensors")
    (world.folder / "toy.safetensors").write_bytes(written.read_bytes())
    # its adapter changes nothing
    assert world.train("bare", 1, "--optim.lr", "1e-30", "--sample.captions", "0") == 0
    ways = {"taken_out": ("run",), "with": ("run", "--sample.adapter", "[]"), "bare": ("bare",)}
    for name, (run, *more) in ways.items():
        assert (
            world.run(
                "sample", "--run", str(world.folder / run), *more, "--prompt", "a", "--out", name
            )
            == 0
        )
    taken_out, with_it, bare = (pixels(next((world.folder / name).glob("*.png"))) for name in ways)
    # of 255: sums of fp32 in another order
    assert (taken_out - bare).abs().max() <= 1 < (with_it - bare).abs().max()


@pytest.mark.slow
def test_a_full_fine_tune_of_two_experts_over_merged_adapters_is_sampled_and_written_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    donor(world)
    names = {"high_noise": "", "low_noise": "_low"}
    files = {name: f"donor/exports/donor_{name}.safetensors" for name in names}
    flags = [
        "--adapter.method",
        "full",
        "--export.dtype",
        "fp32",
        "--sample.captions",
        "0",
        "--train.steps",
        "1",
    ]
    assert (
        world.run(
            "train", "--run.folder", "refused", *flags, "--base.assistant_low", files["low_noise"]
        )
        == 1
    )
    assert "in base.merge_low, and with @-1 in sample.adapter_low" in capsys.readouterr().err
    for name, suffix in names.items():
        flags += [f"--base.merge{suffix}", json.dumps([files[name]])]
        flags += [f"--sample.adapter{suffix}", json.dumps([f"{files[name]}@-1"])]
    assert world.run("train", "--run.folder", "run", *flags) == 0
    bare = []
    for name, key in (("high_noise", "transformer"), ("low_noise", "transformer_2")):
        merged = (
            "--base",
            f"run/{name}/exports/transformer_official",
            "--merge",
            "--strength",
            "-1",
            "--dtype",
            "fp32",
        )
        assert world.run("export", "--adapter", files[name], *merged, "--out", name) == 0
        (written,) = (tmp_path / name).rglob("*.safetensors")
        bare += [f"--model.{key}", str(written)]
    with_it = ("--run", "run", "--sample.adapter", "[]", "--sample.adapter_low", "[]")
    # an adapter that changes nothing
    still = ("--optim.lr", "1e-30", "--train.steps", "1", "--sample.captions", "0")
    assert world.run("train", "--run.folder", "bare", *bare, *still) == 0
    for name, given in {
        "out": ("--run", "run"),
        "with": with_it,
        "alone": ("--run", "bare", *bare),
    }.items():
        assert world.run("sample", *given, "--prompt", "a", "--out", name) == 0
    out, with_them, alone = (
        pixels(next((tmp_path / name).glob("*.png"))) for name in ("out", "with", "alone")
    )
    assert (out - alone).abs().max() <= 1 < (with_them - alone).abs().max()


def test_an_assistant_that_could_not_be_taken_out_is_refused(
    world: World, file_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of()
    for flags, said in (
        (("--adapter.method", "full"), "with @-1 in sample.adapter"),
        (("--export.merged", "true"), "export.merged"),
    ):
        capsys.readouterr()
        assert world.train("run", 1, "--base.assistant", file, *flags) == 1
        assert said in capsys.readouterr().err
    for key, value in (
        ("base.assistant", "toy.safetensors"),
        ("sample.adapter", '["toy.safetensors"]'),
    ):
        capsys.readouterr()
        assert world.train("run", 1, f"--{key}", value) == 1
        assert (
            f"{key}: toy.safetensors is a whole transformer" in (said := capsys.readouterr().err)
            and "--extract" in said
        )
    assert world.train("run", 1, "--base.assistant", "nowhere.safetensors") == 1
    assert "nowhere.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method", ["dora", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "dora")]
)
def test_a_sample_is_that_of_the_merged_base(
    world: World, file_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At a strength, over a trained adapter, and all of two files at once; nothing of them stays in
    the model."""
    flags = (*METHODS[method], "--adapter.rank", "3", "--train.seed", "5")
    one, other = file_of(), file_of(*flags)
    assert world.train("run", 2, "--optim.lr", "0.05", "--sample.captions", "0") == 0
    made = outputs(world, monkeypatch)
    base = ("sample", "--run", str(world.folder / "run"), "--prompt", "a")
    assert world.run(*base) == 0
    # In this order, because a DoRA's norm is of the base here, and of what was merged before it
    # there.
    files = json.dumps([f"{other}@0.7", f"{one}@0.5"])
    assert world.run(*base, "--sample.adapter", files) == 0
    assert world.run(*base, "--base.merge", files) == 0
    plain, added, by_merging = made
    # fp32 in another order: the low rank's product is rounded on its own, or with the weight
    torch.testing.assert_close(added, by_merging, atol=1e-5, rtol=1e-5)
    assert (added - plain).abs().max() > 0.01


def test_each_expert_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    donor(world)
    high, low = (
        str(tmp_path / "donor" / "exports" / f"donor_{name}.safetensors")
        for name in ("high_noise", "low_noise")
    )
    run = ("--run.folder", "run", "--train.steps", "1", "--sample.captions", "0")
    assert world.run("train", *run) == 0
    seen: dict[str, bytes] = {}
    for name, flags in {
        "high": ("--sample.adapter", high), "low": ("--sample.adapter_low", low),
        "both": ("--sample.adapter", high, "--sample.adapter_low", low),
    }.items():  # fmt: skip
        flags = (*flags, "--sample.steps", "2")  # the high-noise expert's, and the other's
        assert world.run("sample", "--run", "run", "--prompt", "a", "--out", name, *flags) == 0
        seen[name] = next((tmp_path / name).glob("*.png")).read_bytes()
    assert len(set(seen.values())) == 3, "each acts, or both would be one of them"
    assert world.run("sample", "--run", "run", "--prompt", "a", "--sample.adapter", low) == 1


def refused(world: World, capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The line of a run that is refused before any weights are read."""
    capfd.readouterr()
    assert world.train("refused", 1, *flags) == 1
    out, err = capfd.readouterr()
    (line,) = err.strip().splitlines()
    assert "load the model" not in out and "encode" not in out
    return line


def test_a_missing_or_other_file_is_refused_before_weights_are_read(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "toy.safetensors").rename(world.folder / "away.safetensors")
    line = refused(world, capfd, "--sample.adapter", "missing.safetensors")
    assert "sample.adapter: there is no file" in line and "missing.safetensors" in line
    save_file({"lora_unet_other.lora_down.weight": torch.ones(2, 4)}, "other.safetensors")
    assert "sample.adapter: other.safetensors" in refused(
        world, capfd, "--sample.adapter", "other.safetensors"
    )
    assert "not FILE@strength" in refused(
        world, capfd, "--sample.adapter", "other.safetensors@much"
    )
    assert "one transformer" in refused(world, capfd, "--sample.adapter_low", "other.safetensors")
    (world.folder / "away.safetensors").rename(world.folder / "toy.safetensors")


@pytest.mark.slow
def test_a_run_says_what_its_samples_have_and_that_a_file_has_changed(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    file = Path(donor(world))
    assert world.train("run", 1, "--sample.adapter", f"{file}@0.5") == 0
    assert "sample.adapter: samples are generated with 13 modules of" in capfd.readouterr().out
    about = json.loads((world.folder / "run" / "about.json").read_text())
    assert set(about["model"]["sample_adapters"]) == {f"sample.adapter[0] {file.name}"}
    assert world.train("run", 2, "--sample.adapter", f"{file}@0.5") == 0
    assert "has changed" not in capfd.readouterr().err
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    assert world.train("run", 3, "--sample.adapter", f"{file}@0.5") == 0
    assert f"{file.name} has changed since the last part of this run" in capfd.readouterr().err
    other = world.folder / "other" / file.name
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    both = ("--sample.adapter", f'["{file}", "{other}"]')
    assert world.train("run", 4, *both) == 0
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    capfd.readouterr()
    assert world.train("run", 5, *both) == 0
    assert f"sample.adapter: {file} has changed" in capfd.readouterr().err, (
        "another file has the same name"
    )


def test_class_images_are_of_the_base_alone(world: World, file_of: Callable[..., str]) -> None:
    file = file_of()
    flags = ("--prior.prompt", "a picture", "--prior.images", "1", "--sample.captions", "1")
    assert world.train("plain", 1, *flags, "--sample.steps", "4") == 0  # the model's own number
    assert world.train("added", 1, *flags, "--sample.adapter", file, "--sample.steps", "1") == 0
    one, other = (
        next((world.folder / name).rglob("class-*.png")).read_bytes() for name in ("plain", "added")
    )
    assert one == other
