"""The programs of docs/library.md run as they are, for every family on the base of its demo; what
trains and samples daily for Wan."""

import re
import runpy
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ditkit_core
from ditkit_core.data.media.clip import write_image
from ditkit_core.errors import keys_shown
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.testing.scripts import output_of
from pages import blocks
from workspace import MODELS, ROOT

PAGE = ROOT / "docs" / "library.md"
ON_RANKS = ROOT / "shared" / "tests" / "support" / "program_on_ranks.py"
STILL = re.compile(
    r"image_cond|layerwise_blocks\.0\.attn\.w[qk]\b"
    r"|transformer_blocks\.3\.(attn\.(add_q_proj|to_add_out)|txt_mlp)"
)
"""Layers that the data of a demo move nothing in: a tower that sees references alone, queries and
keys over the layers of a text encoder that has them all alike, and of the last block the text that
nothing reads."""
MOST_LINES, MOST_NAMES = 13, 15
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def programs() -> dict[str, str]:
    """The programs of the page by the heading that they are under."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text.splitlines()
    return {
        [line.removeprefix("## ") for line in lines[: block.line] if line.startswith("## ")][
            -1
        ]: block.text
        for block in blocks(PAGE)
        if block.language == "python"
    }


def for_family(program: str, package: str) -> str:
    """A program of the page for another family."""
    name = package.removeprefix("ditkit_").upper()
    return program.replace("ditkit_wan", package).replace("WAN", name)


@pytest.fixture(scope="module", params=[member.package for member in MODELS])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


one_family = pytest.mark.parametrize("family", ["ditkit_wan"], indirect=True, scope="module")
"""For plans, which read a family through its spec: each package plans its presets, and the core its
own model, in ways that find more."""


def wan_and(others: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Runs a test for Wan as it is marked, and for the other families with this mark too."""
    members = [
        pytest.param(member.package, marks=() if member.package == "ditkit_wan" else others)
        for member in MODELS
    ]
    return pytest.mark.parametrize("family", members, indirect=True, scope="module")


one_daily = wan_and(pytest.mark.slow)
"""For what runs a model often: every family trains its demo's base, saves, exports and samples by
its commands daily (`ConformanceDemo`), which stand on the same functions, and the walk loads, adds
a LoRA, encodes and goes forwards and backwards here."""


@pytest.fixture(scope="module")
def world(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's checkpoint, and two captioned images."""
    folder = tmp_path_factory.mktemp(family)
    write = import_module(f"{family}.demo.write")
    getattr(write, "write_trained", write.write_checkpoint)(folder / "checkpoint")
    for index, caption in enumerate(("a red circle", "a blue square")):
        write_image(folder / "data" / f"{index}.png", torch.full((3, 64, 64), 0.5 * index))
        (folder / "data" / f"{index}.txt").write_text(caption)
    return folder


@pytest.fixture
def run(
    family: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, object]]:
    """Runs a program of the page in the world, and returns its names."""
    monkeypatch.chdir(world)

    def run_program(heading: str) -> dict[str, object]:
        file = world / "program.py"
        file.write_text(for_family(programs()[heading], family), encoding="utf-8")
        return runpy.run_path(str(file))

    return run_program


