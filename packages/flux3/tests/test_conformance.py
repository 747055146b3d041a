"""FLUX.3 against every suite of the core, and diffusers: outputs, every gradient, samples,
adapters."""

from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from einops import rearrange
from PIL import Image
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.errors import UserError
from ditkit_core.families.euler import NEXT_SIGMA
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.models.encoders import WHOLE, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import PrecisionConfig
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
from ditkit_core.testing.conformance_diffusers import (
    SIGMA,
    Comparison,
    DiffusersChecks,
    check_steps,
    first_noise,
    relative,
    sample_steps,
)
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
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.stream_faults import StreamFaultChecks
from ditkit_core.testing.world import make_model
from ditkit_flux3.demo.write import write_checkpoint
from ditkit_flux3.model import Flux3Transformer, make_inputs
from ditkit_flux3.presets import PRESETS, Flux3Arch, arch_from_config
from ditkit_flux3.spec import FLUX3, TEXT, VAE, reference_size
from ditkit_flux3.state_dict import to_native
from ditkit_flux3.verify import DIFFUSERS

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
    arch = replace(ARCH, tower_layers=2, layers=1)
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
    num_samples = range(2, 100)
    trained = "diffusion_model.single_blocks.0.q_proj.lora_A.weight"
    trained_names = r"diffusion_model\.(txt_mode_blocks|content_mode_blocks|single_blocks)\."
    daily = slice(0, None, 2)
    levers = (("--adapter.targets", '["modulation"]', "--export.forms", '["diffusers"]'),)


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

    four: ClassVar = replace(ARCH, layers=1, heads=4, axes=(4, 4, 4, 4))
    subjects: ClassVar = {
        "odd": Subject(FLUX3, four, samples(0), 4),
        "text to image": Subject(FLUX3, four, samples(0, grids=NONE), 3),
        "ragged": Subject(FLUX3, four, samples(0, 1, 2, grids=SOME), 4),
        "two heads": Subject(FLUX3, replace(ARCH, layers=1), samples(0, 1), 4),
    }


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextConformance):
    scope = "all"
    subjects = TestContext.subjects
    under_every_policy = ("ragged", "two heads")


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_flux3.train"


# diffusers


