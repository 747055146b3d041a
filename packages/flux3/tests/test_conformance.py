"""FLUX.3 against every suite of the core, and diffusers: outputs, every gradient, samples,
adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from einops import rearrange
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import check_export, export_adapter
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.families.euler import NEXT_SIGMA
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import WHOLE, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import SampleDefaults
from ditkit_core.nn.rope import axis_angles, timestep_features
from ditkit_core.planner.profiler import profile
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_ranks import FewRanks, RanksConformance
from ditkit_core.testing.conformance_replicas import EveryReplica, ReplicaConformance
from ditkit_core.testing.conformance_sharded import EverySharded, ShardedConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.plans import step_of
from ditkit_core.testing.replicas import Divided
from ditkit_core.testing.run_files import check_schema
from ditkit_core.testing.sampling import generate_latents
from ditkit_core.testing.stream_faults import StreamFaultChecks
from ditkit_core.testing.world import make_model
from ditkit_flux3.demo.write import write_checkpoint
from ditkit_flux3.model import Flux3Transformer, make_inputs
from ditkit_flux3.presets import PRESETS, Flux3Arch, arch_from_config
from ditkit_flux3.spec import FLUX3, VAE, reference_size
from ditkit_flux3.state_dict import RULES, to_diffusers, to_native, to_official
from ditkit_flux3.verify import DIFFUSERS, diffusers_arguments

CPU = torch.device("cpu")
ARCH = Flux3Arch(
    dim=64, heads=2, tower_layers=1, layers=2, text_dim=12, in_channels=4, freq_dim=16,
    axes=(8, 8, 8, 8),
)  # fmt: skip
GRIDS = ([(2, 3), (2, 2), (1, 3)], [(2, 5), (3, 3)], [(3, 2), (1, 3), (2, 2)])
"""Rows and columns of the image of three samples, and of their references."""
SOME = ([(2, 3), (1, 3)], [(2, 7)], [(3, 3)])
"""The same with references of one sample alone."""
NONE = ([(2, 3)], [(2, 5)], [(3, 2)])
ROWS = (4, 8, 4)
"""Rows of their captions."""


def samples(*chosen: int, grids=GRIDS, dtype: torch.dtype = torch.float32):
    """Training items of these samples."""
    random = torch.Generator().manual_seed(0)
    names = ("latents", "reference.0", "reference.1")
    made = [
        {
            **{
                name: torch.randn(4, 1, *grid, generator=random, dtype=torch.float64).to(dtype)
                for name, grid in zip(names, sample, strict=False)
            },
            "text": torch.randn(rows, 12, generator=random, dtype=torch.float64).to(dtype),
        }
        for sample, rows in zip(grids, ROWS, strict=False)
    ]
    return [dict(made[i]) for i in chosen]


class Images:
    """Samples with one reference and with two."""

    spec = FLUX3
    arch = ARCH
    last_layers = ("attn_out", "mlp_out")

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)))


class TestEditing(Images, Conformance):
    """All samples have references."""


class TestPeers(Images, PeerChecks):
    diffusers = DIFFUSERS


class TestAudit(Images, AuditChecks):
    """Errors by place; the toy's are all daily."""


class TestStreamOrder(Images, StreamFaultChecks):
    """Faults in the order of streams are found."""

    arch = replace(ARCH, layers=3)


class SomeReferences(Images):
    """Samples without a reference next to one that has one."""

    idle = (
        "embed.emb_in.image_cond.",
        *(f"embed.{blocks}_stream_modulations.image_cond." for blocks in ("early", "single")),
        "content_mode_blocks.image_cond.",
    )

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)), grids=SOME)


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(SomeReferences, ReplicaConformance):
    """One rank has references where another has none."""


@pytest.mark.exhaustive
class TestEveryReplicas(Images, EveryReplica):
    """Every case on up to four ranks."""


@pytest.mark.ranks
@pytest.mark.slow
class TestFewRanks(Images, FewRanks):
    """Two ranks: sharded, kept and recomputed."""


