"""Z-Image against every suite of the core, the recording of its official code, and diffusers:
outputs, every gradient, samples, adapters."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_core.models.spec import SampleDefaults, lazy
from ditkit_core.nn.rope import timestep_features
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import compose
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_diffusers import (
    FILES,
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
from ditkit_core.testing.conformance_routing import RoutingChecks
from ditkit_core.testing.conformance_sharded import EverySharded, Limits, ShardedConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.plans import divided, step_of
from ditkit_core.testing.replicas import Divided
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.stream_faults import StreamFaultChecks
from ditkit_core.testing.world import make_model
from ditkit_zimage.demo.write import write_checkpoint
from ditkit_zimage.model import ZImageTransformer, make_inputs
from ditkit_zimage.presets import PRESETS, ZImageArch, arch_from_config
from ditkit_zimage.spec import VAE, ZIMAGE
from ditkit_zimage.state_dict import to_official
from ditkit_zimage.verify import DIFFUSERS

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent / "golden" / "zimage_fp32.safetensors"
ARCH = ZImageArch(
    dim=64, heads=2, layers=2, refiner_layers=1, text_dim=12, in_channels=4, axes=(8, 12, 12)
)
GRIDS, CAPTIONS = [(8, 10), (12, 14), (10, 8)], (20, 40, 25)
"""Latent pixels, and rows of captions, of three samples."""


def items(count: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    sizes = [
        (GRIDS[i % 3 if ragged else 0], CAPTIONS[i % 3 if ragged else 0]) for i in range(count)
    ]
    return [
        {
            "latents": torch.randn(4, 1, *grid, generator=random),
            "text": torch.randn(rows, 12, generator=random),
        }
        for grid, rows in sizes
    ]


class Images:
    spec = ZIMAGE
    arch = ARCH

    def items(self, count, ragged=False):
        return items(count, ragged)


class TestConformance(Images, Conformance):
    learning_rate = 3e-3


class TestRoutedRefiners(Images, RoutingChecks):
    """With a refiner of each kind where tokens skip blocks: those of the image have a mask of their
    own."""

    arch = replace(ARCH, refiner_layers=2)


class TestPeers(Images, PeerChecks):
    diffusers = DIFFUSERS

    @pytest.fixture(autouse=True)
    def exact(self, monkeypatch):
        """diffusers' own sinusoid is off by more than two orders of summation."""
        exact_sinusoid(monkeypatch, torch.float32)


class TestAudit(Images, AuditChecks):
    """Errors by place; the toy's are all daily."""


class TestKeptBytes(KeptBytesConformance):
    spec = ZIMAGE
    arch = replace(ARCH, layers=3, refiner_layers=2)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (64, 96, 96)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 1-3=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


class TestPlan(FullSizePlanConformance):
    spec = ZIMAGE
    preset = "base"
    size = (1, 1024, 1024)
    cut = 18


@pytest.mark.slow
def test_planned_memory_is_what_the_readme_says():
    """Each row of the table has the settings of the rows above it."""
    arch, attention = PRESETS["base"], ZIMAGE.adapters.targets["attention"]
    fast = PrecisionConfig(preset="fast").precision(torch.bfloat16, {})
    layers = [next(iter(ZIMAGE.adapters.targets.values()))] * 2 + [attention] * 2
    planned = []
    for targets, precision, rows in zip(
        layers,
        (Precision(matmul=torch.bfloat16), fast, fast, fast),
        (512,) * 3 + (64,),
        strict=True,
    ):
        job = step_of(ZIMAGE, arch, (1, 1024, 1024), AdapterConfig(rank=16, targets=targets))
        item = {
            name: x[:rows] if name.startswith("text") else x for name, x in job.batch[0].items()
        }
        job = replace(job, batch=[item]).with_execution(
            checkpointing="full", kernels="triton", precision=precision
        )
        stages = profile(job)
        budget = parse_gpus("h100")[0].budget
        (plan,) = compose(
            stages, divided(len(stages.blocks), ()), (budget,), replace(job.work, cuda_graphs="off")
        )
        planned.append(f"{plan.peak / 2**30:.1f}")
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert planned == re.findall(r"^\| [^|]+ \| ([\d.]+) \| ", page, re.MULTILINE)[-4:]


