"""What is said of programs that load adapter files: by form, kind and module; every remedy that is
named holds.

The rows themselves are compared with the programs by tools/clients, where somebody has them.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.adapters.files.export import loaded_by, readers_of
from ditkit_core.adapters.files.identify import find_adapter, layers_of, parameters_of
from ditkit_core.adapters.inject import chosen_of
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import (
    ADAPTER_FORMS,
    DIFFERENCES,
    FORMATS,
    AdapterLayout,
)
from ditkit_core.models.adapter_programs import NO_MODEL, NOT_TRIED, kinds_of
from ditkit_core.models.precision import Precision
from ditkit_core.weights.fused_tensors import FusedTensors
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.verify import DIFFUSERS as FLUX2_IN_DIFFUSERS
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS as WAN_IN_DIFFUSERS
from ditkit_zimage.presets import ZImageArch
from ditkit_zimage.spec import ZIMAGE
from ditkit_zimage.verify import DIFFUSERS as ZIMAGE_IN_DIFFUSERS
from doc_models import SPECS

NAMINGS = ("official", "diffusers")
PRESETS = {"t2v-1.3b": WAN, "klein-base-4b": FLUX2, "base": ZIMAGE}
LAYOUTS = [
    (form, naming, method, dora)
    for form in FORMATS
    for naming in NAMINGS
    for method, dora in (
        ("lora", ""),
        ("lora", "base"),
        ("lora", "merged"),
        ("lokr", ""),
        ("loha", ""),
    )
]


def modules_of(preset):
    spec = PRESETS[preset]
    return list(layers_of(spec.architecture.build, spec.architecture.presets[preset]))


def sentences(preset) -> Iterator[tuple[AdapterLayout, list[str], str, str]]:
    """What is said of each program, of each layout with all modules, and with one of each kind of
    module."""
    modules = modules_of(preset)
    one_of_each = {re.sub(r"\d+", "*", name): name for name in modules}
    for form, naming, method, dora in LAYOUTS:
        layout = AdapterLayout(form=form, naming=naming, method=method)
        layout = replace(layout, use_dora=bool(dora), dora_over_base=dora == "base")
        for chosen in (modules, *([name] for name in one_of_each.values())):
            for program, said in PRESETS[preset].adapters.rules.readers(layout, chosen).items():
                yield layout, chosen, program, said


@pytest.mark.parametrize("preset", PRESETS)
def test_a_form_that_is_named_instead_is_loaded_whole(preset):
    spec, tried = PRESETS[preset], 0
    for layout, modules, program, said in sentences(preset):
        if program == "diffusers" or not (named := re.search(r"--to (\w+)", said)):
            continue
        if "or merge it" in said or said.startswith("wants"):
            continue  # the form may lack a module, or the kind
        is_dora = bool(kinds_of(layout) & {"dora", "dora_merged"})
        spec.adapters.check(named[1], [] if named[1] == "official" else modules)
        other = readers_of(spec, named[1], modules, use_dora=is_dora, method=layout.method)
        assert not other[program], f"{program} {said}, and of that form: {other[program]}"
        tried += 1
    assert tried > 50


@pytest.mark.parametrize("form", ["diffusers", "diffsynth"])
def test_what_comfyui_leaves_out_of_flux2_in_diffusers_names_is_said_by_module(form):
    """Ten of 74 keys with `all-linear`; the blocks alone are loaded whole."""
    modules = modules_of("klein-base-4b")
    said = readers_of(FLUX2, form, modules, use_dora=False)["ComfyUI"]
    assert (
        said.startswith(f"loads a part of it: leaves 5 of {len(modules)} modules out")
        and "--to musubi" in said
    )
    blocks = [name for name in modules if not name.startswith("embed.")]
    assert readers_of(FLUX2, form, blocks, use_dora=False)["ComfyUI"] == ""
    with pytest.raises(UserError, match="cannot store"):
        FLUX2.adapters.check("official", modules)
    assert readers_of(FLUX2, "musubi", modules, use_dora=False)["ComfyUI"] == ""


def test_a_part_of_zimage_in_musubis_names_is_called_a_part():
    modules = modules_of("base")
    said = readers_of(ZIMAGE, "musubi", modules, use_dora=False)["ComfyUI"]
    assert said.startswith("loads a part of it: leaves ") and "--to official" in said
    feed_forward = [name for name in modules if ".feed_forward." in name]
    assert readers_of(ZIMAGE, "musubi", feed_forward, use_dora=False)["ComfyUI"] == ""


@pytest.mark.parametrize("preset", PRESETS)
def test_no_program_loads_a_mixed_file_whole_that_lacks_one_of_its_kinds(preset):
    rules, modules = PRESETS[preset].adapters.rules, modules_of(preset)
    mixed = AdapterLayout(form="musubi", method="loha and lora", use_dora=True)
    said = rules.readers(mixed, modules)
    assert said["musubi-tuner"] and said["DiffSynth"]


def test_an_inspection_does_not_call_differences_loaded(tmp_path, capsys):
    file, stem = tmp_path / "x.safetensors", "diffusion_model.blocks.0.self_attn.q"
    dim = WAN.architecture.presets["t2v-1.3b"].dim
    matrices = {
        f"{stem}.lora_A.weight": torch.ones(2, dim),
        f"{stem}.lora_B.weight": torch.ones(dim, 2),
    }
    save_file({**matrices, f"{stem}.diff_b": torch.ones(dim)}, file)
    assert cli.run(WAN, "export", ["--inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert "the lines below are of all other keys" in text and "nothing else does" not in text
    assert text.index("all other keys") < text.index("loads all of it")


def differences(preset, form, file, *, also=()):
    """A file of differences of a block's attention in a form, as `.diff`, and of parameters besides
    (`also`, by our names)."""
    spec = PRESETS[preset]
    names, arch = spec.architecture.names, spec.architecture.presets[preset]
    row, parameters = ADAPTER_FORMS[form], parameters_of(spec.architecture.build, arch)
    block = next(name for name in parameters if re.search(r"(layers|double_blocks)\.0\.", name))
    start = block[: block.index(".0.") + 3]
    chosen = [name for name in parameters if name.startswith(start) and ".q.weight" in name]
    chosen = chosen or [f"{start}attention.to_q.weight", f"{start}feed_forward.w1.weight"]
    fused = FusedTensors.of([*parameters], names.from_native[row.naming]).complete
    tensors = {}
    for theirs, parts in fused.items():
        if any(part.name in (*chosen, *also) for part in parts):
            module, _, leaf = theirs.rpartition(".")
            rows = sum(parameters[part.name][0] // part.of for part in parts)
            ending = {"weight": "diff", "bias": "diff_b", "modulation": "diff_m"}[leaf]
            shape = (rows, *parameters[parts[0].name][1:])
            tensors[f"{row.stem(module)}.{ending}"] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    save_file(tensors, file)
    found = find_adapter(file, spec)
    return found.layout, spec.adapters.rules.readers(found.layout, found.modules)


@pytest.mark.parametrize("form", ["official", "musubi", "diffusers"])
@pytest.mark.parametrize("preset", PRESETS)
def test_of_a_file_of_differences_is_said_what_was_measured(tmp_path, preset, form):
    """benchmarks/clients.md: whole with ComfyUI's prefix and kohya's, Z-Image's attention not with
    the latter; nobody tried other names."""
    layout, readers = differences(preset, form, tmp_path / "x.safetensors")
    assert (layout.form, layout.method) == (form, "differences")
    assert layout.naming == (
        "official" if PRESETS[preset] is ZIMAGE else ADAPTER_FORMS[form].naming
    )
    said = readers.pop("ComfyUI")
    if form == "diffusers":
        assert said == NOT_TRIED
    elif (form, PRESETS[preset]) == ("musubi", ZIMAGE):
        assert said.startswith("loads a part of it: leaves 1 of 2 modules out")
    else:
        assert said == ""
    assert "loads no file of differences" in readers.pop("diffusers")
    assert readers.pop("sd-scripts") == NO_MODEL
    assert set(readers.values()) - {NO_MODEL} == {NOT_TRIED}


def test_differences_of_norms_and_modulation_were_not_tried(tmp_path):
    for name in ("layers.0.self_attn.norm_q.weight", "layers.3.modulation", "head.head.bias"):
        _, readers = differences("t2v-1.3b", "official", tmp_path / "x.safetensors", also=(name,))
        module = name.removesuffix(".weight").removesuffix(".bias")
        assert readers["ComfyUI"] == f"{NOT_TRIED} with differences of {module}"


def test_an_inspection_lists_programs_for_differences_alone(tmp_path, capsys):
    file = tmp_path / "x.safetensors"
    differences("t2v-1.3b", "official", file)
    assert cli.run(WAN, "export", ["--inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert "\n  ComfyUI: loads all of it\n" in text
    assert "\n  not tried: DiffSynth, musubi-tuner, LyCORIS, ai-toolkit\n" in text
    assert NOT_TRIED not in text
    line = loaded_by(readers_of(WAN, "official", modules_of("t2v-1.3b"), use_dora=False))
    assert NOT_TRIED not in line and NO_MODEL not in line


SIZES = {"dim": 48, "ffn_dim": 64, "heads": 2, "layers": 1, "text_dim": 20, "freq_dim": 16}
TINY = {
    "wan": (WAN, WanArch(**SIZES, text_tokens=6, in_channels=4, out_channels=4), WAN_IN_DIFFUSERS, "WanPipeline"),
    "flux2": (
        FLUX2,
        Flux2Arch(
            dim=32, heads=2, double_layers=1, single_layers=1, text_dim=12, in_channels=16,
            out_channels=16, text_tokens=7, axes=(4, 4, 4, 4), guidance=True,
        ),
        FLUX2_IN_DIFFUSERS,
        "Flux2KleinPipeline",
    ),
    "zimage": (
        ZIMAGE,
        ZImageArch(
            dim=64, heads=2, layers=1, refiner_layers=1, text_dim=12, in_channels=4,
            axes=(8, 12, 12),
        ),
        ZIMAGE_IN_DIFFUSERS,
        "ZImagePipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["official", "diffusers", "musubi", "diffsynth"])
@pytest.mark.parametrize("family", TINY)
def test_diffusers_loads_no_file_of_differences_alone(tmp_path, family, form):
    import diffusers

    spec, arch, verify, pipeline = TINY[family]
    row, names = ADAPTER_FORMS[form], spec.architecture.names
    torch.manual_seed(0)
    model = spec.architecture.build(arch, Precision(matmul=torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    layers = layers_of(spec.architecture.build, arch)
    fused = FusedTensors.of(layers, names.from_native[row.naming or names.bare], ".weight").complete
    tensors = {
        f"{row.stem(theirs)}.diff": torch.ones(
            sum(layers[part.name][0] // part.of for part in parts), layers[parts[0].name][1]
        )
        for theirs, parts in fused.items()
        if re.search(r"blocks|layers", theirs)
    }
    save_file(tensors, tmp_path / "x.safetensors")
    theirs, inputs = verify.transformer(model), verify.inputs(model)
    loader = getattr(diffusers, pipeline)(None, None, None, None, theirs)
    with torch.no_grad():
        before = verify.run(theirs, inputs)
        with suppress(ValueError, KeyError, IndexError):
            loader.load_lora_weights(str(tmp_path / "x.safetensors"))
        assert torch.equal(verify.run(theirs, inputs), before)


FACTORED = ("lora", "lokr", "loha")


def alike(*forms: str) -> dict[str, set[str]]:
    """These forms of every kind."""
    return {method: set(forms) for method in FACTORED}


FILES_OF_OTHERS = {
    "wan": {
        "ComfyUI": alike("videox official", "videox diffusers"),
        "DiffSynth": {"lora": {"bare official"}},
    },
    "flux2": {
        "ComfyUI": alike("onetrainer diffusers", "lycoris diffusers", "bare diffusers"),
        "DiffSynth": {"lora": {"bare diffusers"}},
        "diffusers": {"lora": {"peft official", "peft diffusers"}},
    },
    "krea2": {"diffusers": {"lora": {"peft official"}}},
    "zimage": {
        "ComfyUI": alike(*(f"{form} {name}" for form in ("lycoris", "bare") for name in NAMINGS)),
        "DiffSynth": {"lora": {"bare official"}},
    },
}
"""By family, program and kind: the forms with their names of modules that the program loads, of
those that ditkit reads and does not write. tools/clients ran the programs."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_programs_load_the_files_of_others_that_they_were_seen_to_load(spec):
    """An adapter of the default targets, with alpha where it is LyCORIS' own."""
    arch = next(iter(spec.architecture.presets.values()))
    layers = list(layers_of(spec.architecture.build, arch))
    modules = chosen_of(layers, (), spec.adapters.targets)
    loads: dict[str, dict[str, set[str]]] = {}
    for form in FORMATS.keys() - ADAPTER_FORMS.keys() - {"prefixed"}:
        for naming, method in itertools.product(NAMINGS, FACTORED):
            layout = AdapterLayout(form=form, naming=naming, method=method, alpha=form == "lycoris")
            for program, problem in spec.adapters.rules.readers(layout, modules).items():
                if not problem:
                    forms = loads.setdefault(program, {}).setdefault(method, set())
                    forms.add(f"{form} {naming}")
    of_lycoris = {"LyCORIS": alike(*(f"lycoris {naming}" for naming in NAMINGS))}
    tried = spec.name in ("wan", "flux2", "zimage")
    assert loads == FILES_OF_OTHERS.get(spec.name, {}) | (of_lycoris if tried else {})


@pytest.mark.parametrize("spec", (WAN, FLUX2, ZIMAGE), ids=lambda spec: spec.name)
def test_comfyui_loads_differences_of_the_blocks_alone(spec):
    arch = next(iter(spec.architecture.presets.values()))
    blocks = [
        name
        for name in layers_of(spec.architecture.build, arch)
        if re.match(r"(layers|double_blocks|single_blocks)\.0\.(?!.*modulation)", name)
    ]
    for form in FORMATS:
        layout = AdapterLayout(form=form, method=DIFFERENCES)
        problem = spec.adapters.rules.readers(layout, blocks)["ComfyUI"]
        partly = form == "musubi" and spec is ZIMAGE
        assert problem.startswith("loads a part of it") == partly
        assert (not problem or partly) == (form in ("official", "musubi")), form