class TestDiffusers(Images, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = {"klein-base": 5_538_458_368, "klein": 5_548_681_984}
    idle = (NEXT_SIGMA,)
    nearer = 0.8
    nearer_cases = ("references",)
    targets: ClassVar = {
        "blocks": ("q_proj", "k_proj", "v_proj", "attn_out", "mlp_in", "mlp_out"),
        "outside": (
            "embed.txt_in",
            "emb_in.image",
            "emb_in.image_cond",
            "time_in.in_layer",
            "head.linear",
            "early_stream_modulations.txt.lin",
            "single_stream_modulations.image_cond.lin",
            "head.adaLN_modulation.1",
        ),
    }

    def cases(self):
        batches = {
            "text alone": ((0,), NONE),
            "references": ((0,), GRIDS),
            "alike": ((0, 0), NONE),
            "of several sizes": ((0, 1, 2), GRIDS),
            "some references": ((0, 1, 2), SOME),
        }
        archs = {"": ARCH, ", flow map": replace(ARCH, flow_map=True)}
        return {
            f"{name}{kind}": Comparison(
                [
                    item | {NEXT_SIGMA: torch.tensor(target, dtype=torch.float64)}
                    for item, target in zip(samples(*chosen, grids=grids), TARGET, strict=False)
                ],
                arch,
                SomeReferences.idle if grids is NONE else (),
            )
            for kind, arch in archs.items()
            for name, (chosen, grids) in batches.items()
        }

    def exact(self, patch, dtype):
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

        patch.setattr(theirs.Timesteps, "forward", sinusoid)
        patch.setattr(theirs.Flux3PosEmbed, "forward", tables)

    def class_arguments(self, arch):
        return {"flow_map": arch.flow_map}

    def is_loaded(self, kind, targets, alpha):
        return (kind == "diffusers" or (kind, targets) == ("official", "blocks")) and not alpha

    def test_the_reference_preset_rounds_where_diffusers_does(self):
        """diffusers' roundings in bf16, place by place: what is left is the order of summation, a
        tenth of what they cost."""
        theirs = self.diffusers_model(ARCH)
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exact, preset = (
            self.our_model(theirs, ARCH, torch.float64),
            PrecisionConfig(preset="reference"),
        )
        ours = Flux3Transformer(ARCH, preset.precision(torch.bfloat16, FLUX3.precision.reference))
        ours.load_state_dict(self.native(theirs.state_dict()))
        for model, norms in ((ours, "_norm."), (theirs, ".norm_")):
            for name, parameter in model.named_parameters():
                parameter.data = parameter.data if norms in name else parameter.data.bfloat16()
        items, sigma = samples(0, dtype=torch.bfloat16), torch.tensor(SIGMA[:1]).double()
        wide = [{name: x.double() for name, x in item.items()} for item in items]
        with torch.no_grad():
            (truth,), (mine,) = (
                self.run_ours(exact, wide, sigma), self.run_ours(ours, items, sigma)
            )  # fmt: skip
            (them,) = self.run_theirs(theirs, items, sigma)
        assert relative(mine, them) < 0.1 * relative(them, truth)

    @pytest.mark.parametrize("flow_map", [False, True])
    def test_official_files_are_without_heads_of_the_authors_training(self, flow_map):
        model = make_model(FLUX3, replace(ARCH, flow_map=flow_map))
        official = self.in_form("official", dict(model.named_parameters()))
        assert "final_layer.image.adaLN_modulation.1.weight" in official
        assert ("ref_time_in.in_layer.weight" in official) == flow_map
        head = {"repa_projectors.0.weight": torch.zeros(1)}
        converted = DIFFUSERS.convert({name: x.detach() for name, x in official.items()} | head)
        assert (
            converted.keys()
            == self.diffusers_model(replace(ARCH, flow_map=flow_map)).state_dict().keys()
        )
        assert to_native("repa_projectors.0.weight") == ()
        assert to_native("single_blocks.*.x") is None

    @pytest.mark.parametrize("form", ["official", "diffusers"])
    def test_the_rule_for_keys_of_alpha_names_them(self, tmp_path, form):
        model = self.adapted_model("blocks")
        file = self.adapter_file(model, tmp_path, form)
        tensors = load_file(file)
        stems = {name.rpartition(".lora_")[0] for name in tensors}
        save_file(tensors | {f"{stem}.alpha": torch.tensor(3.0) for stem in stems}, file)
        assert "rejects keys of alpha" in self.rule(file, model)

    @pytest.mark.parametrize("form", ["official", "diffusers"])
    def test_diffusers_has_no_reader_of_a_lokr(self, tmp_path, form):
        from diffusers import Flux3DistilledModularPipeline

        adapter = AdapterConfig(targets=("q_proj",), method="lokr", decompose_factor=4)
        model = make_model(FLUX3, ARCH, adapter=adapter).eval()
        file = self.adapter_file(model, tmp_path, form)
        assert "no reader of LoKr" in self.rule(file, model)
        pipeline = Flux3DistilledModularPipeline()
        pipeline.update_components(transformer=DIFFUSERS.transformer(model))
        with pytest.raises(ValueError, match="Invalid LoRA"):
            pipeline.load_lora_weights(file)


TARGET = (0.5, 0.125, 0.0)
"""Noise levels that a flow map is to jump to."""


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


def test_another_configuration_is_refused():
    config = DIFFUSERS.config(ARCH)
    with pytest.raises(ValueError, match="cond_in_channels 5"):
        arch_from_config(config | {"cond_in_channels": 5}, {})
    with pytest.raises(ValueError, match="do not add up"):
        arch_from_config(config | {"axes_dims_rope": (8, 8)}, {})
    with pytest.raises(KeyError):
        arch_from_config({"num_attention_heads": 2, "in_channels": 4}, {})


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


MOST = 410
"""Tokens of the longest captions here, in place of 8192: no multiple of the window's 80 either."""
PROMPTS = {"": 80, "a red circle": 80, "a red circle, " * 20: 160, "a blue square " * 300: MOST}


@pytest.mark.parametrize("prompt", PROMPTS, ids=[str(rows) for rows in range(4)])
def test_features_of_captions_are_those_of_the_pipeline(checkpoint, language_model, prompt):
    """Bitwise: eight hidden layers side by side, the window, its padding and where that is. All
    rows of padding are one."""
    from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

    embed = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    assert signature(embed).parameters["max_sequence_length"].default == TEXT.num_tokens == 8192
    with torch.no_grad():
        (expected,) = embed(language_model, Processor(checkpoint), prompt, max_sequence_length=MOST)
    encoding, paths = replace(TEXT, num_tokens=MOST), ModelPaths(base=str(checkpoint))
    encoder = LanguageModelEncoder(encoding, paths, CPU, torch.float32, "never")
    encoder.load()
    (ours,) = encoder.encode([prompt])
    assert ours["text"].shape == (PROMPTS[prompt], 8 * 32) and encoder.width == 8 * 32
    assert torch.equal(ours["text"], expected)
    assert bool(encoder.truncated) == (PROMPTS[prompt] == MOST)


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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            # each of these with references is in another case
            marks=[pytest.mark.slow] * (case in ("guided", "flow map")),
        )
        for case in CASES
    ],
)
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
    vae = FLUX3.auxiliary.media_encoder(paths, CPU, WHOLE)
    vae.load()
    references = [vae.encode([image / 127.5 - 1])[0]["latents"] for image in pixels]
    job = GenerationRequest(
        conditions=prompt, negative=negative, references=references, frames=1, height=48, width=64,
        steps=3, guidance=guidance, shift=0.0, seed=7,
    )  # fmt: skip
    ours = sample_steps(FLUX3, model, paths, job)
    images = [Image.fromarray(x[:, 0].permute(1, 2, 0).byte().numpy()) for x in pixels]
    image = None if not images else images[0] if count == 1 else images
    noise = first_noise(job, (64, 1, 3, 4))
    before, after, expected = run_pipeline(
        arch, model, checkpoint, language_model, guidance, image, noise[:, 0][None], prompts
    )
    calls = 2 if "guided" in case.split() else 1
    assert len(before) == 3 * calls
    steps = [rearrange(rows, "1 (h w) c -> c 1 h w", h=3) for rows in before[calls::calls]]
    steps.append(after[0][:, None])
    check_steps(ours, steps, calls=calls)
    decoded = ours.sampler.decoder.decode(ours.latents)[:, 0]
    torch.testing.assert_close(decoded, expected, atol=2e-4, rtol=0)


# Run files


class TestRunFiles(RunFileChecks):
    spec = FLUX3
    folder = Path(__file__).parents[1] / "configs"
    count = 3

    def check(self, config):
        assert config.model.preset in ("", "klein-base") and config.train.caption_dropout == 0.1


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
