"""FLUX.2 against every suite of the core: the seam, plans, audits, kernels, ranks, and levers of
other trainers."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from flux2_items import Images

from ditkit_core.models.precision import Precision, set_precision
from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_diffusers import FILES, Comparison, DiffusersChecks, relative
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_ranks import FewRanks, RanksConformance
from ditkit_core.testing.conformance_replicas import EveryReplica, ReplicaConformance
from ditkit_core.testing.conformance_sharded import EverySharded, ShardedConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.replicas import Divided
from ditkit_core.testing.stream_faults import StreamFaultChecks
from ditkit_core.testing.world import make_model
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.verify import DIFFUSERS


class TestEditing(Images, Conformance):
    last_layers = ("txt_mlp.2", "img_mlp.2", "linear2")


class TestTextToImage(Images, CoreChecks):
    """Levers do not see whether there are references, and few checks see more than that."""

    one_in = 23
    grids = ([(2, 3)], [(2, 5)], [(3, 2)])


class TestStreamOrder(Images, StreamFaultChecks):
    """Faults in the order of streams are found."""

    arch = replace(Images.arch, double_layers=3, single_layers=3)


class TestPeers(Images, PeerChecks):
    """Levers of other trainers, in diffusers' transformer: a mask, the base's own prediction, an
    assistant."""

    diffusers = DIFFUSERS
    daily = "dora"


BLOCKS = ("*.q", "*.k", "*.v", "*.linear1", "*.linear2", "*.proj", "*_mlp.0")


class TestDiffusers(Images, DiffusersChecks):
    """With an embedding of guidance and without; samples with no reference, one, or two."""

    diffusers = DIFFUSERS
    parameters: ClassVar = {
        "dev": 32_223_281_152,
        "klein-9b": 9_078_581_248,
        "klein-base-9b": 9_078_581_248,
        "klein-4b": 3_875_544_576,
        "klein-base-4b": 3_875_544_576,
    }
    targets: ClassVar = {
        "blocks": BLOCKS,
        "outside": (
            *("embed.img_in", "embed.txt_in", "embed.time_in.in_layer", "head.linear"),
            *("embed.guidance_in.in_layer", "embed.double_stream_modulation_img.lin"),
        ),
        "head's modulation": (*BLOCKS, "head.adaLN_modulation.1"),
    }
    files: ClassVar = FILES | {"a model's prefix": ("official", lambda name: f"model.{name}")}
    nearer_cases = ("dev, ragged", "klein, ragged")

    def cases(self):
        alike, ragged = self.items(2), self.items(3, ragged=True)
        none = [{name: x for name, x in ragged[0].items() if not name.startswith("reference")}]
        batches = {"none": none, "two": alike, "ragged": none + ragged[1:]}
        return {
            f"{kind}, {name}": Comparison(items, replace(self.arch, guidance=kind == "dev"))
            for kind in ("dev", "klein")
            for name, items in batches.items()
        }

    def exact(self, patch, dtype):
        from diffusers.models.embeddings import Timesteps

        def sinusoid(self, timesteps):
            return timestep_features(timesteps.double(), self.num_channels).to(dtype)

        patch.setattr(Timesteps, "forward", sinusoid)

    def class_arguments(self, arch):
        return {
            "num_layers": arch.double_layers,
            "num_single_layers": arch.single_layers,
            "num_attention_heads": arch.heads,
            "joint_attention_dim": arch.text_dim,
            "guidance_embeds": arch.guidance,
        }

    def index(self, arch):
        return {"is_distilled": arch.distilled}

    def _inputs(self, items, sigma):
        """Each sample has a strength of guidance of its own."""
        return super()._inputs(items, sigma)._replace(guidance=1 + 4 * sigma)

    @pytest.mark.parametrize("guidance", [True, False])
    def test_fp32_is_nearer_to_fp64_than_diffusers_as_it_is(self, guidance):
        """With its own sinusoid, which is fp32 from 1000 · t rounded to fp32: that alone moves its
        gradients by up to 6e-5. Values that bf16 can hold, so that all three get the same."""
        arch = replace(self.arch, guidance=guidance)
        items = [{name: x.bfloat16() for name, x in item.items()} for item in self.items(2)]
        theirs = self.diffusers_model(arch)
        exact, ours, diffusers = (
            self.outcome(model, run, items, dtype)["output 0"]
            for model, run, dtype in (
                (self.our_model(theirs, arch, torch.float64), self.run_ours, torch.float64),
                (self.our_model(theirs, arch, torch.float32), self.run_ours, torch.float32),
                (theirs, self.run_theirs, torch.float32),
            )
        )
        assert relative(ours, exact) < min(1e-6, relative(diffusers, exact))

    def test_in_bf16_reference_is_nearer_to_diffusers_than_default(self):
        """Its bf16 run rounds in the same places as the official code but for the norms of q and k,
        and the timestep is rounded alike."""
        theirs, sigma = self.diffusers_model(self.arch).bfloat16(), torch.tensor([0.7313, 0.2517])
        ours = self.our_model(theirs, self.arch, torch.bfloat16)
        items = [{name: x.bfloat16() for name, x in item.items()} for item in self.items(2)]

        def error(precision):
            set_precision(ours, precision)
            return relative(torch.stack(self.run_ours(ours, items, sigma.double())), target)

        with torch.no_grad():
            target = torch.stack(self.run_theirs(theirs, items, sigma.double()))
            reference = dict.fromkeys(FLUX2.precision.reference, torch.bfloat16)
            assert error(Precision(**reference)) < 0.5 * error(Precision())

    def test_a_model_that_embeds_guidance_will_not_do_without(self):
        inputs = self.inputs(self.items(1))._replace(guidance=None)
        with pytest.raises(AssertionError, match="guidance"):
            make_model(self.spec, self.arch)(inputs)


class TestAudit(Images, AuditChecks):
    """Errors by place; the toy's are all daily."""


