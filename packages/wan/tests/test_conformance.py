"""Wan against every suite of the core: the seam, plans, audits, kernels, ranks, and levers of other
trainers.

Variants that need more than a few lines are in test_conformance_controls.py.
"""

import re
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from wan_items import SIZES, Clips, Images

from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_diffusers import (
    FILES,
    Comparison,
    DiffusersChecks,
    relative,
)
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
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
from ditkit_wan.model.carry import token_streams
from ditkit_wan.presets import PRESETS, WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS


class TestWan(Clips, Conformance):
    """Text to video."""


class TestImageToVideo(Images, Conformance):
    one_in = 23
    slow = True


class TestFirstAndLastFrame(Images, CoreChecks):
    """Only the embedding differs, which levers do not see."""

    one_in = 23
    arch = WanArch(**SIZES, in_channels=10, image_dim=14, image_positions=7)


class TestTextImageToVideo(Clips, Conformance):
    """Every other sample begins with a clean frame."""

    one_in = 23
    arch = WanArch(**SIZES, in_channels=4, token_times=True)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | ({} if index % 2 else {"first_frame": (4, 1, *grid)})


class TestVace(Clips, Conformance):
    """A stream next to the main one."""

    one_in = 23
    arch = WanArch(**SIZES | {"layers": 3}, in_channels=4, vace_layers=(0, 1), vace_channels=7)
    last_layers = ("ffn.2", "after_proj")
    added_as_they_are = ("after_proj",)
    num_streams = 2

    def sizes(self, index, grid):
        return super().sizes(index, grid) | {"vace": (7, 2, *grid)}


class TestStreamOrder(Clips, StreamFaultChecks):
    """Faults in the order of streams are found."""

    arch = replace(Clips.arch, layers=6)


PADDED = {"text": (SIZES["text_tokens"], 20)}
"""Captions as long as the model takes: its pipelines pad text, and its transformer in diffusers
does not."""


class TestPeers(Clips, PeerChecks):
    """Levers of other trainers, in diffusers' transformer: a mask, the base's own prediction, an
    assistant."""

    diffusers = DIFFUSERS

    def sizes(self, index, grid):
        return super().sizes(index, grid) | PADDED


ATTENTION = ("self_attn.q", "cross_attn.v")
BLOCKS = (*(f"{part}_attn.{x}" for part in ("self", "cross") for x in "qkvo"), "ffn.0", "ffn.2")
OUTSIDE = (
    *("embed.time_embedding.0", "embed.text_embedding.2", "embed.time_projection.1"),
    "head.head",
)


def with_their_modules(name):
    """Modules as diffusers names them, behind the official names of blocks."""
    name = name.replace("self_attn", "attn1").replace("cross_attn", "attn2")
    return re.sub(r"\.([qkv])\.", r".to_\1.", name.replace(".o.", ".to_out.0."))


class TestDiffusers(Clips, DiffusersChecks):
    """Widths of heads, and variants whose embedding or blocks differ. Names and parameters of all
    presets are test_presets.py's, which has those that diffusers lacks, too."""

    diffusers = DIFFUSERS
    targets: ClassVar = {
        "blocks": BLOCKS,
        "attention": ATTENTION,
        "outside": OUTSIDE,
        "attention and head": (*ATTENTION, "head.head"),
    }
    files: ClassVar = FILES | {
        "a model's prefix": ("official", lambda name: f"model.{name}"),
        "their modules": ("official", with_their_modules),
    }
    test_names_and_parameters_are_those_of_diffusers_at_full_size = None

    def sizes(self, index, grid):
        return super().sizes(index, grid) | PADDED

    def cases(self):
        clips, latents = self.items(2), (4, 2, 4, 6)
        widths = {
            f"heads of {width}": Comparison(clips, replace(self.arch, dim=2 * width))
            for width in (12, 16, 128)
        }
        # diffusers splits image tokens from exactly 512 rows of text
        long = SIZES | {"text_tokens": 512, "in_channels": 10}
        i2v, y = {"text": (512, 20), "y": (6, *latents[1:])}, {"y": (6, *latents[1:])}
        vace = SIZES | {"layers": 5, "in_channels": 4, "vace_channels": 7}
        variants = {
            "i2v": (WanArch(**long, image_dim=14), i2v | {"image": (257, 14)}),
            "flf2v": (
                WanArch(**long, image_dim=14, image_positions=6),
                i2v | {"image": (6, 14)},
            ),
            "i2v of two experts": (WanArch(**SIZES, in_channels=10), PADDED | y),
            # hints behind the first block and the last but one; others have none
            "vace": (
                WanArch(**vace, vace_layers=(0, 2, 3)),
                PADDED | {"vace": (7, *latents[1:])},
            ),
        }
        random = torch.Generator().manual_seed(1)
        return {
            **super().cases(),
            **widths,
            **{
                name: Comparison(
                    [
                        {
                            key: torch.randn(size, generator=random)
                            for key, size in ({"latents": latents} | sizes).items()
                        }
                        for _ in range(2)
                    ],
                    arch,
                )
                for name, (arch, sizes) in variants.items()
            },
        }

    def exact(self, patch, dtype):
        from diffusers.models.embeddings import Timesteps

        def sinusoid(self, timesteps):
            return timestep_features(timesteps.double(), self.num_channels).to(dtype)

        patch.setattr(Timesteps, "forward", sinusoid)

    def converters(self, arch):
        """diffusers' conversion leaves out the positions of two images."""
        return [] if arch.image_positions else super().converters(arch)


