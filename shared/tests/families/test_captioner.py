"""Vision-language models: whole and streamed layer by layer, and models that cannot be used."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_line import assert_one_line
from safetensors.torch import load_file, save_file
from tiny_captioner import write_captioner

from ditkit_core.data.media.image import RgbImage
from ditkit_core.errors import MissingDependency, UserError
from ditkit_core.families.caption_prompts import GOALS, caption_prompt
from ditkit_core.families.captioner import Captioner, CaptionRequest

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="processors of Qwen-VL need the extra captions"
)
KINDS = [
    "llava",
    pytest.param("qwen2.5", marks=needs_torchvision),
    pytest.param("qwen3", marks=needs_torchvision),
]


def captioner(folder: Path, streaming: str = "never", **changes: Any) -> Captioner:
    settings = {"side": 64, "most_tokens": 12, "package": "ditkit-toy"} | changes
    device = torch.device("cpu")
    return Captioner(folder, device=device, dtype=torch.float32, streaming=streaming, **settings)


def picture(seed: int) -> RgbImage:
    return np.random.default_rng(seed).integers(0, 255, (30 + 8 * seed, 40, 3), dtype=np.uint8)


REQUESTS = [
    CaptionRequest(images=[picture(0)], prompt="Describe w1"),
    CaptionRequest(images=[picture(1), picture(2), picture(3)], prompt="Describe w1 w2 w3 w4"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_layers_give_the_tokens_of_the_whole_model(tmp_path: Path, kind: Any) -> None:
    folder = write_captioner(tmp_path, kind=kind, shard_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole, streamed = captioner(folder), captioner(folder, "always")
    whole.load()
    streamed.load()
    layers = streamed._model.get_decoder().layers
    loaded: list[list[bool]] = []
    logits: dict[str, list[torch.Tensor]] = {"whole": [], "streamed": []}

    def look(*_: object) -> None:
        loaded.append([all(not p.is_meta for p in layer.parameters()) for layer in layers])

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    for name, model in (("whole", whole), ("streamed", streamed)):
        head = model._model.get_output_embeddings()
        head.register_forward_hook(lambda _, given, output, name=name: logits[name].append(output))
    answers = whole.answers(REQUESTS)
    assert streamed.answers(REQUESTS) == answers and len(loaded) == 3 * len(logits["streamed"])
    assert [streamed.answers([request]) for request in REQUESTS] == [
        whole.answers([request]) for request in REQUESTS
    ], "later calls read the same"
    assert len(logits["whole"]) == len(logits["streamed"]) > 20
    assert all(map(torch.equal, logits["whole"], logits["streamed"])), "bitwise"
    assert {output.shape[1] for output in logits["streamed"][1:12]} == {1}, "by a cache"
    # One layer at a time, for each token: the cache of keys and values is used.
    assert {tuple(row) for row in loaded} == {
        tuple(index == number for index in range(3)) for number in range(3)
    }
    assert all(p.is_meta for p in layers.parameters())
    assert not any(
        p.is_meta for name, p in streamed._model.named_parameters() if ".layers." not in name
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_answers_until_its_end(tmp_path: Path, kind: Any) -> None:
    folder = write_captioner(tmp_path, "A red cat sits.", kind=kind)
    model = captioner(folder)
    model.load()
    assert [(answer.text, answer.is_cut) for answer in model.answers(REQUESTS)] == [
        ("A red cat sits.", False)
    ] * 2
    short = captioner(folder, most_tokens=2)
    short.load()
    assert [(answer.text, answer.is_cut) for answer in short.answers(REQUESTS[:1])] == [
        ("A red", True)
    ]


def test_weights_are_counted_before_they_are_read(tmp_path: Path) -> None:
    folder = write_captioner(tmp_path, "A cat.")
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert captioner(folder).needed_bytes == 4 * count
    assert captioner(folder, "always").streams and not captioner(folder).streams


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    folder = write_captioner(tmp_path, "A cat.")
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"1 missing: model\.language_model\.layers\.1\.mlp\.up_proj"
    ):
        captioner(folder).load()
    with pytest.raises(UserError, match="its layers cannot be streamed"):
        captioner(folder, "always").load()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{}", "is no model that describes images"),
        ("config.json", '{"model_type": "llama"}', "is no model that describes images"),
        (
            "config.json",
            '{"model_type": "x", "auto_map": {"AutoConfig": "c.C", "AutoModelForImageTextToText": "c.M"}}',
            "is no model that describes images",
        ),
        ("processor_config.json", "{", "has no processor"),
        ("tokenizer.json", "{}", "has no processor"),
    ],
)
def test_a_folder_of_something_else_is_named_in_a_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    folder = write_captioner(tmp_path, "A cat.")
    (folder / name).write_text(content)
    (folder / "c.py").write_text("raise SystemExit('the code of the repository ran')")
    said = assert_one_line(lambda: captioner(folder).load(), str(folder))
    assert message in said


def test_quantized_layers_are_not_streamed_as_if_they_were_plain(tmp_path: Path) -> None:
    folder = write_captioner(tmp_path, "A cat.")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has quantized weights, whose layers cannot be streamed"):
        captioner(folder, "always")
    assert not captioner(folder).streams


def test_pickles_and_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        captioner(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match="is a pickle"):
        captioner(tmp_path)


def test_a_model_without_a_chat_template_needs_its_prompt(tmp_path: Path) -> None:
    folder = write_captioner(tmp_path, "A cat.")
    (folder / "chat_template.jinja").unlink()
    model = captioner(folder)
    with pytest.raises(UserError, match="--instruction '<MORE_DETAILED_CAPTION>'"):
        model.check_prompt("")
    model.check_prompt("<CAPTION>")
    assert model._rendered(REQUESTS[0]) == "Describe w1"


def test_a_processor_that_lacks_torchvision_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = write_captioner(tmp_path, "A cat.")

    def fail(*_: object, **__: object) -> None:
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(MissingDependency, match=r'uv pip install "ditkit-toy\[captions\]"'):
        captioner(folder).load()


def test_a_very_long_image_is_refused() -> None:
    line = np.zeros((2, 300, 3), np.uint8)
    with pytest.raises(UserError, match="300 x 2 pixels is too long .*; crop it"):
        CaptionRequest(images=[line], prompt="w1")


def test_large_images_are_reduced(tmp_path: Path) -> None:
    model = captioner(write_captioner(tmp_path, "A cat."), side=20)
    sizes = []
    processor = model._processor

    def look(*, images: Any, **rest: Any) -> Any:
        sizes.extend(image.size for group in images for image in group)
        return processor(images=images, **rest)

    look.chat_template, look.apply_chat_template = "x", processor.apply_chat_template
    model.__dict__["_processor"] = look
    model._inputs(REQUESTS)
    assert [max(size) for size in sizes] == [20] * 4


def test_each_goal_asks_for_something_else_and_names_what_the_model_sees() -> None:
    def prompt(goal: Any, **changes: Any) -> str:
        settings = {"num_images": 1, "num_references": 0, "words": (30, 80), "trigger": "ohwx"}
        return caption_prompt(goal, **(settings | changes))

    prompts = {goal: prompt(goal) for goal in GOALS}
    assert len(set(prompts.values())) == len(GOALS)
    assert not any("{" in text for text in prompts.values())
    assert all("30 to 80 words" in text for goal, text in prompts.items() if goal != "edit")
    assert "Call the main character ohwx." in prompts["character"]
    assert "ohwx" not in prompt("character", trigger="")
    assert "8 frames" in prompt("motion", num_images=8) and "8 frames" not in prompts["motion"]
    assert "2 images before an edit" in prompt("edit", num_references=2)
    assert prompt("scene", instruction="What is {trigger}?") == "What is ohwx?"
    assert json.dumps(prompts).isascii()