class TestKeptBytes(KeptBytesConformance):
    spec = FLUX2
    arch = replace(Images.arch, double_layers=2, single_layers=3)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (64, 64, 64, 64)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 1-3=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


class TestPlan(FullSizePlanConformance):
    spec = FLUX2
    preset = "dev"
    size = (1, 1024, 1024)
    cut = 18


@pytest.mark.slow  # half a minute for each class
def test_kernels_compute_what_torch_computes_under_every_policy() -> None:
    check_kernels(TestTextToImage)


# and not with those of ranks, which each change waits for: the interpreter takes two minutes
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block of each kind, and images of two tokens and of three, one with a reference."""

    arch = replace(Images.arch, single_layers=1, text_tokens=2)
    cases = ("brief lora on nf4", "brief full", "brief full, split")
    more = ("gated_unit", "gated_unit_backward")

    def items(self, count, ragged=False):
        return samples([(1, 2)], [(1, 3), (1, 1)], arch=self.arch)


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


class TestEverySharded(Images, EverySharded):
    """Every case in every world."""


def samples(*grids, arch=Images.arch):
    """Images with these rows and columns, each with those of its references."""
    random = torch.Generator().manual_seed(0)
    names = ("latents", "reference.0", "reference.1")
    return [
        {
            name: torch.randn(arch.in_channels, 1, *grid, generator=random)
            for name, grid in zip(names, sample, strict=False)
        }
        | {"text": torch.randn(arch.text_tokens, 12, generator=random)}
        for sample in grids
    ]


FOUR = replace(Images.arch, heads=4, dim=64)


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample, under some policies."""

    subjects: ClassVar = {
        "even": Subject(FLUX2, FOUR, samples([(4, 5)]), 3),
        "odd": Subject(FLUX2, FOUR, samples([(3, 5)]), 3),
        "references": Subject(FLUX2, FOUR, samples([(3, 5), (2, 3)], [(3, 5), (2, 3)]), 3),
        "ragged": Subject(FLUX2, FOUR, samples(*Images.grids), 3),
        "two heads": Subject(FLUX2, Images.arch, samples(*Images.grids), 3),
    }


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextConformance):
    scope = "all"
    subjects = TestContext.subjects
    under_every_policy = ("references", "ragged", "two heads")
