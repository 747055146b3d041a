"""Adapter files in every form: read, merged, started from, written, read back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files import write as adapter_writer
from ditkit_core.adapters.files.alpha import AlphaHeader
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.files.start import config_from_file, initial_adapter
from ditkit_core.adapters.files.write import Scaled, write_adapter
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.precision import Precision
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, native_name, official_name
from ditkit_core.weights.fused_tensors import LoraMatrices


def _in_block(name: str) -> str:
    return (
        name.replace("layers.", "blocks.")
        .replace("qkv", "attn1.to_qkv")
        .replace("mlp.0", "ff.net.0")
    )


# The toy with a second form that differs in names alone, where Wan's do: the module itself and what
# lies above it.
NAMES = StateDictNames.renaming(
    prefixes=TOY.architecture.names.prefixes,
    to_native=lambda name: native_name(
        name.replace("attn1.to_qkv", "qkv").replace("ff.net.0", "mlp.0")
    ),
    from_native={"official": official_name, "diffusers": _in_block},
)
RANK = 3


def linears() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = ToyModel(ToyArch(), Precision())
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


SHAPES = linears()
MODULES = ("layers.0.qkv", "layers.0.mlp.0", "layers.1.qkv", "layers.1.mlp.0")


def matrices(module: str, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """down [rank, in] and up [out, rank] of a module."""
    out, width = SHAPES[module]
    generator = torch.Generator().manual_seed(len(module) + out + 10 * int(module[7]))
    return torch.randn(rank, width, generator=generator), torch.randn(
        out, rank, generator=generator
    )


def official(module: str) -> str:
    return module.replace("layers.", "blocks.")


def theirs(module: str) -> str:
    return _in_block(module)


def flat(module: str) -> str:
    return official(module).replace(".", "_")


FORMS = {
    "official": ("diffusion_model.{official}.lora_A.weight",
    "diffusion_model.{official}.lora_B.weight", None),
    "official_up_down": ("diffusion_model.{official}.lora_down.weight",
    "diffusion_model.{official}.lora_up.weight", "diffusion_model.{official}.alpha"),
    "diffusers": ("transformer.{theirs}.lora_A.weight", "transformer.{theirs}.lora_B.weight", None),
    "older_diffusers": ("transformer.{theirs}.lora.down.weight",
    "transformer.{theirs}.lora.up.weight", None),
    "older_diffusers_bare": ("{theirs}.lora.down.weight", "{theirs}.lora.up.weight", None),
    "kohya": ("lora_unet_{flat}.lora_down.weight", "lora_unet_{flat}.lora_up.weight",
    "lora_unet_{flat}.alpha"),
    "kohya_double": ("lora_unet__{flat}.lora_down.weight", "lora_unet__{flat}.lora_up.weight",
    "lora_unet__{flat}.alpha"),
    "onetrainer": ("lora_transformer_{their_flat}.lora_down.weight",
    "lora_transformer_{their_flat}.lora_up.weight", "lora_transformer_{their_flat}.alpha"),
    "peft": ("base_model.model.{theirs}.lora_A.weight", "base_model.model.{theirs}.lora_B.weight",
    None),
    "peft_official": ("base_model.model.{official}.lora_A.weight",
    "base_model.model.{official}.lora_B.weight", None),
    "peft_held": ("base_model.model.transformer.{theirs}.lora_A.weight",
    "base_model.model.transformer.{theirs}.lora_B.weight", None),
    "diffsynth": ("{official}.lora_A.default.weight", "{official}.lora_B.default.weight", None),
    "prefixed": ("model.{official}.lora_A.weight", "model.{official}.lora_B.weight", None),
}  # fmt: skip


def write(
    path: Path, form: str, *, alpha: float | None = None, ranks=None, metadata=None, extra=None
) -> Path:
    down_key, up_key, alpha_key = FORMS[form]
    tensors = {}
    for module in MODULES:
        names = {"official": official(module), "theirs": theirs(module), "flat": flat(module)}
        names["their_flat"] = theirs(module).replace(".", "_")
        down, up = matrices(module, (ranks or {}).get(module, RANK))
        tensors |= {down_key.format(**names): down, up_key.format(**names): up}
        if alpha_key and alpha is not None:
            tensors[alpha_key.format(**names)] = torch.tensor(alpha)
    save_file({**tensors, **(extra or {})}, path, metadata)
    return path


def opened(path: Path) -> AdapterFile:
    return open_adapter(path, NAMES, SHAPES)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_the_same_adapter(tmp_path, form):
    file = opened(write(tmp_path / "x.safetensors", form))
    assert tuple(file.modules) == MODULES
    for module in MODULES:
        down, up = matrices(module)
        assert torch.equal(file.read(module).down, down)
        assert torch.equal(file.read(module).up, up)
        assert (file.modules[module].rank, file.modules[module].scale) == (RANK, 1.0)


@pytest.mark.parametrize("form", [form for form, (_, _, alpha) in FORMS.items() if alpha])
def test_alpha_is_read_from_its_key(tmp_path, form):
    file = opened(write(tmp_path / "x.safetensors", form, alpha=6.0))
    assert {found.scale for found in file.modules.values()} == {2.0}


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"transformer.r": 3, "transformer.lora_alpha": 6}, [2, 2, 2, 2]),
        ({"transformer.lora_alpha": 6, "transformer.use_rslora": True}, [6 / 3**0.5] * 4),
        (
            {"transformer.lora_alpha": 6, "transformer.alpha_pattern": {"attn1.to_qkv": 9}},
            [3, 2, 3, 2],
        ),
        (
            {"transformer.lora_alpha": 6, "transformer.alpha_pattern": {"^blocks.1.ff.net.0": 1.5}},
            [2, 2, 2, 0.5],
        ),
        (
            {"transformer.lora_alpha": 6, "alpha_pattern": {r"^blocks\.1\.ff\.net\.0$": 1.5}},
            [2, 2, 2, 0.5],
        ),
        (
            {
                "transformer.lora_alpha": 6,
                "alpha_pattern": {r".*\.attn1\.to_qkv": 9, "1.attn1.to_qkv": 3},
            },
            [3, 2, 3, 2],
        ),
        (
            {
                "transformer.lora_alpha": 6,
                "alpha_pattern": {"^attn1.to_qkv": 9, "kv": 9, r".*\.blocks": 9},
            },
            [2, 2, 2, 2],
        ),
        # Two patterns fit: the first counts, as in peft's get_pattern_key.
        (
            {
                "transformer.lora_alpha": 6,
                "transformer.alpha_pattern": {"to_qkv": 9, "attn1.to_qkv": 12},
            },
            [3, 2, 3, 2],
        ),
    ],
)
def test_alpha_is_read_from_the_header_that_diffusers_writes(tmp_path, config, scales):
    path = write(
        tmp_path / "x.safetensors",
        "diffusers",
        metadata={"lora_adapter_metadata": json.dumps(config)},
    )
    assert [found.scale for found in opened(path).modules.values()] == pytest.approx(scales)


def test_alpha_of_a_file_of_pefts_is_read_from_the_configuration_next_to_it(tmp_path):
    path = write(tmp_path / "adapter_model.safetensors", "peft")
    beside = tmp_path / "adapter_config.json"
    beside.write_text(json.dumps({"r": 3, "lora_alpha": 6, "alpha_pattern": {"attn1.to_qkv": 9}}))
    assert [found.scale for found in opened(path).modules.values()] == [3, 2, 3, 2]
    others = opened(write(tmp_path / "x.safetensors", "diffusers"))
    assert {found.scale for found in others.modules.values()} == {1}, "is not of this file"
    beside.write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read") as error:
        opened(path)
    assert "\n" not in str(error.value)


def test_the_module_that_holds_the_transformer_may_begin_the_patterns_of_peft(tmp_path):
    path = write(tmp_path / "adapter_model.safetensors", "peft_held")
    patterns = {"transformer.blocks.0.attn1.to_qkv": 9, "^transformer.blocks.1.ff.net.0": 1.5}
    config = {"r": 3, "lora_alpha": 6, "alpha_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert [found.scale for found in opened(path).modules.values()] == [3, 2, 2, 0.5]


def test_underscores_are_resolved_against_the_models_own_names(tmp_path):
    """`key_value` has an underscore of its own: replacing all of them by dots would name no
    module."""
    down, up = torch.randn(2, 32), torch.randn(64, 2)
    save_file(
        {
            "lora_unet_blocks_1_key_value.lora_down.weight": down,
            "lora_unet_blocks_1_key_value.lora_up.weight": up,
        },
        tmp_path / "x.safetensors",
    )
    assert torch.equal(opened(tmp_path / "x.safetensors").read("layers.1.key_value").up, up)


def test_keys_that_fit_nothing_are_an_error_with_the_first_ten(tmp_path):
    extra = {f"lora_te_{number}.lora_down.weight": torch.zeros(1) for number in range(10)}
    extra |= {
        "diffusion_model.blocks.7.qkv.lora_A.weight": torch.zeros(1),
    }
    with pytest.raises(
        UserError,
        match="11 of 19 keys fit no adapter of this model .its names look like those of a text encoder.: .* and 1 more",
    ) as error:
        opened(write(tmp_path / "x.safetensors", "official", extra=extra))
    assert "\n" not in str(error.value)


def test_one_module_in_two_forms_is_an_error(tmp_path):
    extra = {"blocks.0.qkv.lora_A.weight": torch.zeros(RANK, 32)}
    with pytest.raises(UserError, match="1 of 9 keys"):
        opened(write(tmp_path / "x.safetensors", "official", extra=extra))


def test_half_a_module_is_an_error(tmp_path):
    with pytest.raises(UserError, match="but no up matrix for layers.0.out"):
        opened(
            write(
                tmp_path / "x.safetensors",
                "official",
                extra={"blocks.0.out.lora_A.weight": torch.zeros(3, 32)},
            )
        )


@pytest.mark.parametrize(
    ("down", "up"),
    [((3, 31), (32, 3)), ((3, 32), (31, 3)), ((3, 32), (32, 2)), ((), ()), ((0, 32), (32, 0))],
)
def test_matrices_of_another_model_are_an_error(tmp_path, down, up):
    extra = {
        "blocks.0.out.lora_A.weight": torch.zeros(down),
        "blocks.0.out.lora_B.weight": torch.zeros(up),
    }
    with pytest.raises(UserError, match="do not fit the layer's"):
        opened(write(tmp_path / "x.safetensors", "official", extra=extra))


def test_a_magnitude_over_inputs_is_an_error(tmp_path):
    extra = {"diffusion_model.blocks.0.qkv.dora_scale": torch.zeros(1, 32)}
    with pytest.raises(UserError, match="not one norm per output"):
        opened(write(tmp_path / "x.safetensors", "official", extra=extra))


def test_an_empty_file_is_an_error(tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UserError, match="is empty"):
        opened(tmp_path / "empty.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"lora_alpha": "x"}',
        '{"lora_alpha": 1e999}',
        '{"lora_alpha": 1%s}' % ("0" * 400),
        '{"alpha_pattern": [1]}',
        '{"alpha_pattern": {"(": 1}}',
        '{"lora_alpha": null}',
    ],
)
def test_a_header_that_says_no_alpha_is_an_error(tmp_path, header):
    with pytest.raises(
        UserError, match="the header's lora_adapter_metadata cannot be read"
    ) as error:
        opened(
            write(
                tmp_path / "x.safetensors", "diffusers", metadata={"lora_adapter_metadata": header}
            )
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "pattern",
    ["((.*)*)*X", "([a-z0-9_.]+)+X", "blocks.[0-9]+.ff", "a|b", r"blocks\.\d", "", "^", "é*"],
)
def test_an_expression_in_a_header_is_refused_and_never_run(tmp_path, pattern):
    """`((.*)*)*X` on names of 30 characters would run for ever, and inside `re` no signal is
    heard."""
    header = json.dumps({"lora_alpha": 3, "alpha_pattern": {"attn1.to_qkv": 3, pattern: 3}})
    path = write(
        tmp_path / "x.safetensors", "diffusers", metadata={"lora_adapter_metadata": header}
    )
    with pytest.raises(
        UserError,
        match=r"cannot be read .*alpha_pattern is not the name of a module.; fetch it again",
    ):
        opened(path)


def test_many_entries_of_alpha_are_looked_up_and_not_tried_one_by_one(tmp_path):
    header = json.dumps(
        {"alpha_pattern": {f"blocks.{number}.none": 3 for number in range(100_000)} | {"to_qkv": 9}}
    )
    path = write(
        tmp_path / "x.safetensors", "diffusers", metadata={"lora_adapter_metadata": header}
    )
    scale = AlphaHeader.of(SafetensorsSource.open(path)).scale
    # 10,000 modules: a billion comparisons, if each was compared with every entry.
    assert {scale(3, [f"blocks.{number}.to_qkv"]) for number in range(10_000)} == {3.0}


def test_an_alpha_of_zero_is_no_start(tmp_path):
    with pytest.raises(UserError, match="has scale 0"):
        config_from_file(
            AdapterConfig(), opened(write(tmp_path / "x.safetensors", "kohya", alpha=0.0))
        )


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("a.safetensors", ("a.safetensors", 1.0)), ("a.safetensors@0.5", ("a.safetensors", 0.5)), ("a@b@-1", ("a@b", -1.0))],
)  # fmt: skip
def test_a_merge_names_its_file_and_strength(entry, expected):
    path, strength = parse_merge(entry)
    assert (str(path), strength) == expected


def test_a_strength_that_is_no_number_is_an_error_unless_the_whole_is_a_file(tmp_path):
    entry = str(tmp_path / "me@home.safetensors")
    with pytest.raises(UserError, match="is not FILE@strength"):
        parse_merge(entry)
    Path(entry).touch()
    assert parse_merge(entry) == (Path(entry), 1.0)


def test_merging_adds_the_scaled_product_file_after_file(tmp_path):
    first = opened(write(tmp_path / "a.safetensors", "kohya", alpha=6.0))
    second = opened(write(tmp_path / "b.safetensors", "official"))
    edits = merge_into([(first, 0.5), (second, -0.25)])
    assert set(edits) == {f"{module}.weight" for module in MODULES}
    for module in MODULES:
        weight = torch.randn(SHAPES[module])
        down, up = matrices(module)
        expected = weight + (0.5 * 2 - 0.25) * up @ down
        edits[f"{module}.weight"](weight)
        torch.testing.assert_close(weight, expected)


def test_merging_takes_mixed_ranks(tmp_path):
    file = opened(
        write(
            tmp_path / "a.safetensors",
            "kohya",
            alpha=4.0,
            ranks={"layers.0.qkv": 2, "layers.1.mlp.0": 1},
        )
    )
    weight = torch.zeros(SHAPES["layers.0.qkv"])
    merge_into([(file, 1.0)])["layers.0.qkv.weight"](weight)
    down, up = matrices("layers.0.qkv", 2)
    torch.testing.assert_close(weight, 2 * up @ down)


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_merging_dora_scales_each_row_to_its_magnitude(tmp_path, strength):
    magnitude = torch.rand(96) + 0.5
    extra = {"blocks.0.qkv.dora_scale": magnitude[:, None]}
    file = opened(write(tmp_path / "x.safetensors", "official", extra=extra))
    weight = torch.randn(96, 32)
    down, up = matrices("layers.0.qkv")
    merged = weight + up @ down
    merged = merged / merged.norm(dim=1, keepdim=True) * magnitude[:, None]
    expected = weight + strength * (merged - weight)
    merge_into([(file, strength)])["layers.0.qkv.weight"](weight)
    torch.testing.assert_close(weight, expected)


def test_a_start_takes_rank_alpha_and_targets_from_the_file(tmp_path):
    file = opened(write(tmp_path / "x.safetensors", "kohya", alpha=6.0))
    config, said = config_from_file(AdapterConfig(rank=16, alpha=1.0), file)
    assert (config.rank, config.alpha, config.targets) == (3, 6.0, MODULES)
    assert "rank 3, alpha 6 and 4 modules from" in said
    rescaled, _ = config_from_file(AdapterConfig(use_rslora=True), file)
    assert rescaled.scaling == pytest.approx(2.0)


def test_a_start_from_mixed_ranks_and_alphas_takes_each_modules_own(tmp_path):
    file = opened(write(tmp_path / "x.safetensors", "kohya", alpha=6.0, ranks={"layers.0.qkv": 2}))
    config, said = config_from_file(AdapterConfig(), file)
    for name, found in file.modules.items():
        assert config.rank_of(name) == found.rank, name
        assert config.alpha_of(name) / found.rank == pytest.approx(found.scale), name
    config.check_patterns(MODULES)
    assert (config.rank, config.rank_pattern) == (3, ("^layers.0.qkv=2",))
    assert said.endswith("of which 1 have another rank or alpha")


def test_patterns_next_to_a_start_from_a_file_are_refused(tmp_path):
    file = opened(write(tmp_path / "x.safetensors", "official"))
    with pytest.raises(
        UserError, match="decides ranks and alphas by layer; leave adapter.rank_pattern"
    ):
        config_from_file(AdapterConfig(rank_pattern=("q=2",)), file)


def test_a_start_from_a_file_of_which_some_modules_are_dora_is_an_error(tmp_path):
    extra = {"blocks.0.qkv.dora_scale": torch.ones(96, 1)}
    file = opened(write(tmp_path / "x.safetensors", "official", extra=extra))
    with pytest.raises(UserError, match=r"mixes DoRA \(layers.0.qkv\) and LoRA"):
        config_from_file(AdapterConfig(), file)


def test_a_start_gives_the_files_values_and_nothing_to_modules_that_it_lacks(tmp_path):
    start = initial_adapter(
        opened(write(tmp_path / "x.safetensors", "diffsynth")), [*MODULES, "layers.0.out"]
    )
    down, up = matrices("layers.1.qkv")
    given = start("layers.1.qkv")
    assert given.keys() == {"lora_A.weight", "lora_B.weight"}
    assert torch.equal(given["lora_A.weight"], down)
    assert torch.equal(given["lora_B.weight"], up)
    assert start("layers.0.out") == {}


def test_a_start_whose_modules_have_no_adapter_is_an_error(tmp_path):
    file = opened(write(tmp_path / "x.safetensors", "official"))
    with pytest.raises(UserError, match="leaves out: layers.0.mlp.0, layers.1.mlp.0"):
        initial_adapter(file, ["layers.0.qkv", "layers.1.qkv"])


def trained(scale: float = 1.0, *, dora: bool = False) -> dict[str, Scaled]:
    def magnitude(module):
        return torch.rand(SHAPES[module][0]) + 0.5 if dora else None

    return {
        module: Scaled(LoraMatrices(*matrices(module), magnitude(module)), scale)
        for module in MODULES
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("scaling", [1.0, 0.3, 4.0])
def test_what_is_written_is_read_back_with_its_scale_folded_in(tmp_path, form, dtype, scaling):
    path = tmp_path / "x.safetensors"
    write_adapter(path, trained(scaling), NAMES, form=form, dtype=dtype, metadata={"config": "{}"})
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    rename, prefix = (
        (official, "diffusion_model.") if form == "official" else (theirs, "transformer.")
    )
    assert set(tensors) == {
        f"{prefix}{rename(module)}.lora_{part}.weight" for module in MODULES for part in "AB"
    }
    for module in MODULES:
        down, up = matrices(module)
        assert torch.equal(tensors[f"{prefix}{rename(module)}.lora_A.weight"], down.to(dtype))
        assert torch.equal(
            tensors[f"{prefix}{rename(module)}.lora_B.weight"], (up * scaling).to(dtype)
        )
    assert {found.scale for found in opened(path).modules.values()} == {1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_the_header_holds_what_the_caller_gives_and_peft_s_configuration_for_diffusers(tmp_path):
    path = tmp_path / "x.safetensors"
    write_adapter(
        path, trained(0.5), NAMES, form="diffusers", dtype=torch.float32, metadata={"base": '"b"'}
    )
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["base"] == '"b"'
    config = json.loads(header["lora_adapter_metadata"])
    assert (
        config["transformer.r"],
        config["transformer.lora_alpha"],
        config["transformer.use_dora"],
    ) == (3, 3, False)
    assert config["transformer.target_modules"] == sorted(map(theirs, MODULES))
    write_adapter(path, trained(0.5), NAMES, form="official", dtype=torch.float32, metadata={})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_dora_is_written_where_it_is_reproduced_and_refused_elsewhere(tmp_path):
    path, adapters = tmp_path / "x.safetensors", trained(dora=True)
    with pytest.raises(
        UserError,
        match=r"do not reproduce DoRA; set export.forms .*: --to official or --to diffusers\)",
    ):
        write_adapter(path, adapters, NAMES, form="diffsynth", dtype=torch.float32, metadata={})
    assert not path.exists()
    write_adapter(path, adapters, NAMES, form="diffusers", dtype=torch.float32, metadata={})
    file = opened(path)
    for module in MODULES:
        assert torch.equal(file.read(module).magnitude, adapters[module].matrices.magnitude)


def test_a_form_that_the_model_does_not_have_is_an_error(tmp_path):
    names = StateDictNames.renaming(to_native=native_name, from_native={"official": official_name})
    with pytest.raises(
        UserError, match="'diffusers' is not a form of this model; choose one of official"
    ):
        write_adapter(
            tmp_path / "x", trained(), names, form="diffusers", dtype=torch.float32, metadata={}
        )


def test_a_file_that_reads_back_as_another_adapter_never_gets_its_name(tmp_path, monkeypatch):
    """Two modules of one shape under each other's names: every byte is as written, the meaning is
    not."""
    honest = adapter_writer._file_tensors

    def swapped(*args):
        tensors = honest(*args)
        one, two = (f"diffusion_model.blocks.{number}.qkv.lora_A.weight" for number in range(2))
        tensors[one], tensors[two] = tensors[two], tensors[one]
        return tensors

    monkeypatch.setattr(adapter_writer, "_file_tensors", swapped)
    with pytest.raises(
        UserError, match=r"could not be read back as it was written \(layers.0.qkv\)"
    ):
        write_adapter(
            tmp_path / "x.safetensors",
            trained(),
            NAMES,
            form="official",
            dtype=torch.float32,
            metadata={},
        )
    assert list(tmp_path.iterdir()) == []
