"""The presets of WanToDance and the Fun models: counted on the authors' code, named as their files
are, sampled as their authors do."""

import math

import pytest
import torch

from ditkit_core.adapters.files.identify import parameters_of
from ditkit_core.adapters.inject import target_modules
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.tiling import Tiles
from ditkit_wan.encoders.keyframes import KeyframeVae, media_encoder
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import MUSIC_LAYERS, PRESETS
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import to_native, to_official

# Parameters and keys of `WanModel` in modelscope/DiffSynth-Studio, built on `meta` with its own
# configurations.
WITHOUT_DIFFUSERS = {
    "fun-v1.1-control-1.3b": (1_564_602_176, 985),
    "fun-v1.1-control-14b": (16_395_457_344, 1305),
    "fun-v1.1-control-camera-1.3b": (1_616_313_152, 989),
    "fun-v1.1-control-camera-14b": (16_898_128_704, 1309),
    "wantodance-14b": (17_245_198_464, 1424),
    "wantodance-14b-global": (17_245_198_464, 1424),
    "s2v-14b": (16_295_755_609, 1260),  # `WanModel_S2V` in Wan-Video/Wan2.2
    "fun-control-5b": (5_001_609_408, 827),
    "fun-control-camera-5b": (5_245_802_688, 831),
    "fun-control-a14b": (14_289_561_664, 1097),
    "fun-control-camera-a14b": (14_792_233_024, 1101),
}
# Of 2.2 and InP: the transformers in aigc-apps/VideoX-Fun, with the channels that its pipelines
# pass.
COUNTS = WITHOUT_DIFFUSERS | {
    "fun-v1.1-inp-1.3b": (1_564_428_608, 983),
    "fun-v1.1-inp-14b": (16_394_878_784, 1303),
    "fun-inp-5b": (5_000_426_688, 825),
    "fun-inp-a14b": (14_288_901_184, 1095),
    "vace-fun-a14b": (17_337_592_896, 1331),
    # `WanAnimateModel` in Wan-Video/Wan2.2, which has 14 kernels of blurs as well
    "animate-14b": (17_274_816_884, 1427),
}
BESIDE = {
    "fun-v1.1-control-14b": {"ref_conv.weight": (5120, 16, 2, 2)},
    "fun-v1.1-control-camera-1.3b": {
        "control_adapter.conv.weight": (1536, 1536, 2, 2),
        "control_adapter.residual_blocks.0.conv2.weight": (1536, 1536, 3, 3),
    },
    "fun-control-a14b": {"ref_conv.weight": (5120, 16, 2, 2), "patch_embedding.weight": (5120, 52,
    1, 2, 2)},
    "fun-control-5b": {"ref_conv.weight": (3072, 48, 2, 2), "patch_embedding.weight": (3072, 148, 1,
    2, 2)},
    "fun-control-camera-5b": {
        "control_adapter.conv.weight": (3072, 6144, 2, 2), "patch_embedding.weight": (3072, 100, 1,
        2, 2),
    },
    "vace-fun-a14b": {"vace_patch_embedding.weight": (5120, 96, 1, 2, 2)},
    "animate-14b": {
        "pose_patch_embedding.weight": (5120, 16, 1, 2, 2),
        "motion_encoder.dec.direction.weight": (512, 20),
        "motion_encoder.enc.net_app.convs.8.weight": (512, 512, 4, 4),
        "motion_encoder.enc.fc.4.weight": (20, 512),
        "motion_encoder.enc.net_app.convs.4.skip.1.weight": (512, 256, 1, 1),
        "face_encoder.conv1_local.conv.weight": (4096, 512, 3),
        "face_adapter.fuser_blocks.7.linear1_kv.weight": (10240, 5120),
        "face_adapter.fuser_blocks.0.q_norm.weight": (128,),
    },
    "s2v-14b": {
        "cond_encoder.weight": (5120, 16, 1, 2, 2), "frame_packer.proj_4x.weight": (5120, 16, 4, 8,
        8),
        "casual_audio_encoder.weights": (1, 25, 1, 1),
        "casual_audio_encoder.encoder.conv1_local.conv.weight": (5120, 1024, 3),
        "casual_audio_encoder.encoder.padding_tokens": (1, 1, 1, 5120),
        "trainable_cond_mask.weight": (3, 5120),
        "audio_injector.injector.11.norm_q.weight": (5120,),
        "audio_injector.injector_adain_layers.11.linear.weight": (10240, 5120),
    },
    "wantodance-14b": {
        "music_projection.weight": (256, 35), "music_encoder.1.self_attn.in_proj_weight": (768,
        256),
        "music_encoder.0.linear1.weight": (1024, 256), "music_injector.injector.7.q.weight": (5120,
        5120),
        "img_emb_refimage.proj.3.weight": (5120, 1280), "patch_embedding_global.weight": (5120, 36,
        1, 2, 2),
        "head_global.modulation": (1, 2, 5120), "head_global.head.weight": (64, 5120),
        "ref_conv.bias": (5120,),
    },
}  # fmt: skip


