"""What is said of programs that load adapter files: by form, kind and module; every remedy that is
named holds.

The rows themselves are compared with the programs by tools/clients, where somebody has them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.adapters.files.export import readers_of
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import FORMATS, AdapterLayout
from ditkit_core.models.adapter_programs import kinds_of
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE

PRESETS = {"t2v-1.3b": WAN, "klein-base-4b": FLUX2, "base": ZIMAGE}
LAYOUTS = [
    (form, naming, method, dora)
    for form in FORMATS
    for naming in ("official", "diffusers")
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
