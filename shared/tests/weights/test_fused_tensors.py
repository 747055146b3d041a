"""Adapters in forms that stack modules otherwise than the model: written, read, and what other
programs wrote."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import check_adapted, export_adapter
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.files.start import config_from_file
from ditkit_core.adapters.files.write import Scaled, write_adapter
from ditkit_core.adapters.inject import adapter_layers, initialise, inject, trainable_parameters
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel
from ditkit_core.weights.fused_tensors import FusedTensors, LoraMatrices, columns_of_owners, join

RANK = 3
MODULES = ("layers.0.qkv", "layers.0.out", "layers.0.query", "layers.0.key_value", "layers.0.mlp.0")
THEIRS = "transformer_blocks.0."


def linears() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = ToyModel(ToyArch(), Precision())
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


SHAPES = linears()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def state(modules=MODULES, *, dora: bool = False, untrained=()) -> dict[str, LoraMatrices]:
    """Trained adapters, by module."""
    adapters = {}
    for seed, module in enumerate(modules):
        out, width = SHAPES[module]
        up = random(out, RANK, seed=seed) * (module not in untrained)
        magnitude = random(out, seed=seed).abs() + 0.5 if dora else None
        adapters[module] = LoraMatrices(random(RANK, width, seed=seed), up, magnitude)
    return adapters


def written(
    path: Path, values: dict[str, LoraMatrices], scaling: float = 1.0, dtype=torch.float32
) -> dict[str, Tensor]:
    """The file's tensors by their module and matrix, of the diffusers form."""
    adapters = {module: Scaled(matrices, scaling) for module, matrices in values.items()}
    write_adapter(
        path, adapters, TOY.architecture.names, form="diffusers", dtype=dtype, metadata={}
    )
    return {key.removeprefix("transformer."): tensor for key, tensor in load_file(path).items()}


def opened(path: Path) -> AdapterFile:
    return open_adapter(path, TOY.architecture.names, SHAPES)


def change(file: AdapterFile, module: str) -> Tensor:
    """What the file adds to a module's weight."""
    weight = torch.zeros(SHAPES[module])
    merge_into([(file, 1.0)])[f"{module}.weight"](weight)
    return weight


def test_modules_that_share_a_tensor_become_one_adapter_of_their_ranks_sum(tmp_path):
    values = state()
    tensors = written(tmp_path / "x.safetensors", values, 0.5)
    down, up = (tensors[f"{THEIRS}to_out_query.lora_{part}.weight"] for part in "AB")
    assert torch.equal(
        down, torch.cat([values[f"layers.0.{name}"].down for name in ("out", "query")])
    )
    assert torch.equal(
        up, torch.block_diag(*(values[f"layers.0.{name}"].up * 0.5 for name in ("out", "query")))
    )


def test_a_fused_module_becomes_several_that_share_a(tmp_path):
    values = state()
    tensors = written(tmp_path / "x.safetensors", values, 0.5)
    for name, rows in zip("qkv", values["layers.0.qkv"].up.chunk(3), strict=True):
        assert torch.equal(tensors[f"{THEIRS}to_{name}.lora_A.weight"], values["layers.0.qkv"].down)
        assert torch.equal(tensors[f"{THEIRS}to_{name}.lora_B.weight"], rows * 0.5)


def test_rows_in_another_order_are_rows_of_b_in_another_order(tmp_path):
    values = state(dora=True)
    tensors = written(tmp_path / "x.safetensors", values)
    key, value = values["layers.0.key_value"].up.chunk(2)
    assert torch.equal(tensors[f"{THEIRS}to_vk.lora_B.weight"], torch.cat([value, key]))
    norms = values["layers.0.key_value"].magnitude
    assert torch.equal(
        tensors[f"{THEIRS}to_vk.lora_magnitude_vector"], torch.cat([norms[32:], norms[:32]])
    )