@pytest.mark.exhaustive
class TestRanks(Images, RanksConformance):
    """Two ranks: sharded, under every policy."""


@pytest.mark.exhaustive  # each change runs Wan's
class TestSharded(Images, ShardedConformance):
    sharded = (Divided(2, 2), Divided(4, 2), Divided(4, 2, context=2))


class TestEverySharded(Images, EverySharded):
    """Every case in every world."""


class TestSomeReferences(SomeReferences, CoreChecks):
    one_in = 5


class TestTextToImage(TestSomeReferences):
    """Without any."""

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)), grids=NONE)


class TestKeptBytes(KeptBytesConformance):
    spec = FLUX3
    arch = replace(ARCH, tower_layers=2, layers=3)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (64, 64, 64, 64)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 1-3=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


@pytest.mark.parametrize("fused", [False, True])
def test_a_tower_without_references_has_no_gradient_in_a_plan(fused):
    """Of all weights of the tower, and of the three layers outside of it that references have;
    unless another micro-batch may have references."""
    arch = replace(ARCH, tower_layers=2, layers=3)
    adapter = AdapterConfig(method="full")
    held = {}
    for uniform in (False, True):
        step = step_of(FLUX3, arch, (1, 64, 64), adapter)
        optim = replace(step.optim, fused_backward=fused)
        profiled = profile(replace(step, uniform=uniform, optim=optim))
        held[uniform] = [(cost.gradients, cost.optimizer) for cost in profiled.stages]
    layers = {"embed": 0, "tower": 0}
    for name, x in make_model(FLUX3, arch).named_parameters():
        if name.startswith(TestSomeReferences.idle):
            layers["embed" if name.startswith("embed.") else "tower"] += 4 * x.numel()
    embed, blocks = held[False][0], held[False][5:7]
    for index, (gradients, state) in enumerate(held[True]):
        if index in (5, 6):  # behind embedding, text and image towers
            assert (gradients, state) == (0, 0) and blocks[index - 5][1] >= layers["tower"]
        elif index:
            assert (gradients, state) == held[False][index]
    assert embed[0] - held[True][0][0] == (0 if fused else layers["embed"])
    # two moments, and for each layer a number of steps, which takes 512 bytes
    assert 0 <= embed[1] - held[True][0][1] - 2 * layers["embed"] <= 3 * 512


class TestPlan(FullSizePlanConformance):
    spec = FLUX3
    preset = "klein-base"
    size = (1, 1024, 1024)
    cut = 24


class TestSplit(FullSizeSplitConformance):
    spec = FLUX3
    preset = "klein-base"
    size = (1, 1024, 1024)
    few: ClassVar = {"tower_layers": 3, "layers": 3}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 123e6  # no more than a block

    def _items(self, arch):
        with torch.device("meta"):
            return [self.spec.training.empty_item(arch, self.size, [(512, 768)])]

    def crossing(self, arch, cut):
        """Three streams and their modulations, time, rotary table; adapters are behind the streams
        whose tower ran."""
        return 8, 1 + (cut > arch.tower_layers) + (cut > 2 * arch.tower_layers)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(FLUX3, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = FLUX3
    samples = "*.png"
    num_samples = range(2, 100)
    trained = "diffusion_model.single_blocks.0.q_proj.lora_A.weight"
    trained_names = r"diffusion_model\.(txt_mode_blocks|content_mode_blocks|single_blocks)\."
    daily = slice(0, None, 2)
    levers = (("--adapter.targets", '["modulation"]', "--export.forms", '["diffusers"]'),)
    forms = ("--export.forms", '["official", "diffusers"]')
    init_from = "first_diffusers.safetensors"
    merge_from = "first.safetensors"


class TestBase(TrainedBaseChecks):
    spec = FLUX3
    vae = VAE
    text_encoder = "Qwen3VLForConditionalGeneration"
    layers = (4, 32)


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestSomeReferences)