@pytest.mark.parametrize(("preset", "counts"), COUNTS.items())
def test_parameter_counts_are_those_of_the_authors_code(preset, counts):
    found = parameters_of(WAN.architecture.build, PRESETS[preset])
    assert (sum(map(math.prod, found.values())), len(found)) == counts
    official = [to_official(name) for name in found]
    assert len(set(official)) == counts[1]
    assert [to_native(name) for name in official] == list(found)


@pytest.mark.parametrize(("preset", "beside"), BESIDE.items())
def test_what_they_have_besides_is_named_as_in_their_files(preset, beside):
    of_ours = parameters_of(WAN.architecture.build, PRESETS[preset])
    found = {to_official(name): shape for name, shape in of_ours.items()}
    assert {name: found[name] for name in beside} == beside


def test_music_is_numbered_by_place_in_the_list_of_blocks_that_end_with_it():
    assert (
        to_native("music_injector.injector.7.v.weight")
        == f"layers.{MUSIC_LAYERS[7]}.music.v.weight"
    )
    assert to_native("music_injector.injector.8.v.weight") is None
    assert to_native("img_emb_refface.proj.0.weight") is None, "no published file has it"


def test_every_stage_of_wantodance_has_its_parameters_and_none_is_left():
    """By walking: the lists of names that reviewers gave missed two modules."""
    with torch.device("meta"):
        model = WanTransformer(PRESETS["wantodance-14b"], Precision())
    stages = [model.embed, *model.blocks(), model.head]
    reached = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert sorted(reached) == sorted(map(id, model.parameters()))
    assert len(model.blocks()) == 40 and not list(model.buffers())


def test_clips_are_as_long_large_and_fast_as_the_authors():
    local, whole = (
        WAN.for_arch(PRESETS[name]) for name in ("wantodance-14b", "wantodance-14b-global")
    )
    assert (local.data.fps, local.data.size) == (30.0, (149, 1280, 720))
    assert (whole.data.fps, whole.data.size) == (7.5, (149, 1280, 720))
    assert WAN.auxiliary.sample_defaults(PRESETS["wantodance-14b"]).steps == 24
    assert WAN.auxiliary.sample_defaults(PRESETS["wantodance-14b-global"]).steps == 48
    assert WAN.auxiliary.sample_defaults(PRESETS["fun-v1.1-control-1.3b"]).guidance == 6.0


def test_nothing_is_compared_with_a_model_that_diffusers_has_not():
    """Its transformer would be built without what these have besides."""
    for preset in WITHOUT_DIFFUSERS:
        assert WAN.for_arch(PRESETS[preset]).adapters.verify is None
    assert WAN.for_arch(PRESETS["i2v-14b-480p"]).adapters.verify is not None


def test_music_may_have_an_adapter_where_it_matters():
    """Values and outputs; queries and keys have no say, so that an adapter on them would be trained
    by nothing."""
    with torch.device("meta"):
        model = WanTransformer(PRESETS["wantodance-14b"], Precision())
    chosen = target_modules(model, ("q,k,v,o,ffn.0,ffn.2,music",), WAN.adapters.targets)
    assert {name for name in chosen if ".music." in name} == {
        f"layers.{layer}.music.{part}" for layer in MUSIC_LAYERS for part in ("v", "o")
    }
    assert not any(
        ".music.q" in name or ".music.k" in name for name in target_modules(model, ("*",), {})
    )
    assert to_official("layers.4.music.v.weight") == "music_injector.injector.1.v.weight"


def test_keyframes_go_through_the_vae_one_by_one(checkpoint):
    where, cpu = ModelPaths(base=str(checkpoint)), torch.device("cpu")
    names = (None, "wantodance-14b", "wantodance-14b-global")
    kinds = [type(media_encoder(where, cpu, arch=name and PRESETS[name])) for name in names]
    assert kinds == [VaeEncoder, VaeEncoder, KeyframeVae]
    plain, alone = VaeEncoder(where, cpu), KeyframeVae(where, cpu)
    assert plain.identity != alone.identity, "or the cache would hand out latents of a video"
    tiled = KeyframeVae(where, cpu, mode=VaeMode(tiled=True)).identity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ditkit_wan.encoders.vae.TILES", Tiles(side=512, overlap=64))
        assert (
            len({alone.identity, tiled, KeyframeVae(where, cpu, mode=VaeMode(tiled=True)).identity})
            == 3
        )
        assert KeyframeVae(where, cpu).identity == alone.identity
    plain.load()
    alone.load()
    clip = torch.rand(3, 5, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    (latents,) = (found["latents"] for found in alone.encode([clip]))
    stills = [plain.encode([clip[:, i : i + 1]])[0]["latents"] for i in (0, 4)]
    assert torch.equal(latents, torch.cat(stills, 1))
    assert not torch.equal(latents, plain.encode([clip])[0]["latents"])
    pictures = alone.decode(latents)
    assert torch.equal(pictures, torch.cat([plain.decode(still) for still in stills], 1))
    assert pictures.shape == (3, 2, 16, 16)