def test_a_module_without_adapter_is_rows_of_zeros_next_to_one_that_has_one(tmp_path):
    values = state(("layers.0.query",))
    tensors = written(tmp_path / "x.safetensors", values)
    assert torch.equal(
        tensors[f"{THEIRS}to_out_query.lora_A.weight"], values["layers.0.query"].down
    )
    up = tensors[f"{THEIRS}to_out_query.lora_B.weight"]
    assert torch.equal(up, torch.cat([torch.zeros(32, RANK), values["layers.0.query"].up]))
    file = opened(tmp_path / "x.safetensors")
    assert list(file.modules) == ["layers.0.query"]
    assert file.modules["layers.0.query"].rank == RANK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "untrained", [(), ("layers.0.out",), ("layers.0.out", "layers.0.query", "layers.0.qkv")]
)
def test_what_was_stacked_is_read_as_it_was_trained(tmp_path, dtype, dora, untrained):
    values = state(dora=dora, untrained=untrained)
    written(tmp_path / "x.safetensors", values, 0.3, dtype)
    file = opened(tmp_path / "x.safetensors")
    assert set(file.modules) == set(MODULES)
    for module in MODULES:
        read, found = file.read(module), file.modules[module]
        assert (found.rank, found.scale, found.use_dora) == (RANK, 1.0, dora)
        assert torch.equal(read.down, values[module].down.to(dtype).float())
        assert torch.equal(read.up, (values[module].up * 0.3).to(dtype).float())
        if dora:
            assert torch.equal(read.magnitude, values[module].magnitude.to(dtype).float())
    config, _ = config_from_file(AdapterConfig(), file)
    assert (config.rank, config.alpha, set(config.targets)) == (RANK, RANK, set(MODULES))


def test_an_adapter_of_one_stacked_module_that_says_nothing_yet_is_written_too(tmp_path):
    written(tmp_path / "x.safetensors", state(("layers.0.query",), untrained=("layers.0.query",)))
    file = opened(tmp_path / "x.safetensors")
    assert [found.rank for found in file.modules.values()] == [RANK, RANK]
    assert not change(file, "layers.0.query").any()


def test_ranks_of_stacked_modules_are_in_the_header_where_peft_reads_them(tmp_path):
    """diffusers builds peft's configuration of the header alone; every module must get its rank,
    and scale 1."""
    import peft

    tensors = written(tmp_path / "x.safetensors", state())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
    config = peft.LoraConfig(
        **{key.removeprefix("transformer."): value for key, value in header.items()}
    )
    model = nn.Module()
    for key, up in tensors.items():
        if "lora_B" in key:
            *path, leaf = key.removesuffix(".lora_B.weight").split(".")
            place = model
            for name in path:
                if name not in dict(place.named_children()):
                    place.add_module(name, nn.Module())
                place = place.get_submodule(name)
            place.add_module(leaf, nn.Linear(32, len(up)))
    peft.inject_adapter_in_model(config, model)
    layers = adapter_layers(model)
    ranks = {name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers.items()}
    assert ranks == {
        key.removesuffix(".lora_A.weight"): (len(down), 1.0)
        for key, down in tensors.items()
        if "lora_A" in key
    }
    assert {rank for rank, _ in ranks.values()} == {RANK, 2 * RANK}