# Not with other checks of ranks, which each change waits for: the interpreter takes minutes.
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block of each kind, and images of a few tokens, one with a reference."""

    arch = replace(ARCH, layers=1)
    cases = ("brief lora on nf4", "brief full")
    more = ("gated_unit", "gated_unit_backward", "gated_sum", "gated_sum_backward")

    def items(self, count, ragged=False):
        return samples(0, 1, grids=([(1, 2)], [(1, 3), (1, 1)]))


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample, under some policies: each tower has its
    own."""

    outputs = 2e-6
    four: ClassVar = replace(ARCH, layers=1, heads=4, axes=(4, 4, 4, 4))
    subjects: ClassVar = {
        "odd": Subject(FLUX3, four, samples(0), 4),
        "text to image": Subject(FLUX3, four, samples(0, grids=NONE), 3),
        "ragged": Subject(FLUX3, four, samples(0, 1, 2, grids=SOME), 4),
        "two heads": Subject(FLUX3, replace(ARCH, layers=1), samples(0, 1), 4),
    }


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextConformance):
    outputs = TestContext.outputs
    scope = "all"
    subjects = TestContext.subjects
    under_every_policy = ("ragged", "two heads")


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_flux3.train"


# diffusers


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def diffusers_model(arch: Flux3Arch, seed: int = 0) -> torch.nn.Module:
    """diffusers' model with random weights, none at an initial one."""
    from diffusers import Flux3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Flux3Transformer2DModel(**DIFFUSERS.config(arch))
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.data = (
                1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5
            )
    return model


