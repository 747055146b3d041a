"""Language models that see, against transformers' own classes: whole and streamed, with no picture,
with one and with two of different sizes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import SampleEncoders, encode
from ditkit_core.errors import UserError
from ditkit_core.families.language_models import (
    QWEN2_5_VL,
    QWEN2_5_VL_TOWER,
    QWEN3_VL,
    QWEN3_VL_TOWER,
    TextEncoding,
    TextFamily,
)
from ditkit_core.families.references import area_size
from ditkit_core.families.text import text_model
from ditkit_core.families.vision_language import VisionLanguageEncoder
from ditkit_core.families.vision_tower import HOW_IT_SEES, build_tower, mrope_positions, patches_of
from ditkit_core.models.encoders import Prompt
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import DataSpec
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.testing.toy import ToyMediaEncoder

CPU = torch.device("cpu")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")  # fmt: skip
SYSTEM = "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n"
PICTURE = "Picture {number}: <|vision_start|><|image_pad|><|vision_end|>"
TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16,
    "patch_size": 4,
}  # fmt: skip
PIXELS = (8 * 8, 64 * 64)


def config_of(name: str, vocabulary: int) -> Any:
    tokens = {"image_token_id": SPECIAL.index("<|image_pad|>")}
    if name == "Qwen2.5-VL":
        rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
        return Qwen2_5_VLConfig(
            text_config={**TEXT, "vocab_size": vocabulary, "rope_parameters": rotary},
            vision_config={**TOWER, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
            **tokens,
        )
    rotary = {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }  # fmt: skip
    return Qwen3VLConfig(
        text_config={
            **TEXT, "vocab_size": vocabulary, "head_dim": 8, "rope_parameters": rotary,
        },
        vision_config={
            **TOWER, "depth": 4, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16,
        },
        **tokens,
    )  # fmt: skip


FAMILIES: dict[str, tuple[TextFamily, Any]] = {
    "Qwen2.5-VL": (
        replace(QWEN2_5_VL, vision=replace(QWEN2_5_VL_TOWER, picture=PICTURE, pixels=PIXELS)),
        Qwen2_5_VLForConditionalGeneration,
    ),
    "Qwen3-VL": (
        replace(
            QWEN3_VL,
            layers=(-1,),
            vision=replace(QWEN3_VL_TOWER, picture=PICTURE, between=" ", pixels=PIXELS),
        ),
        Qwen3VLForConditionalGeneration,
    ),
}


class Model:
    """Files of a toy, its text encoding, and what transformers computes of them."""

    def __init__(self, name: str, folder: Path):
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

        pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=SPECIAL[0])
        family, made = FAMILIES[name]
        self.config = config_of(name, len(pieces))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = made(self.config).eval()
            for parameter in self.model.parameters():
                parameter.data.add_(torch.randn(parameter.shape) * 0.2)
        self.model.save_pretrained(folder / "text_encoder")
        self.tokenizer.save_pretrained(folder / "tokenizer")
        self.folder = folder
        self._loaded: dict[torch.dtype, Any] = {}
        self.family = replace(family, before=SYSTEM, dropped=12)
        assert self.family.vision is not None
        self.processor = Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, min_pixels=PIXELS[0], max_pixels=PIXELS[1],
            image_mean=self.family.vision.mean, image_std=self.family.vision.deviation,
        )  # fmt: skip

    def encoder(
        self, streaming: Any = "never", dtype: torch.dtype = torch.float32, **changes: Any
    ) -> VisionLanguageEncoder:
        encoding = TextEncoding(
            models=(replace(self.family, **changes),), reader="Zed", remedy="", num_tokens=128
        )
        encoder = VisionLanguageEncoder(
            encoding, ModelPaths(base=str(self.folder)), CPU, dtype, streaming
        )
        encoder.load()
        return encoder

    def loaded(self, dtype: torch.dtype) -> Any:
        """The model of transformers, which is loaded once and only read; `to` would round its
        frequencies as well."""
        if dtype not in self._loaded:
            kind = type(self.model)
            model = kind.from_pretrained(self.folder / "text_encoder", dtype=dtype).eval()
            self._loaded[dtype] = model
        return self._loaded[dtype]

    def expected(
        self,
        caption: str,
        pictures: list[np.ndarray],
        dtype: torch.dtype = torch.float32,
        *,
        kinds: bool = True,
    ) -> Tensor:
        """The last hidden state of transformers' class, of the prompt as its processor makes it."""
        vision = self.family.vision
        assert vision is not None
        words = vision.between.join(
            PICTURE.replace("{number}", str(number + 1)) for number in range(len(pictures))
        )
        given: dict[str, Any] = {}
        text = self.family.render(words + caption)
        if pictures:
            images = [Image.fromarray(picture) for picture in pictures]
            given = dict(self.processor(images, return_tensors="pt"))
            given["pixel_values"] = given["pixel_values"].to(dtype)
            for grid in given["image_grid_thw"].tolist():
                rows = grid[1] * grid[2] // 4
                text = text.replace("<|image_pad|>", "<slot>" * rows, 1)
        tokens = self.tokenizer(text.replace("<slot>", "<|image_pad|>"), return_tensors="pt")
        if kinds:
            given["mm_token_type_ids"] = (tokens.input_ids == self.config.image_token_id).int()
        with torch.no_grad():
            return self.loaded(dtype).model(
                input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, **given,
            ).last_hidden_state[0]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("sees"))


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def pixels(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).float() / 127.5 - 1