class OutcomesInDiffusers(TestDiffusers):
    """Of models whose names and roundings `TestDiffusers` has."""

    test_bf16_is_nearer_to_fp64_than_diffusers = None
    test_the_values_of_each_form_are_those_that_diffusers_converts = None
    test_rules_of_adapter_files_are_what_diffusers_loader_does = None
    test_a_dora_is_read_by_diffusers_in_its_own_names_alone = None


class TestTimesInDiffusers(OutcomesInDiffusers):
    """A time of each token, no two of a sample alike; what pads a sample changes nothing."""

    cases = DiffusersChecks.cases

    def times(self, sample, tokens):
        """Times of tokens, [sample, token], by that of each sample, [sample, 1]."""
        return sample - torch.arange(tokens)

    def _inputs(self, items, sigma):
        inputs = super()._inputs(items, sigma)
        tokens = max(item["latents"][0].numel() // 4 for item in items)
        return inputs._replace(timestep=self.times(inputs.timestep[:, None], tokens))

    def test_equal_times_of_all_tokens_are_the_time_of_the_sample(self):
        """fp64, 1e-12: sums over as many rows as tokens instead of one."""
        outcomes = []
        for times in (
            lambda sample, tokens: sample.expand(-1, tokens),
            lambda sample, _: sample[:, 0],
        ):
            self.times, model = times, make_model(self.spec, self.arch, dtype=torch.float64)
            outcomes.append(self.outcome(model, self.run_ours, self.items(2), torch.float64))
        tokens, sample = outcomes
        assert max(relative(tokens[name], sample[name]) for name in sample) < 1e-12


class TestFirstFramesInDiffusers(OutcomesInDiffusers):
    """Clean first frames, against what diffusers' image-to-video pipeline makes of them."""

    arch = WanArch(**SIZES, in_channels=4, token_times=True)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | ({} if index % 2 else {"first_frame": (4, 1, *grid)})

    def cases(self):
        return {**DiffusersChecks.cases(self), "none": Comparison(self.items(2)[1:])}

    def run_theirs(self, model, items, sigma):
        """A mask that is 0 on a clean first frame, thinned to a token each: `expand_timesteps`."""
        outputs = []
        for item, noise in zip(items, sigma, strict=True):
            latents, clean = item["latents"][None], item.get("first_frame")
            mask = torch.ones_like(latents[:, :1])
            if clean is not None:
                mask[:, :, 0] = 0
                latents = (1 - mask) * clean + mask * latents
            times = (mask[:, 0, :, ::2, ::2].double() * 1000 * noise).flatten(1)
            outputs.append(model(latents, times, item["text"][None], return_dict=False)[0][0])
        return outputs


class TestAudit(Clips, AuditChecks):
    """Errors by place; the toy's are all daily."""


class TestKeptBytes(KeptBytesConformance):
    spec = WAN
    arch = replace(Clips.arch, layers=4)
    size = (5, 128, 128)
    wider: ClassVar = {"dim": 576, "ffn_dim": 576}
    larger = (13, 256, 256)
    daily = ("attn_only(self)",)
    nightly = ("none", "full", "attn_only", "attn_only, 1-2=full")


class TestPlan(FullSizePlanConformance):
    spec = WAN
    preset = "t2v-14b"
    size = (49, 480, 832)
    cut = 13


class TestSplit(FullSizeSplitConformance):
    """Wan 14B at its published size, divided over two to four devices that refuse to mix, without
    memory."""

    spec = WAN
    preset = "t2v-14b"
    size = (81, 480, 832)
    few: ClassVar = {"layers": 4}
    all_blocks = ("attn_only", 4)
    most_apart = 2 * 352e6 * 1.01  # no more than a block

    def crossing(self, arch, cut):
        """Tokens, modulation, time, rotary table, text; of these the tokens alone come from an
        adapter."""
        return 5, 1


@pytest.mark.exhaustive  # half a minute for each class
def test_kernels_compute_what_torch_computes_under_every_policy() -> None:
    check_kernels(TestWan, TestVace)


# and not with those of ranks, which each change waits for: the interpreter takes two minutes
@pytest.mark.slow
class TestKernelRanks(KernelRanksConformance):
    """One block, and clips of four tokens and of three, an odd number for two ranks that share
    them."""

    spec = WAN
    arch = WanArch(**SIZES | {"layers": 1, "text_tokens": 3}, in_channels=4)
    cases = ("brief lora", "brief full", "brief full, stochastic")

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        return [
            {
                "latents": torch.randn(4, *grid, generator=random),
                "text": torch.randn(2, 20, generator=random),
            }
            for grid in ((1, 4, 4), (1, 2, 6))
        ]


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(Clips, ReplicaConformance):
    """Two ranks as replicas."""


@pytest.mark.exhaustive
class TestEveryReplicas(Clips, EveryReplica):
    """Every case on up to four ranks."""


@pytest.mark.ranks
@pytest.mark.slow
class TestFewRanks(Clips, FewRanks):
    """Two ranks: sharded, kept and recomputed."""


@pytest.mark.exhaustive
class TestRanks(Clips, RanksConformance):
    """Two ranks: sharded, under every policy."""


FOUR = SIZES | {"heads": 4}


def items(*grids, **more):
    """Clips of these frames, rows and columns of latents; `more` are channels of conditions of the
    same size."""
    random = torch.Generator().manual_seed(0)

    def item(index, grid):
        sizes = {"latents": (4, *grid), "text": (3 + index, 20)} | {
            name: (num, *grid) for name, num in more.items()
        }
        return {name: torch.randn(size, generator=random) for name, size in sizes.items()}

    return [item(index, grid) for index, grid in enumerate(grids)]


def clean_first(clips):
    """Every other clip with a given first frame."""
    return [
        clip | ({} if i % 2 else {"first_frame": clip["latents"][:, :1].clone()})
        for i, clip in enumerate(clips)
    ]


def with_reference(clips):
    return [clip | {"reference": torch.ones(16, 1, *clip["latents"].shape[2:])} for clip in clips]


def time_of_each_token(noised, sigma, given, guidance):
    inputs = WAN.training.make_inputs(noised, sigma, given, guidance)
    tokens = max(latents[0].numel() // 4 for latents in inputs.latents)
    return inputs._replace(timestep=inputs.timestep[:, None] * torch.linspace(0.5, 1, tokens))


EVEN, ODD, RAGGED = [(4, 4, 6)], [(3, 6, 6)], [(3, 6, 6), (2, 4, 10), (4, 4, 6)]
TIMES = replace(WAN, training=replace(WAN.training, make_inputs=time_of_each_token))
SUBJECTS = {
    "even": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*EVEN), 2),
    "odd": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*ODD), 2),
    "ragged": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*RAGGED), 2),
    "two heads": Subject(WAN, WanArch(**SIZES, in_channels=4), items(*RAGGED), 2),
    "clean first frame": Subject(
        WAN, WanArch(**FOUR, in_channels=4, token_times=True), clean_first(items(*RAGGED)), 2,
        gathers=2
    ),
    "time of each token": Subject(TIMES, WanArch(**FOUR, in_channels=4, token_times=True),
    items(*RAGGED), 2),
    "image": Subject(
        WAN, WanArch(**FOUR, in_channels=10, image_dim=14),
        [clip | {"image": torch.ones(7, 14)} for clip in items(*ODD, y=6)], 2,
    ),
    "vace": Subject(
        WAN, WanArch(**FOUR | {"layers": 3}, in_channels=4, vace_layers=(0, 1), vace_channels=7),
        items(*RAGGED, vace=7), 5,
    ),
    "reference": Subject(WAN, WanArch(**FOUR, in_channels=4, ref_conv=True),
    with_reference(items(*RAGGED)), 2),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample, under some policies."""

    subjects = SUBJECTS


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextConformance):
    scope = "all"
    subjects = SUBJECTS
    under_every_policy = ("ragged", "two heads", "vace")


def test_only_what_is_added_by_frame_cannot_be_shared():
    by_frame = {name for name, arch in PRESETS.items() if arch.music or arch.speech or arch.animate}
    assert len(by_frame) == 4
    streams = {name: token_streams(arch) for name, arch in PRESETS.items()}
    assert {
        name for name, declared in streams.items() if declared is None or declared.positions
    } == by_frame


BOTH = (Divided(4, 2, context=2),)
"""Where ranks divide the weights and share tokens, too."""


@pytest.mark.ranks
@pytest.mark.slow
class TestSharded(Clips, ShardedConformance):
    """On two ranks; groups of them, and more, are the toy's."""

    sharded = (Divided(2, 2), Divided(2, 2, context=2, few=("full",)))


@pytest.mark.exhaustive
class TestShardedTokens(Clips, ShardedConformance):
    """Every case where ranks also share tokens."""

    sharded = BOTH


class TestEverySharded(Clips, EverySharded):
    """Every case in every world."""


class ShardedVariant(ShardedConformance):
    """Ranks that also share tokens, of a subject."""

    sharded = BOTH
    cases = TestSharded.cases[:2]
    subject: ClassVar[str]

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.spec, cls.arch = SUBJECTS[cls.subject].spec, SUBJECTS[cls.subject].arch

    def items(self, count, ragged=False):
        return SUBJECTS[self.subject].items


@pytest.mark.exhaustive
class TestShardedVace(ShardedVariant):
    """Of both streams."""

    subject = "vace"


@pytest.mark.exhaustive
class TestShardedReference(ShardedVariant):
    """The tokens of the reference in front among them."""

    subject = "reference"


@pytest.mark.exhaustive
class TestShardedTimes(ShardedVariant):
    """Each token with a time of its own: what modulates the blocks is divided, too."""

    subject = "time of each token"