def native(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of diffusers' names by ours."""
    rows = {}
    for name, tensor in tensors.items():
        parts = to_native(name)
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            rows.setdefault(part.name, {})[part.index] = piece
    return {name: torch.cat([pieces[i] for i in sorted(pieces)]) for name, pieces in rows.items()}


def loaded(theirs: torch.nn.Module, arch: Flux3Arch, dtype: torch.dtype, *, cast: bool = True):
    ours = Flux3Transformer(arch, Precision(matmul=dtype))
    ours.load_state_dict(native(dict(theirs.state_dict())))
    return ours.to(dtype) if cast else ours


@contextmanager
def exact_diffusers(dtype: torch.dtype) -> Iterator[None]:
    """diffusers with the sinusoid and the rotary tables of this dtype, which it computes in fp32;
    in fp64 it also keeps q and k in fp64, which it writes as `.float()`."""
    import diffusers.models.transformers.transformer_flux3 as theirs

    def sinusoid(self, timesteps):
        return timestep_features(timesteps.double(), self.num_channels).to(dtype)

    def tables(self, ids):
        angles = torch.cat(
            [
                axis_angles(ids[:, axis].double(), size // 2, self.theta)
                for axis, size in enumerate(self.axes_dim)
            ],
            -1,
        ).repeat_interleave(2, -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.Timesteps, "forward", sinusoid)
        patch.setattr(theirs.Flux3PosEmbed, "forward", tables)
        if dtype == torch.float64:
            patch.setattr(Tensor, "float", Tensor.double)
        yield


SIGMA = (0.8125, 0.25, 0.5)
TARGET = (0.5, 0.125, 0.0)
BATCHES = {
    "text alone": ((0,), NONE),
    "references": ((0,), GRIDS),
    "alike": ((0, 0), NONE),
    "of several sizes": ((0, 1, 2), GRIDS),
    "some references": ((0, 1, 2), SOME),
}


def outcome(items, model, run, level, target):
    """Outputs, and gradients of inputs and parameters."""
    leaves = {
        f"{i} {name}": x.requires_grad_()
        for i, item in enumerate(items)
        for name, x in item.items()
    }
    latents = [item["latents"] for item in items]
    told = [item | {NEXT_SIGMA: value} for item, value in zip(items, target, strict=True)]
    outputs = run(model, latents, level, told)
    random = torch.Generator().manual_seed(5)
    loss = sum(
        (out.double() - torch.randn(out.shape, generator=random, dtype=torch.float64))
        .square()
        .sum()
        for out in outputs
    )
    loss.backward()
    return {
        **{f"output {i}": out for i, out in enumerate(outputs)},
        **{name: x.grad for name, x in leaves.items()},
    }


def run_ours(model, latents, level, items):
    return model(make_inputs(latents, level, items, 1.0))


def run_theirs(model, latents, level, items):
    """One sample at a time: diffusers has one layout for all of a batch."""
    outputs = []
    for i, item in enumerate(items):
        inputs = make_inputs([latents[i]], level[i : i + 1], [item], 1.0)
        arguments = diffusers_arguments(inputs, latents[i].dtype, model.config.flow_map)
        out = model(**arguments, return_dict=False)[0][0]
        outputs.append(rearrange(out, "(h w) c -> c 1 h w", h=latents[i].shape[2]))
    return outputs


def both(arch, batch, dtype):
    chosen, grids = BATCHES[batch]
    level, target = (
        torch.tensor(values, dtype=torch.float64)[list(chosen)] for values in (SIGMA, TARGET)
    )
    theirs = diffusers_model(arch).to(dtype)
    ours = loaded(theirs, arch, dtype)
    results = []
    with exact_diffusers(dtype):
        for model, run in ((ours, run_ours), (theirs, run_theirs)):
            items = samples(*chosen, grids=grids, dtype=dtype)
            results.append(outcome(items, model, run, level, target))
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    expected = native({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    return (results[0] | gradients, results[1] | expected)


ARCHS = {"base": ARCH, "flow map": replace(ARCH, flow_map=True)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_outputs_and_every_gradient_are_those_of_diffusers(arch, batch, dtype, bar):
    ours, theirs = both(ARCHS[arch], batch, dtype)
    without = {name for name, gradient in ours.items() if gradient is None}
    assert ours.keys() - without == theirs.keys()
    # Weights that only references use get no gradient without them, here as there.
    assert bool(without) == (BATCHES[batch][1] is NONE)
    assert all("image_cond" in name for name in without)
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) <= bar, max(errors.items(), key=lambda pair: pair[1])


def test_bf16_is_closer_to_fp64_than_diffusers():
    """Equal values of weights and inputs; diffusers as `from_pretrained(torch_dtype=bf16)` leaves
    it. The mean of several weights, because one may be lucky: outputs, gradients of inputs, and of
    all parameters together."""
    errors: dict[str, list[tuple[float, float]]] = {}
    level, target = (torch.tensor(values[:1], dtype=torch.float64) for values in (SIGMA, TARGET))
    for seed in range(4):
        theirs = diffusers_model(ARCH, seed)
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exact = loaded(theirs, ARCH, torch.float64)
        half = loaded(theirs, ARCH, torch.bfloat16, cast=False)
        for name, parameter in half.named_parameters():
            if not FLUX3.precision.keep_fp32(name):
                parameter.data = parameter.data.bfloat16()
        for name, parameter in theirs.named_parameters():
            if ".norm_" not in name:
                parameter.data = parameter.data.bfloat16()
        results = []
        for model, dtype, run in (
            (exact, torch.float64, run_ours),
            (half, torch.bfloat16, run_ours),
            (theirs, torch.bfloat16, run_theirs),
        ):
            items = [
                {name: x.to(dtype) for name, x in item.items()}
                for item in samples(0, dtype=torch.bfloat16)
            ]
            result = outcome(items, model, run, level, target)
            gradients = {
                name: parameter.grad.double() for name, parameter in model.named_parameters()
            }
            gradients = gradients if run is run_ours else native(gradients)
            result["parameters"] = torch.cat([gradients[n].flatten() for n in sorted(gradients)])
            results.append(result)
        truth, mine, them = results
        assert mine["output 0"].dtype == torch.float32
        for name in truth:
            pair = relative(mine[name], truth[name]), relative(them[name], truth[name])
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        ours, diffusers = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        assert ours < 0.8 * diffusers, (name, ours, diffusers)


def test_the_reference_preset_rounds_where_diffusers_does():
    """diffusers' roundings in bf16, place by place: what is left is the order of summation, a tenth
    of what they cost."""
    theirs = diffusers_model(ARCH)
    for name, parameter in theirs.named_parameters():
        parameter.data = parameter.data.bfloat16().float()
    exact = loaded(theirs, ARCH, torch.float64)
    precision = PrecisionConfig(preset="reference").precision(
        torch.bfloat16, FLUX3.precision.reference
    )
    ours = Flux3Transformer(ARCH, precision)
    ours.load_state_dict(native(dict(theirs.state_dict())))
    for model, norms in ((ours, "_norm."), (theirs, ".norm_")):
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if norms in name else parameter.data.bfloat16()
    level = torch.tensor(SIGMA[:1], dtype=torch.float64)
    told = samples(0, dtype=torch.bfloat16)
    wide = [{name: x.double() for name, x in item.items()} for item in told]
    with torch.no_grad():
        mine, them, truth = (
            run(model, [item["latents"] for item in items], level, items)[0]
            for run, model, items in (
                (run_ours, ours, told), (run_theirs, theirs, told), (run_ours, exact, wide)
            )
        )  # fmt: skip
    assert relative(mine, them) < 0.1 * relative(them, truth)


def test_a_flow_map_is_trained_at_jumps_of_no_length_and_sampled_at_its_steps():
    """What it is told makes a difference, so that leaving it out would be seen."""
    model = make_model(FLUX3, replace(ARCH, flow_map=True)).eval()
    item, sigma = samples(0)[0], torch.tensor([0.5])
    with torch.no_grad():
        trained, told, jump = (
            model(make_inputs([item["latents"]], sigma, [item | more], 1.0))[0]
            for more in ({}, {NEXT_SIGMA: sigma[0]}, {NEXT_SIGMA: torch.tensor(0.25)})
        )
    assert torch.equal(trained, told) and relative(jump, trained) > 1e-3


def test_names_and_parameters_are_those_of_diffusers_at_full_size():
    from diffusers import Flux3Transformer2DModel

    counted = {}
    with torch.device("meta"):
        for preset, arch in PRESETS.items():
            theirs = Flux3Transformer2DModel(flow_map=arch.flow_map)
            ours = Flux3Transformer(arch, Precision())
            shapes = {to_diffusers(n)[0].name: x.shape for n, x in ours.state_dict().items()}
            assert shapes == {name: x.shape for name, x in theirs.state_dict().items()}
            assert arch_from_config(dict(theirs.config), {}) == arch
            counted[preset] = sum(p.numel() for p in ours.parameters())
            assert counted[preset] == sum(p.numel() for p in theirs.parameters())
    assert counted == {"klein-base": 5_538_458_368, "klein": 5_548_681_984}


def test_another_configuration_is_refused():
    config = DIFFUSERS.config(ARCH)
    with pytest.raises(ValueError, match="cond_in_channels 5"):
        arch_from_config(config | {"cond_in_channels": 5}, {})
    with pytest.raises(ValueError, match="do not add up"):
        arch_from_config(config | {"axes_dims_rope": (8, 8)}, {})
    with pytest.raises(KeyError):
        arch_from_config({"num_attention_heads": 2, "in_channels": 4}, {})


@pytest.mark.parametrize("flow_map", [False, True])
def test_official_names_become_diffusers_by_its_own_converter(flow_map):
    """Both ways, with the halves of the head's modulation exchanged, and without heads of the
    authors' training."""
    from diffusers.loaders.single_file_utils import (
        convert_flux3_transformer_checkpoint_to_diffusers,
    )

    model = make_model(FLUX3, replace(ARCH, flow_map=flow_map))
    state = {name: p.detach() for name, p in model.named_parameters()}
    official = {to_official(name)[0].name: tensor for name, tensor in state.items()}
    assert "final_layer.image.adaLN_modulation.1.weight" in official
    assert ("ref_time_in.in_layer.weight" in official) == flow_map
    converted = convert_flux3_transformer_checkpoint_to_diffusers(
        official | {"repa_projectors.0.weight": torch.zeros(1)}
    )
    assert converted.keys() == diffusers_model(replace(ARCH, flow_map=flow_map)).state_dict().keys()
    for tensors in (native(official), native(converted)):
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
    assert to_native("repa_projectors.0.weight") == () and to_native("single_blocks.*.x") is None


# Captions, samples


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


class Processor:
    """As transformers' processors: the pipeline needs template and tokenizer."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(
            checkpoint / "tokenizer", local_files_only=True
        )
        self.apply_chat_template = self.tokenizer.apply_chat_template


@pytest.fixture(scope="session")
def language_model(checkpoint: Path):
    """The text encoder as transformers has it."""
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", local_files_only=True
    ).eval()


def text_encoder(checkpoint: Path, streaming="never"):
    encoder = FLUX3.auxiliary.text_encoder(
        ModelPaths(base=str(checkpoint)), CPU, torch.float32, streaming
    )
    encoder.load()
    return encoder


PROMPTS = {"": 80, "a red circle": 80, "a red circle, " * 20: 160, "a blue square " * 3000: 8192}


@pytest.mark.parametrize("prompt", PROMPTS, ids=[str(rows) for rows in range(4)])
def test_features_of_captions_are_those_of_the_pipeline(checkpoint, language_model, prompt):
    """Bitwise: eight hidden layers side by side, the window, its padding and where that is. All
    rows of padding are one."""
    from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

    with torch.no_grad():
        (expected,) = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            language_model, Processor(checkpoint), prompt
        )
    encoder = text_encoder(checkpoint)
    (ours,) = encoder.encode([prompt])
    assert ours["text"].shape == (PROMPTS[prompt], 8 * 32) and encoder.width == 8 * 32
    assert torch.equal(ours["text"], expected)
    assert bool(encoder.truncated) == (PROMPTS[prompt] == 8192)


def test_captions_of_several_windows_are_streamed_together_bitwise(checkpoint):
    streamed, resident = (text_encoder(checkpoint, how) for how in ("always", "never"))
    prompts = list(PROMPTS)[:3]
    for prompt, features in zip(prompts, streamed.encode(prompts), strict=True):
        assert torch.equal(features["text"], resident.encode([prompt])[0]["text"])


def run_pipeline(arch, model, checkpoint, language_model, guidance, image, noise, prompts):
    """Latents before each step and at the end, and the pixels, of diffusers' own pipeline."""
    import diffusers

    kind = "Flux3Distilled" if arch.flow_map else "Flux3"
    blocks = getattr(diffusers, f"{kind}AutoBlocks")()
    blocks.sub_blocks.pop("prompt_upsampler")  # a language model that rewrites prompts
    pipeline = getattr(diffusers, f"{kind}ModularPipeline")(blocks)
    pipeline.update_components(
        text_encoder=language_model,
        tokenizer=Processor(checkpoint),
        vae=diffusers.AutoencoderKLFlux2.from_pretrained(checkpoint / "vae", local_files_only=True),
        transformer=DIFFUSERS.transformer(model),
    )
    options = {"prompt": prompts[0]}
    if not arch.flow_map:
        pipeline.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance))
        options["negative_prompt"] = prompts[1]
    if image is not None:
        options["image"] = image
    seen = []
    pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    state = pipeline(
        **options, height=48, width=64, num_inference_steps=3, latents=noise, output_type="pt"
    )
    return seen, state.get("latents"), state.get("images")[0]


CASES = {
    "guided": (ARCH, 3.5, 0),
    "unguided": (ARCH, 1.0, 0),
    "guided edit": (ARCH, 3.5, 1),
    "edit of two": (ARCH, 1.0, 2),
    "flow map": (replace(ARCH, flow_map=True), 3.5, 0),
    "edit by a flow map": (replace(ARCH, flow_map=True), 3.5, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_a_sample_is_that_of_the_pipeline(checkpoint, language_model, case):
    """From the prompt and the pictures to pixels; references whose sides are multiples of 16."""
    arch, guidance, count = CASES[case]
    arch = replace(arch, in_channels=64, text_dim=256)
    model = make_model(FLUX3, arch).eval()
    paths = ModelPaths(base=str(checkpoint))
    prompts = ["a red circle", "a blue square at the top " * 9]
    encoder = text_encoder(checkpoint)
    prompt, negative = (encoder.encode([text])[0] for text in prompts)
    pixels = [
        torch.rand(3, 1, *sides, generator=torch.Generator().manual_seed(i)).mul(255).round()
        for i, sides in enumerate([(64, 80), (80, 64)][:count])
    ]
    sampler = FLUX3.auxiliary.sampler(paths, CPU, torch.float32, ())
    vae = FLUX3.auxiliary.media_encoder(paths, CPU, WHOLE)
    vae.load()
    references = [vae.encode([image / 127.5 - 1])[0]["latents"] for image in pixels]
    job = GenerationRequest(
        conditions=prompt, negative=negative, references=references, frames=1, height=48, width=64,
        steps=3, guidance=guidance, shift=0.0, seed=7,
    )  # fmt: skip
    seen: list[Tensor] = []

    def run(model, inputs):
        seen.append(inputs.latents[0])
        return run_plain(model, inputs)

    with torch.no_grad():
        latents = generate_latents(sampler, job, model, run)
    images = [Image.fromarray(x[:, 0].permute(1, 2, 0).byte().numpy()) for x in pixels]
    image = None if not images else images[0] if count == 1 else images
    noise = torch.randn((64, 1, 3, 4), generator=generator(7, "sample"))
    before, after, expected = run_pipeline(
        arch, model, checkpoint, language_model, guidance, image, noise[:, 0][None], prompts
    )
    assert len(seen) == len(before) == (6 if "guided" in case.split() else 3)
    scale = float(latents.std())
    for ours, theirs in zip(seen, before, strict=True):
        rows = rearrange(ours, "c 1 h w -> 1 (h w) c")
        # fp32 in two orders of summation, amplified by guidance; diffusers' noise levels and
        # sinusoid are fp32, ours fp64
        assert (rows - theirs).abs().max() / scale < 2e-4
    assert (latents[:, 0][None] - after).abs().max() / scale < 2e-4
    assert (latents - seen[0]).abs().max() > 0.5
    torch.testing.assert_close(sampler.decoder.decode(latents)[:, 0], expected, atol=2e-4, rtol=0)


# Adapters, run files


def adapted(**config) -> torch.nn.Module:
    return make_model(FLUX3, ARCH, adapter=AdapterConfig(rank=3, alpha=6.0, **config)).eval()


def written(model: torch.nn.Module, folder: Path, form: str) -> Path:
    config = ExportConfig(forms=(form,), dtype="fp32")
    (file,) = export_adapter(model, FLUX3, folder, "adapter", config, metadata={}, exact=True)
    return file


BLOCKS = ("q_proj", "k_proj", "v_proj", "attn_out", "mlp_in", "mlp_out")
OUTSIDE = ("embed.txt_in", "emb_in.image", "emb_in.image_cond", "time_in.in_layer", "head.linear")
OUTSIDE += ("early_stream_modulations.txt.lin", "single_stream_modulations.image_cond.lin")
OUTSIDE += ("head.adaLN_modulation.1",)
FILES: dict[str, tuple[str, Callable[[str], str]]] = {
    **{
        form: (form, lambda name: name) for form in ("official", "diffusers", "diffsynth", "musubi")
    },
    "lora_up and lora_down": (
        "official",
        lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    ),
    "no prefix": ("official", lambda name: name.removeprefix("diffusion_model.")),
    "peft": ("official", lambda name: name.replace("diffusion_model.", "base_model.model.")),
}


def check_reader(path: Path, model: torch.nn.Module) -> str:
    """What is said of diffusers and a file, if that is so."""
    layers = {
        name.removesuffix(".base_layer"): tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    }
    file = find_adapter(path, FLUX3, layers=layers)
    reader = RULES.readers(file.layout, list(file.shapes))["diffusers"]
    try:
        line = DIFFUSERS.verify(path, ModelPaths(transformer="tiny.safetensors"), model, run_plain)
        loads = "agrees with our model" in line
    except UserError:
        loads = False
    assert loads == (reader == ""), reader
    return reader


@pytest.mark.parametrize("where", ["blocks", "outside"])
@pytest.mark.parametrize("kind", FILES)
def test_what_is_said_of_diffusers_is_what_its_loader_does(tmp_path, kind, where):
    """An adapter of every kind of layer, loaded by the pipeline's own loader, to the outputs of our
    model."""
    form, rename = FILES[kind]
    model = adapted(targets=BLOCKS if where == "blocks" else OUTSIDE)
    file = written(model, tmp_path, form)
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
    reader = check_reader(file, model)
    assert (reader == "") == (form == kind and (form, where) in READ), reader


READ = {("official", "blocks"), ("diffusers", "blocks"), ("diffusers", "outside")}


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_what_is_said_of_diffusers_and_dora_is_what_its_loader_does(tmp_path, form):
    model = adapted(targets=BLOCKS, use_dora=True)
    assert (check_reader(written(model, tmp_path, form), model) == "") == (form == "diffusers")


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_diffusers_rejects_keys_of_alpha(tmp_path, form):
    model = adapted(targets=BLOCKS)
    file = written(model, tmp_path, form)
    tensors = load_file(file)
    stems = {name.rpartition(".lora_")[0] for name in tensors}
    save_file(tensors | {f"{stem}.alpha": torch.tensor(3.0) for stem in stems}, file)
    assert "rejects keys of alpha" in check_reader(file, model)


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_diffusers_has_no_reader_of_a_lokr(tmp_path, form):
    from diffusers import Flux3DistilledModularPipeline

    model = adapted(targets=("q_proj",), method="lokr", decompose_factor=4)
    file = written(model, tmp_path, form)
    layers = {name: tuple(x.weight.shape) for name, x in adapter_layers(model).items()}
    read = find_adapter(file, FLUX3, layers=layers)
    assert "no reader of LoKr" in RULES.readers(read.layout, list(read.shapes))["diffusers"]
    pipeline = Flux3DistilledModularPipeline()
    pipeline.update_components(transformer=DIFFUSERS.transformer(model))
    with pytest.raises(ValueError, match="Invalid LoRA"):
        pipeline.load_lora_weights(file)


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("file", [*CONFIGS, FLUX3.demo.config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    config = resolve(RunConfig, file=file)
    check_export(FLUX3, config.export, config.adapter)
    run = create_run(FLUX3, replace(config, train=replace(config.train, threads=0)))
    check_training(run)
    assert config.model.preset in ("", "klein-base") and config.train.caption_dropout == 0.1


def test_run_files_conform_to_the_schema_next_to_them():
    assert len(CONFIGS) == 3
    check_schema("ditkit_flux3", CONFIGS[0].parent)


def test_the_flow_map_is_advised_against_and_only_adapted():
    assert 'model.preset = "klein-base"' in FLUX3.training.advice(PRESETS["klein"])
    assert FLUX3.training.advice(PRESETS["klein-base"]) == ""
    assert FLUX3.auxiliary.sample_defaults(PRESETS["klein"]) == SampleDefaults(
        steps=16, guidance=1.0, guided_by="nothing"
    )
    for preset, method, refused in (
        ("klein", "full", True), ("klein", "lora", False), ("klein-base", "full", False)
    ):  # fmt: skip
        config = RunConfig(
            model=ModelPaths(preset=preset, dtype="fp32"), adapter=AdapterConfig(method=method)
        )
        with pytest.raises(UserError, match="flow map") if refused else nullcontext():
            check_training(create_run(FLUX3, config))


@pytest.mark.parametrize(
    ("sides", "count", "size"),
    [
        ((1024, 1024), 1, (1024, 1024)),
        ((2048, 2048), 1, (2048, 2048)),
        ((1000, 1500), 1, (992, 1488)),  # the pipeline pads it to 1008 x 1504
        ((4096, 4096), 1, (2048, 2048)),
        ((2048, 2048), 2, (1024, 1024)),
    ],
)
def test_references_have_the_pipelines_sizes_but_for_its_padding(sides, count, size):
    assert reference_size(*sides, count) == size