def check_moved(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Each B of an adapter has something other than zeros, but in layers that the demo's data
    leave."""
    ups = {
        name: tensor is not None and bool(tensor.any())
        for name, tensor in tensors.items()
        if "lora_B" in name or "lora_up" in name
    }
    assert ups and [name for name in ups if not ups[name] and not STILL.search(name)] == []


def test_a_model_is_loaded_and_frozen(run, family):
    model = run("Load a model")["model"]
    assert not list(model.parameters()) and not any(
        p.requires_grad for p in model.module.parameters()
    )
    assert repr(model).startswith(
        f"<Model {family.removeprefix('ditkit_')}"
    ) and "0 trained" in repr(model)


@one_daily
def test_a_lora_has_peft_s_rank_and_scale_and_the_engine_is_replaced(run):
    names = run("Add a LoRA, choose a policy")
    model = names["model"]
    assert {
        p.shape[0] for name, p in model.trainable.items() if name.endswith("lora_A.weight")
    } == {8}
    assert model.origin.adapter.scaling == 16 / 8**0.5
    assert str(model.engine.schedule.policies([None, None])[0]) == "none"


@one_daily
def test_a_loop_trains_and_saves(run, world):
    names = run("Train in a loop of your own")
    check_moved(load_file(world / "cats.safetensors"))
    assert len(names["samples"]) == 2 and (world / "cache").is_dir()


@one_daily
def test_the_trainer_trains_with_defaults_and_resumes(run, world):
    result = run("Train with the Trainer")["result"]
    assert (result.step, result.finished) == (3, True) and result.save.is_dir()
    assert run("Train with the Trainer")["result"].step == 3, "the second start finds nothing to do"


@one_daily
def test_an_adapter_goes_to_a_file_and_back_and_is_sampled(run):
    names = run("Sample, save an adapter, read one")
    assert names["image"].shape == (3, 1, 64, 64) and names["image"].isfinite().all()


@one_family
def test_a_step_is_planned_for_a_gpu_that_is_not_here(run, capsys):
    step = run("Plan my step on that GPU")["step"]
    assert step.fits and step.job.execution.kernels == "triton"
    assert (
        step.seconds
        == step_seconds(step.profile, step.partition, parse_gpus("rtx4090"), step.work)
        > 0
    )
    assert step.devices[0].budget.total == parse_gpus("rtx4090")[0].total and step.flops > 0
    assert capsys.readouterr().out.endswith(" s, fits\n")


@one_family
def test_what_fits_this_machine_is_loaded_so(run):
    names = run("Split or stream my model by memory")
    assert names["step"].fits and len(list(names["model"].parameters())) > 10
    assert names["model"].engine.schedule == names["step"].job.execution.schedule


def test_a_walk_predicts_a_velocity(run):
    names = run("A walk through one model")
    assert (
        names["velocity"].shape == names["item"]["latents"].shape
        and names["velocity"].requires_grad
    )
    names["error"].backward()
    check_moved({name: p.grad for name, p in names["model"].trainable.items()})


def test_errors_name_arguments(run, family, world):
    spec = getattr(import_module(family), family.removeprefix("ditkit_").upper())
    with keys_shown(False):
        with pytest.raises(
            ditkit_core.UserError, match="^checkpointing = 'selective': unknown policy"
        ):
            ditkit_core.load(spec, "checkpoint", checkpointing="selective")
        with pytest.raises(
            ditkit_core.UserError, match="^targets: 'nothing' fits no layer of this model"
        ):
            ditkit_core.load(spec, "checkpoint", ditkit_core.LoraConfig(target_modules="nothing"))
        with pytest.raises(ditkit_core.UserError, match="^base = 'elsewhere' does not exist"):
            ditkit_core.load(spec, "elsewhere")


@wan_and(pytest.mark.exhaustive)
@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_divide_the_weights_in_a_loop_of_ones_own(family, world):
    """Under torchrun's agent, which forks them; its command, which starts three processes that
    import everything, starts a recipe's ranks in `commands/test_recipe.py`. One step of each family
    under FSDP2 is in its own conformance (`FewRanks`)."""
    file = world / "ranks.py"
    file.write_text(
        for_family(programs()["Divide the weights over ranks"], family), encoding="utf-8"
    )
    (world / "cats.safetensors").unlink(missing_ok=True)
    output_of(ON_RANKS, str(world), str(file), family, "transformers", "diffusers")
    check_moved(load_file(world / "cats.safetensors"))


def test_the_door_offers_few_names_and_the_page_lists_them():
    assert len(ditkit_core.__all__) <= MOST_NAMES
    assert set(dir(ditkit_core)) == {*ditkit_core.__all__, "__version__"}
    listed = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in listed for name in re.findall(r"`(\w+)`", row)} == set(
        ditkit_core.__all__
    )
    for name in ditkit_core.__all__:
        assert getattr(ditkit_core, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'train'; it has BlockEngine, "):
        getattr(ditkit_core, "train")  # noqa: B009


def test_programs_are_short_and_each_is_run():
    """Lines of code, without empty ones."""
    found = programs()
    lengths = {
        heading: len([line for line in text.splitlines() if line])
        for heading, text in found.items()
    }
    assert {heading: length for heading, length in lengths.items() if length > MOST_LINES} == {}
    source = Path(__file__).read_text(encoding="utf-8")
    run_here = [
        heading
        for heading in found
        if f'run("{heading}")' in source or f'programs()["{heading}"]' in source
    ]
    assert run_here == list(found)