class TestSplit(FullSizeSplitConformance):
    spec = ZIMAGE
    preset = "base"
    size = (1, 1024, 1024)
    few: ClassVar = {"layers": 2, "refiner_layers": 3}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 184e6  # no more than a block

    def crossing(self, arch, cut):
        """Two streams, time, rotary table; after the join one stream. One image has no masks.
        Adapters are behind the streams that a refiner ran on."""
        if cut > 2 * arch.refiner_layers:
            return 3, 1
        return 4, 1 if cut <= arch.refiner_layers else 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(ZIMAGE, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = ZIMAGE
    num_samples = range(2, 100)
    trained = "diffusion_model.layers.0.attention.to_q.lora_A.weight"
    trained_names = r"diffusion_model\.(layers|noise_refiner|context_refiner)\."
    daily = slice(1, None, 2)
    levers = (("--adapter.targets", '["modulation"]', "--adapter.alpha", "3"),)


class TestBase(TrainedBaseChecks):
    spec = ZIMAGE
    vae = VAE
    text_encoder = "Qwen3ForCausalLM"
    layers = (1, 2)


class TestStreamOrder(Images, StreamFaultChecks):
    """Faults in the order of streams are found."""


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestConformance)


# and not with those of ranks, which each change waits for: the interpreter takes minutes
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block of each kind, and images of a few tokens."""

    arch = replace(ARCH, layers=1)
    cases = ("brief lora on nf4", "brief full", "brief full, split")


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(Images, ReplicaConformance):
    """Two ranks as replicas."""


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
    # all weights with shared tokens: averages of gradients 1.9e-5, weights 8e-7
    exact = Limits(1e-5, 4e-5, 1e-4)


class TestEverySharded(Images, EverySharded):
    """Every case in every world."""


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample, under some policies: those of the refiners by
    themselves."""

    four: ClassVar = replace(ARCH, layers=1, heads=4, axes=(4, 6, 6))
    subjects: ClassVar = {
        "odd": Subject(ZIMAGE, four, items(1), 3),
        "ragged": Subject(ZIMAGE, four, items(3, ragged=True), 3),
        "two heads": Subject(ZIMAGE, replace(ARCH, layers=1), items(2, ragged=True), 3),
    }


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextConformance):
    scope = "all"
    subjects = TestContext.subjects
    under_every_policy = ("ragged", "two heads")


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_zimage.train"


# The recording of the official code


def test_outputs_and_every_gradient_are_those_of_the_official_code():
    """Bars: 2e-5 and 8e-5, because the recording's own sinusoid in fp32 is 1.1e-5 off an fp64
    run."""
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    weights = {
        key.removeprefix("sd."): tensor for key, tensor in tensors.items() if key.startswith("sd.")
    }
    ours = ZImageTransformer(arch_from_config(config, {}), Precision(matmul=torch.float32))
    ours.load_state_dict(TestDiffusers().native(weights))
    latents, text = (
        [tensors[f"in.{name}.{i}"].requires_grad_() for i in range(2)]
        for name in ("x", "cap_feats")
    )
    inputs = make_inputs(
        latents,
        1 - tensors["in.t"].double(),
        [{"text": rows, "latents": x} for rows, x in zip(text, latents, strict=True)],
        1.0,
    )
    outputs = [-velocity for velocity in ours(inputs)]
    loss = torch.stack(
        [(out - tensors[f"in.target.{i}"]).square().mean() for i, out in enumerate(outputs)]
    ).mean()
    loss.backward()
    assert relative(loss, tensors["loss"]) < 2e-5
    for i in range(2):
        assert relative(outputs[i], tensors[f"out.{i}"]) < 2e-5
        assert relative(latents[i].grad, tensors[f"gi.x.{i}"]) < 8e-5
        assert relative(text[i].grad, tensors[f"gi.cap_feats.{i}"]) < 8e-5
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, tensors[f"gp.{to_official(name)[0].name}"]) < 8e-5, name


