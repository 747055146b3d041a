"""An exported whole transformer is what diffusers' own loaders read, and is compared with ours
without being in memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_variants import SIZES, VARIANTS

from ditkit_core.adapters.config import ExportConfig
from ditkit_core.adapters.diffusers_model import load_whole
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import NO_READER, VERIFIED
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.world import make_model
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS

WHOLE = {"t2v": {"in_channels": 4}, **VARIANTS}


def exported(
    folder: Path, variant: str, form: str, *, dtype: str = "fp32", shards: int = 2**40
) -> tuple[Any, Path]:
    arch = WanArch(**SIZES | WHOLE[variant])
    model: Any = make_model(WAN, arch).eval()
    config = ExportConfig(forms=(form,), dtype=dtype)
    (path,) = export_merged(
        model, WAN.for_arch(arch), folder, config, metadata={}, shard_bytes=shards
    )
    return model, path


@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("variant", WHOLE)
def test_diffusers_computes_with_an_exported_transformer_what_we_do(
    tmp_path: Path, variant: str, form: str
) -> None:
    model, folder = exported(tmp_path, variant, form)
    header = SafetensorsSource.open(folder).metadata
    # diffusers' conversion forgets the table of positions
    if (variant, form) == ("flf2v", "official"):
        assert "does not know img_emb.emb_pos" in header[VERIFIED]
        with pytest.raises(UserError, match=r"image_embedder\.pos_embed, img_emb\.emb_pos"):
            DIFFUSERS.verify_whole(folder, form, model, run_plain)
        return
    assert VERIFIED not in header
    line = DIFFUSERS.verify_whole(folder, form, model, run_plain)
    assert (
        line.startswith(f"diffusers loads {tmp_path.name}/transformer_{form} (")
        and "\n" not in line
    )


@pytest.mark.parametrize("shards", [2**40, 20_000])
@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_the_tensors_are_those_that_diffusers_own_loaders_read(
    tmp_path: Path, form: str, shards: int
) -> None:
    model, folder = exported(tmp_path, "i2v", form, dtype="bf16", shards=shards)
    ours = DIFFUSERS.empty(model)
    config = tmp_path / "config" / "config.json"
    ours.save_config(config.parent)
    load_whole(ours, folder, DIFFUSERS.convert if form == "official" else None)
    if form == "diffusers":
        (folder / "config.json").write_bytes(config.read_bytes())
        theirs = type(ours).from_pretrained(
            folder, local_files_only=True, torch_dtype=torch.float32
        )
    else:
        state = {
            key: tensor
            for file in folder.glob("*.safetensors")
            for key, tensor in load_file(file).items()
        }
        save_file(state, tmp_path / "one.safetensors")
        theirs = type(ours).from_single_file(
            tmp_path / "one.safetensors",
            config=str(config.parent),
            subfolder="",
            torch_dtype=torch.float32,
        )
    for name, parameter in theirs.named_parameters():
        owner, _, leaf = name.rpartition(".")
        assert torch.equal(getattr(ours.get_submodule(owner), leaf), parameter), name


def test_a_conversion_that_mixes_up_two_layers_is_noticed(tmp_path: Path) -> None:
    model, folder = exported(tmp_path, "t2v", "official")
    convert = DIFFUSERS.convert

    def wrong(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        swapped = {"to_q": "to_k", "to_k": "to_q"}
        return {
            ".".join(swapped.get(part, part) for part in name.split("."))
            if "blocks.1.attn1" in name
            else name: rows
            for name, rows in convert(state).items()
        }

    with pytest.raises(
        UserError, match=r"diffusers' output differs from ours by .* export it again$"
    ):
        replace(DIFFUSERS, convert=wrong).verify_whole(folder, "official", model, run_plain)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_folder_with_other_names_or_shapes_is_refused(tmp_path: Path, change: str) -> None:
    model, folder = exported(tmp_path, "t2v", "diffusers")
    (file,) = folder.glob("*.safetensors")
    state, key = load_file(file), "blocks.1.attn1.to_q.weight"
    tensor = state.pop(key)
    state |= {
        "missing": {},
        "unknown": {key: tensor, "blocks.9.x": tensor.clone()},
        "shape": {key: tensor[:3].clone()},
    }[change]
    save_file(state, file)
    with pytest.raises(UserError, match="has other names or shapes than it") as caught:
        DIFFUSERS.verify_whole(folder, "diffusers", model, run_plain)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "dtype"),
    [({"ref_conv": True}, "bf16"), ({"camera_channels": 24}, "bf16"), ({}, "fp8_scaled")],
)
def test_where_there_is_no_reader_the_header_says_so(
    tmp_path: Path, more: dict[str, Any], dtype: str
) -> None:
    arch = WanArch(**SIZES | VARIANTS["i2v"] | more)
    config = ExportConfig(forms=("official",), dtype=dtype)
    (folder,) = export_merged(
        make_model(WAN, arch), WAN.for_arch(arch), tmp_path, config, metadata={VERIFIED: "later"}
    )
    said = SafetensorsSource.open(folder).metadata[VERIFIED]
    assert (
        said
        == f"{NO_READER}diffusers {'has no such model' if more else 'does not read scaled 8 bits'}"
    )


_PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import build_on_meta
from ditkit_core.run.read_at_use import read_at_use
from ditkit_core.testing.specs import altered
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS

folder, peaks = Path(sys.argv[1]), []
for layers in (1, 12):
    arch = WanArch(dim=1024, ffn_dim=4096, heads=8, layers=layers, in_channels=4, out_channels=4, text_dim=64, freq_dim=64)
    path = folder / str(layers)
    path.mkdir()
    for name, empty in build_on_meta(WAN, arch, Precision()).state_dict().items():
        values = torch.randn(empty.shape, dtype=torch.bfloat16) / 30
        official = WAN.architecture.names.from_native["official"](name)[0].name
        save_file({official: values}, path / f"{official}.safetensors")
    spec = altered(WAN, presets={"it": arch})
    paths = ModelPaths(transformer=str(path), preset="it")
    model = read_at_use(spec, paths, AdapterConfig(method="full"), BaseConfig())
    DIFFUSERS.verify_whole(path, "official", model.module, run_plain)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    size = sum(file.stat().st_size for file in path.iterdir())
print(json.dumps([peaks[1] - peaks[0], size]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_the_memory_is_that_of_matrices_and_not_of_a_model(tmp_path: Path) -> None:
    """Twelve blocks need no more than one: the largest matrix of the embedding or of a block, in
    both dtypes."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    grown, size = json.loads(done.stdout.splitlines()[-1])
    assert size > 350e6 and grown < 0.1 * size, (grown, size)