SIZES = [(), ((40, 24),), ((40, 24), (16, 48))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("streaming", ["never", "always"])
def test_features_are_the_hidden_states_of_transformers(
    model: Model, streaming: Any, dtype: torch.dtype
) -> None:
    encoder = model.encoder(streaming, dtype)
    assert encoder.streams == (streaming == "always")
    pictures = [images(*sizes) for sizes in SIZES]
    prompts = [Prompt("a fox", [pixels(image) for image in group]) for group in pictures]
    together = encoder.encode(prompts) if encoder.streams else None
    for number, (prompt, group) in enumerate(zip(prompts, pictures, strict=True)):
        (item,) = encoder.encode([prompt])
        expected = model.expected("a fox", group, dtype)[model.family.dropped :]
        assert item["text"].dtype == dtype and torch.equal(item["text"], expected), number
        if together is not None:
            assert torch.equal(together[number]["text"], item["text"])


def test_a_picture_has_rows_and_columns_whatever_a_pipeline_says(model: Model) -> None:
    """diffusers 0.42 calls Qwen2.5-VL without the kinds of tokens, by which transformers 5 finds
    pictures: each slot then gets a position of its own, as no model was trained."""
    group = images(*SIZES[1])
    if model.family.name != "Qwen2.5-VL":  # refuses to guess
        with pytest.raises(ValueError, match="mm_token_type_ids"):
            model.expected("a fox", group, kinds=False)
        return
    guessed, expected = (model.expected("a fox", group, kinds=kinds) for kinds in (False, True))
    assert not torch.allclose(guessed, expected, rtol=1e-3, atol=1e-3)
    plain = (model.expected("a fox", [], kinds=kinds) for kinds in (False, True))
    assert torch.equal(*plain)


@pytest.mark.parametrize("size", [(40, 24), (50, 30), (5, 20), (90, 70), (300, 8)])
def test_pictures_become_the_patches_of_the_processor(model: Model, size: tuple[int, int]) -> None:
    (image,) = images(size)
    vision = model.family.vision
    assert vision is not None
    patches = patches_of(vision, model.config.vision_config, [pixels(image)])
    expected = model.processor([Image.fromarray(image)], return_tensors="pt")
    (grid,) = patches.grids
    assert [1, grid.rows, grid.columns] == expected["image_grid_thw"][0].tolist()
    assert torch.equal(patches.pixels, expected["pixel_values"])


def test_other_patches_of_the_same_picture_have_other_words_in_the_identity_of_caches() -> None:
    """The processor may change, and `patches_of` after it: then change `HOW_IT_SEES` and the
    numbers here, which are as they were when its words were written."""
    row, column = torch.meshgrid(torch.arange(90), torch.arange(110), indexing="ij")
    picture = torch.stack([(row // 2 + column // (2 + c)) % 2 for c in range(3)]) * 1.6 - 0.8
    config = SimpleNamespace(patch_size=16, spatial_merge_size=2, temporal_patch_size=2)
    patches = patches_of(QWEN3_VL_TOWER, config, [picture])  # enlarged
    now = patches.pixels[7, 5::257]
    # steps of 8 bits, by which kernels of resizing may differ, are 0.008
    before = torch.tensor([-0.3569, -0.4745, 0.1843, 0.4118, 0.3882, 0.3882])
    torch.testing.assert_close(now, before, rtol=0, atol=0.02)
    assert patches.pixels.shape == (288, 1536) and HOW_IT_SEES == "not padded, sees with"


def test_pictures_that_touch_are_told_apart_by_their_sizes() -> None:
    slots = [False, *[True] * 6, False]
    positions = mrope_positions(slots, [(1, 2), (2, 2)])[:, 0]
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 3, 3, 5], [0, 1, 1, 3, 3, 4, 4, 5], [0, 1, 2, 3, 4, 3, 4, 5],
    ]  # fmt: skip


def test_a_long_caption_is_cut_and_pictures_never_are(model: Model) -> None:
    encoder = model.encoder()
    picture = pixels(images((16, 16))[0])
    short, long = (
        encoder.encode([Prompt("a", [picture])]),
        encoder.encode([Prompt("a" * 200, [picture])]),
    )
    assert len(encoder.truncated) == 1
    assert long[0]["text"].shape[0] == 128 + 3 - model.family.dropped > short[0]["text"].shape[0]
    fake = encoder.encode([Prompt("a<|image_pad|>", [picture])])
    assert torch.equal(fake[0]["text"], short[0]["text"]), "a slot in a caption is no picture"
    removing = model.encoder(removed="<|image_pad|>")
    assert torch.equal(
        removing.encode([Prompt("a<|image_pad|>", [picture])])[0]["text"], short[0]["text"]
    )
    with pytest.raises(UserError, match="9 pictures are too many for the 128 tokens of a prompt"):
        encoder.encode([Prompt("a", [picture] * 9)])


@pytest.mark.parametrize("between", ["", " "])
def test_pictures_divide_the_features_for_a_transformer_that_asks(
    model: Model, between: str
) -> None:
    """Rows of slots are left out; of two pictures that touch, nothing is between."""
    assert model.family.vision is not None
    picture = PICTURE if between else "<|image_pad|>"
    vision = replace(model.family.vision, picture=picture, between=between)
    whole, divided = (
        model.encoder(vision=replace(vision, divides_text=divides)) for divides in (False, True)
    )
    for sizes in SIZES:
        prompt = Prompt("a fox", [pixels(image) for image in images(*sizes)])
        (expected,), (item,) = whole.encode([prompt]), divided.encode([prompt])
        names = [f"text.{number}" for number in range(len(sizes))]
        assert list(item) == [*names, "text"]
        slots = [torch.zeros(height * width // 64, 16) for height, width in sizes]
        parts = [item[name] for name in names]
        rows = [x for pair in zip(parts, slots, strict=True) for x in pair] + [item["text"]]
        joined, kept = (
            torch.cat(rows),
            torch.cat([torch.ones(len(x)) * bool(x.any()) for x in rows]),
        )
        assert joined.shape == expected["text"].shape
        assert torch.equal(joined, expected["text"] * kept[:, None])
        assert [len(part) for part in parts[1:]] == [14 if between else 0] * (len(sizes) == 2)
        assert all(part._base is None for part in parts)


def test_what_is_seen_is_part_of_the_identity(model: Model) -> None:
    vision = model.family.vision
    assert vision is not None
    others = [
        model.encoder(vision=replace(vision, **change)).identity
        for change in (
            {}, {"picture": "Image: <|image_pad|>"}, {"pixels": (64, 1024)}, {"mean": (0.4, 0.5, 0.5)},
            {"between": ", "}, {"usual_pixels": 3},
        )
    ]  # fmt: skip
    assert len({*others[:-1]}) == 5 and others[-1] == others[0]


def test_a_single_file_gives_what_the_folder_gives(model: Model, tmp_path: Path) -> None:
    state = load_file(model.folder / "text_encoder" / "model.safetensors")
    assert any(name.startswith(("visual.", "model.visual.")) for name in state)
    save_file(state, tmp_path / "encoder.safetensors")
    assert model.family.vision is not None
    text, seeing = model.config.text_config, model.config.vision_config
    family = replace(
        model.family,
        unstated={
            "head_dim": 8,
            "rms_norm_eps": text.rms_norm_eps,
            "rope_parameters": text.rope_parameters,
        },
        vision=replace(model.family.vision, published={16: seeing.to_dict()}),
    )
    encoding = TextEncoding(models=(family,), reader="Zed", remedy="", num_tokens=128)
    paths = ModelPaths(
        text_encoder=str(tmp_path / "encoder.safetensors"),
        tokenizer=str(model.folder / "tokenizer"),
    )
    encoder = VisionLanguageEncoder(encoding, paths, CPU, torch.float32, "never")
    encoder.load()
    prompt = Prompt("a fox", [pixels(image) for image in images(*SIZES[1])])
    (one,), (other,) = (reader.encode([prompt]) for reader in (encoder, model.encoder()))
    assert torch.equal(one["text"], other["text"])


def test_the_core_gives_it_the_pixels_of_a_sample(model: Model, tmp_path: Path) -> None:
    for name, image in zip(("set/a", "refs/a"), images((16, 16), (40, 24)), strict=True):
        file = tmp_path / f"{name}.png"
        file.parent.mkdir()
        Image.fromarray(image).save(file)
    (tmp_path / "set/a.txt").write_text("a fox")
    config = DataConfig(
        folder=str(tmp_path / "set"),
        references=str(tmp_path / "refs"),
        frames=1,
        height=16,
        width=16,
    )
    stored = lambda height, width, count: (40, 24)
    data = DataSpec(frame_step=0, size_step=16, fps=1.0, size=(1, 16, 16), reference_size=stored)
    samples = scan(config, data).samples
    encoders = SampleEncoders(
        media=ToyMediaEncoder(), text=model.encoder(), fps=1.0, reference_size=stored,
        picture_size=stored,
    )  # fmt: skip
    (sample,) = encode(samples, encoders, Cache(tmp_path / "cache"))
    expected = model.expected("a fox", [np.asarray(Image.open(tmp_path / "refs/a.png"))])
    assert torch.equal(sample.load()["text"], expected[model.family.dropped :])


def test_plans_count_the_tower_and_a_picture(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # A streamed encoder takes 64 captions at a time, each with a picture of its own: four show it.
    monkeypatch.setattr("ditkit_core.families.text._MOST_AT_ONCE", 4)
    assert model.family.vision is not None
    peaks = {}
    for pixels_of_picture in (16 * 16, 48 * 48):
        vision = replace(model.family.vision, usual_pixels=pixels_of_picture)
        encoding = TextEncoding(
            models=(replace(model.family, vision=vision),), reader="Zed", remedy="", num_tokens=32
        )
        plan = text_model(encoding, 16, ModelPaths(base=str(model.folder)))
        built = plan.build(torch.float32)
        weights = sum(parameter.nbytes for parameter in built.parameters())
        assert any(name.startswith("visual.blocks.") for name, _ in built.named_parameters())
        measured = measure_model(plan, (1, 64, 64), dtype=torch.float32)
        assert weights <= measured.weights < 1.5 * weights
        peaks[pixels_of_picture] = measured.peak
    streamed = measure_model(plan, (1, 64, 64), dtype=torch.float32, mode="layer by layer")
    assert streamed.weights < measured.weights
    assert peaks[48 * 48] > peaks[16 * 16]


TOWERS = [
    (QWEN2_5_VL_TOWER, 3584, 676_550_144), (QWEN3_VL_TOWER, 2560, 415_347_712),
    (QWEN3_VL_TOWER, 4096, 576_388_336),
]  # fmt: skip


@pytest.mark.parametrize(("tower", "width", "parameters"), TOWERS)
def test_published_towers_have_their_sizes(tower: Any, width: int, parameters: int) -> None:
    with torch.device("meta"):
        built = build_tower(tower, tower.published[width], "sdpa")
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters


def test_plans_without_files_have_the_published_model() -> None:
    """Qwen2.5-VL 7B has 8,292,166,656 parameters, its head 152064 x 3584 of them."""
    seeing = replace(QWEN2_5_VL, vision=QWEN2_5_VL_TOWER)
    encoding = TextEncoding(models=(seeing,), reader="Zed", remedy="")
    built = text_model(encoding, 3584, ModelPaths()).build(torch.bfloat16)
    count = sum(parameter.numel() for parameter in built.parameters())
    assert count == 8_292_166_656 - 152064 * 3584


def test_sizes_of_references_are_those_of_the_pipelines() -> None:
    random = np.random.default_rng(0)
    for area in (1024 * 1024, 384 * 384):
        for height, width in random.integers(64, 4000, (300, 2)).tolist():
            expected = calculate_dimensions(area, width / height)
            assert area_size(area)(height, width, 1) == (expected[1], expected[0])
    with pytest.raises(UserError, match="of 2001x10 pixels is too long; crop it to at most 200:1"):
        area_size(384 * 384)(10, 2001, 1)
    # One of Edit's pictures of 1024 x 1024: 37 x 37 slots, of which its tower sees 28 pixels each.
    assert QWEN2_5_VL_TOWER.num_slots(1024, 1024) == 37 * 37