class TestDiffusers(Images, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = dict.fromkeys(PRESETS, 6_154_908_736)
    nearer = 0.8
    converter = (
        "comfyui",
        lazy(
            "diffusers.loaders.single_file_utils:convert_z_image_transformer_checkpoint_to_diffusers"
        ),
    )
    targets: ClassVar = {
        "layers of every kind": (
            "attention.to_q",
            "feed_forward.w2",
            "adaLN_modulation.0",
            "embed.x_embedder",
            "head.linear",
            "head.adaLN_modulation.1",
            "embed.cap_embedder.1",
            "embed.t_embedder.mlp.2",
        ),
        "a layer that ComfyUI renames": ("attention.to_out.0",),
    }
    files: ClassVar = FILES | {
        "ComfyUI's own": (
            "official",
            lambda name: name.replace("attention.to_out.0", "attention.out"),
        )
    }

    def exact(self, patch, dtype):
        exact_sinusoid(patch, dtype)

    def run_theirs(self, model, items, sigma):
        """All samples at once, as diffusers takes them here."""
        latents, text = ([item[name] for item in items] for name in ("latents", "text"))
        return [-out for out in model(latents, 1 - sigma, text, return_dict=False)[0]]

    def arch_in_files(self, arch):
        """No file says that it is distilled."""
        return replace(arch, distilled=False)

    def test_comfyui_has_q_k_and_v_in_one_tensor(self):
        state = dict(make_model(ZIMAGE, ARCH).named_parameters())
        comfyui = self.in_form("comfyui", state)
        assert "layers.1.attention.qkv.weight" in comfyui
        assert "final_layer.adaLN_modulation.1.bias" in comfyui

    @pytest.mark.parametrize("factors", [{}, {"rank_pattern": ("*=10000",)}])
    @pytest.mark.parametrize("form", ["official", "diffusers", "musubi"])
    @pytest.mark.parametrize("alpha", [False, True])
    def test_rules_of_a_lokr_are_what_diffusers_loader_does(self, tmp_path, form, factors, alpha):
        """Alpha counts in it as here: over the rank of a low-rank factor, and not at all if both
        are whole."""
        from diffusers import ZImagePipeline

        config = AdapterConfig(
            rank=3, alpha=6.0, targets=("attention.to_q",), method="lokr", decompose_factor=4,
            **factors,
        )  # fmt: skip
        model = make_model(ZIMAGE, ARCH, adapter=config).eval()
        file = self.adapter_file(model, tmp_path, form)
        if alpha and form != "musubi":
            tensors = load_file(file)
            for stem in {name.rpartition(".lokr_")[0] for name in tensors}:
                low = tensors.get(f"{stem}.lokr_w2_a")
                # as large as the rank: the file means the same
                tensors[f"{stem}.alpha"] = torch.tensor(9.0 if low is None else float(low.shape[1]))
            save_file(tensors, file)
        rule = self.rule(file, model)
        theirs, inputs = DIFFUSERS.transformer(model), DIFFUSERS.inputs(model)
        with torch.no_grad():
            before, ours = DIFFUSERS.run(theirs, inputs), model(inputs)[0]
        try:
            ZImagePipeline(None, None, None, None, theirs).load_lora_weights(file)
            with torch.no_grad():
                loads = relative(DIFFUSERS.run(theirs, inputs), ours) < 1e-5
        except ValueError:
            loads = False
        assert loads == (rule == ""), rule
        assert relative(before, ours) > 1e-6


def exact_sinusoid(patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from diffusers.models.transformers.transformer_z_image import TimestepEmbedder

    patch.setattr(
        TimestepEmbedder,
        "timestep_embedding",
        staticmethod(lambda t, dim, **_: timestep_features(t.double(), dim).to(dtype)),
    )


# Captions, samples


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


def test_features_of_captions_are_those_of_the_pipeline(checkpoint):
    """The tokenizer's own chat template, which the pipeline renders, says what our encoder writes
    out."""
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(
        checkpoint, local_files_only=True, transformer=None, vae=None
    )
    encoder = ZIMAGE.auxiliary.text_encoder(
        ModelPaths(base=str(checkpoint)), CPU, torch.float32, "never"
    )
    encoder.load()
    captions = ["a red circle", "", "a long one, " * 200]
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False)
    for caption, expected in zip(captions, theirs, strict=True):
        (ours,) = encoder.encode([caption])
        assert ours["text"].shape == expected.shape and len(expected) <= 512
        # fp32; kernels sum in another order
        torch.testing.assert_close(ours["text"], expected, rtol=1e-4, atol=1e-4)
    assert len(theirs[2]) == 512


@pytest.mark.parametrize(("kind", "guidance"), [("base", 4.0), ("base", 1.0), ("turbo", 4.0)])
def test_every_step_of_a_sample_is_that_of_the_pipeline(checkpoint, kind, guidance):
    """The pipeline counts guidance from 0; Turbo has none."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline

    arch = replace(ARCH, in_channels=16, distilled=kind == "turbo")
    model, random = make_model(ZIMAGE, arch).eval(), torch.Generator().manual_seed(2)
    prompt, negative = ({"text": torch.randn(rows, 12, generator=random)} for rows in (40, 5))
    job = GenerationRequest(
        conditions=prompt, negative=negative, frames=1, height=48, width=64, steps=3,
        guidance=guidance, shift=0.0, seed=7
    )  # fmt: skip
    ours = sample_steps(ZIMAGE, model, ModelPaths(base=str(checkpoint)), job)
    calls = 2 if (kind, guidance) == ("base", 4.0) else 1
    vae = AutoencoderKL.from_pretrained(checkpoint / "vae", local_files_only=True)
    pipeline = ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), vae, None, None, DIFFUSERS.transformer(model)
    )
    pipeline.set_progress_bar_config(disable=True)
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(values["latents"][0][:, None])
        return values

    noise = first_noise(job, (16, 1, 6, 8))
    image = pipeline(
        prompt_embeds=[prompt["text"]], negative_prompt_embeds=[negative["text"]], height=48,
        width=64,
        num_inference_steps=3, guidance_scale=guidance - 1 if kind == "base" else 0.0,
        latents=noise[:, 0][None],
        callback_on_step_end=keep, output_type="pt",
    ).images[0]  # fmt: skip
    assert len(after) == 3
    check_steps(ours, after, calls=calls)
    pixels = ours.sampler.decoder.decode(ours.latents)[:, 0]
    torch.testing.assert_close(pixels, image, atol=2e-4, rtol=0)


def test_a_transformer_in_scaled_8_bits_has_the_names_that_keep_their_scales(tmp_path):
    """ComfyUI renames official names and leaves their scales behind. One scale then is for q, k and
    v."""
    model = make_model(ZIMAGE, ARCH, dtype=torch.bfloat16).eval()
    (folder,) = export_merged(
        model, ZIMAGE, tmp_path, ExportConfig(dtype="fp8_scaled", merged=True), metadata={}
    )
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    scales = {
        name.removesuffix(".scale_weight") for name in state if name.endswith(".scale_weight")
    }
    ends = {name.partition(".")[2].partition(".")[2] for name in scales}
    assert (
        ends == {"attention.qkv", "attention.out", *(f"feed_forward.w{i}" for i in (1, 2, 3))}
        and len(scales) == 4 * 5
    )
    q, k, v = (
        model.layers[0].attention.get_submodule(f"to_{part}").weight.detach().float()
        for part in "qkv"
    )
    codes, scale = (
        state[f"layers.0.attention.qkv.{leaf}"].float() for leaf in ("weight", "scale_weight")
    )
    assert relative(codes * scale, torch.cat([q, k, v])) < 0.05


class TestRunFiles(RunFileChecks):
    spec = ZIMAGE
    folder = Path(__file__).parents[1] / "configs"
    count = 3

    def check(self, config):
        """Turbo is trained next to an assistant, the base without one and with empty captions,
        which its guidance needs."""
        distilled = config.model.preset == "turbo"
        assert bool(config.base.assistant) == distilled
        assert config.train.caption_dropout == (0 if distilled else 0.1)


def test_turbo_is_advised_against_and_the_base_is_not():
    assert 'model.preset = "base"' in ZIMAGE.training.advice(PRESETS["turbo"])
    assert ZIMAGE.training.advice(PRESETS["base"]) == ""
    assert ZIMAGE.auxiliary.sample_defaults(PRESETS["turbo"]) == SampleDefaults(
        steps=8, guidance=1.0, guided_by="nothing"
    )