@pytest.mark.parametrize(
    ("prefix", "flat"),
    [("transformer.", False), ("diffusion_model.", False), ("", False), ("lora_unet_", True)],
)
def test_one_adapter_of_others_on_a_stacked_tensor_is_ones_that_share_a(tmp_path, prefix, flat):
    down, up = random(4, 32), random(64, 4)
    name = f"{THEIRS}to_out_query"
    name = prefix + (name.replace(".", "_") if flat else name)
    tensors = {
        f"{name}.lora_down.weight": down,
        f"{name}.lora_up.weight": up,
        f"{name}.alpha": torch.tensor(1.0),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = opened(tmp_path / "x.safetensors")
    for module, rows in (("layers.0.out", up[:32]), ("layers.0.query", up[32:])):
        read = file.read(module)
        assert torch.equal(read.down, down)
        assert torch.equal(read.up, rows)
        assert (file.modules[module].rank, file.modules[module].scale) == (4, 0.25)
        torch.testing.assert_close(change(file, module), 0.25 * rows @ down)


def test_columns_that_say_nothing_of_a_module_are_left_out_and_its_scale_stays(tmp_path):
    down, up = random(5, 32), random(64, 5)
    up[:32, 3:] = 0
    up[32:, 1] = 0
    tensors = {
        f"{THEIRS}to_out_query.lora_A.weight": down,
        f"{THEIRS}to_out_query.lora_B.weight": up,
    }
    save_file(
        {**tensors, f"{THEIRS}to_out_query.alpha": torch.tensor(10.0)}, tmp_path / "x.safetensors"
    )
    file = opened(tmp_path / "x.safetensors")
    assert [(found.rank, found.scale) for found in file.modules.values()] == [(3, 2.0), (4, 2.0)]
    torch.testing.assert_close(change(file, "layers.0.out"), 2 * up[:32] @ down)
    torch.testing.assert_close(change(file, "layers.0.query"), 2 * up[32:] @ down)


@pytest.mark.parametrize(
    ("names", "alphas"), [("qkv", (2, 2, 2)), ("qkv", (2, 1, 4)), ("qv", (2, 1)), ("k", (4,))]
)
def test_adapters_of_others_on_parts_of_our_module_are_one(tmp_path, names, alphas):
    tensors, expected = {}, torch.zeros(96, 32)
    for name, alpha in zip(names, alphas, strict=True):
        down, up = random(2, 32, seed=ord(name)), random(32, 2, seed=ord(name))
        key = f"lora_unet_transformer_blocks_0_to_{name}"
        tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        tensors[f"{key}.alpha"] = torch.tensor(float(alpha))
        expected["qkv".index(name) * 32 :][:32] = alpha / 2 * up @ down
    save_file(tensors, tmp_path / "x.safetensors")
    file = opened(tmp_path / "x.safetensors")
    found = file.modules["layers.0.qkv"]
    assert (found.rank, found.scale) == (
        2 * len(names),
        alphas[0] / 2 if len(set(alphas)) == 1 else 1.0,
    )
    torch.testing.assert_close(change(file, "layers.0.qkv"), expected)


def test_rows_that_two_adapters_of_a_file_claim_are_an_error(tmp_path):
    tensors = {}
    for name, rows in (("transformer_blocks.0.to_q", 32), ("blocks.0.qkv", 96)):
        tensors |= {
            f"{name}.lora_A.weight": random(2, 32),
            f"{name}.lora_B.weight": random(rows, 2),
        }
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(
        UserError, match="2 of 4 keys fit no adapter of this model: .*to_q.lora_A.weight"
    ):
        opened(tmp_path / "x.safetensors")


def test_matrices_of_another_size_on_a_stacked_tensor_are_an_error(tmp_path):
    tensors = {
        f"{THEIRS}to_out_query.lora_A.weight": random(2, 32),
        f"{THEIRS}to_out_query.lora_B.weight": random(63, 2),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"do not fit the layer's \[64, 32\]"):
        opened(tmp_path / "x.safetensors")
    save_file({f"{THEIRS}to_out_query.lora_A.weight": random(2, 32)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"no up matrix for layers.0.out, layers.0.query; fetch"):
        opened(tmp_path / "x.safetensors")


def test_magnitudes_of_some_rows_alone_are_an_error(tmp_path):
    tensors = {}
    for name in "qkv":
        key = f"{THEIRS}to_{name}"
        tensors |= {f"{key}.lora_A.weight": random(2, 32), f"{key}.lora_B.weight": random(32, 2)}
    save_file({**tensors, f"{THEIRS}to_k.dora_scale": torch.ones(32)}, tmp_path / "x.safetensors")
    with pytest.raises(
        UserError, match=r"to_k.dora_scale is a norm of some outputs of layers.0.qkv"
    ):
        opened(tmp_path / "x.safetensors")


@pytest.mark.parametrize("use_dora", [False, True])
def test_dora_next_to_a_module_without_adapter_is_refused_before_training(tmp_path, use_dora):
    with torch.device("meta"):
        model = ToyModel(ToyArch(), Precision())
    inject(
        model,
        AdapterConfig(rank=RANK, use_dora=use_dora, targets=("attention",)),
        TOY.adapters.targets,
    )
    config = ExportConfig(forms=("diffusers",))
    if not use_dora:
        return check_adapted(TOY, config, model)
    with pytest.raises(
        UserError,
        match=r"has layers.0.query in transformer_blocks.0.to_out_query with modules that",
    ):
        check_adapted(TOY, config, model)
    values = state(("layers.0.query",), dora=True)
    with pytest.raises(
        UserError, match="add them to adapter.targets, or set adapter.use_dora = false"
    ):
        written(tmp_path / "x.safetensors", values)
    return None


def test_the_model_is_asked_about_every_form_and_its_adapted_modules(tmp_path):
    asked = []

    def check(form, modules):
        asked.append((form, tuple(modules)))
        if form == "diffusers":
            raise UserError("its readers would ignore layers.0.qkv")

    spec = altered(TOY, check=check)
    with torch.device("meta"):
        model = ToyModel(ToyArch(depth=1), Precision())
    check_adapted(spec, ExportConfig(), model)
    assert asked == []  # nothing is adapted: nothing can be ignored
    inject(model, AdapterConfig(rank=RANK, targets=("qkv",)), TOY.adapters.targets)
    initialise(model, 0, device_of=lambda module: torch.device("cpu"))
    assert trainable_parameters(model).keys() == {
        "layers.0.qkv.lora_A.weight",
        "layers.0.qkv.lora_B.weight",
    }
    check_adapted(spec, ExportConfig(), model)
    assert asked == [("official", ("layers.0.qkv",))]
    for do in (
        lambda config: check_adapted(spec, config, model),
        lambda config: export_adapter(model, spec, tmp_path, "adapter", config, metadata={}),
    ):
        with pytest.raises(UserError, match="its readers would ignore"):
            do(ExportConfig(forms=("official", "diffusers")))
    assert list(tmp_path.iterdir()) == []


def test_a_that_all_share_is_not_repeated():
    down, up = random(2, 8), random(12, 2)
    whole = LoraMatrices(down, up)
    joined = join([(name, whole.rows(index, 3)) for index, name in enumerate("qkv")])
    assert torch.equal(joined.down, down)
    assert torch.equal(joined.up, up)


@pytest.mark.parametrize("owners", ["qkv", "qqk", "qkq"])
@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 2, 3)])
def test_columns_go_back_to_whom_they_came_from(owners, ranks):
    """Equal ranks are blocks even where they are zero; others are known by what is not."""
    distinct = list(dict.fromkeys(owners))
    sizes = dict(zip(distinct, ranks, strict=False))
    downs = {owner: random(rank, 8, seed=ord(owner)) for owner, rank in sizes.items()}
    pieces = [
        (owner, LoraMatrices(downs[owner], random(4, sizes[owner], seed=place)))
        for place, owner in enumerate(owners)
    ]
    joined = join(pieces)
    columns = columns_of_owners(joined.up, owners)
    assert {owner: len(kept) for owner, kept in columns.items()} == sizes
    for (owner, matrices), rows in zip(pieces, joined.up.chunk(3), strict=True):
        assert torch.equal(joined.down[columns[owner]], matrices.down)
        assert torch.equal(rows[:, columns[owner]], matrices.up)


def test_rows_are_noted_once_and_cut_in_one_way():
    assembly = FusedTensors()
    assert assembly.add("to_k", [TensorSlice("qkv", 1, 3)])
    assert not assembly.add("k", [TensorSlice("qkv", 1, 3)])
    assert not assembly.add("whole", [TensorSlice("qkv")])
    assert not assembly.add("two", [TensorSlice("free"), TensorSlice("qkv", 0, 2)])
    assert assembly.parts == {"qkv": (None, TensorSlice("to_k"), None)}
    assert not assembly.complete
    assert assembly.add("rest", [TensorSlice("qkv", 2, 3), TensorSlice("qkv", 0, 3)])
    assert assembly.complete == {
        "qkv": (TensorSlice("rest", 1, 2), TensorSlice("to_k"), TensorSlice("rest", 0, 2))
    }
