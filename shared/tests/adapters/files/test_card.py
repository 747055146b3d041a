"""The model card: what it says of a file, whatever strangers have written into that."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from ditkit_core.adapters.files.card import Card, CardFile, CardSample
from ditkit_core.models.spec import Expert
from ditkit_core.testing.toy import TOY

HIGH, LOW = (
    Expert(name=name, part=part, min_sigma=0.0, max_sigma=1.0, guidance=1.0)
    for name, part in (("high_noise", "transformer"), ("low_noise", "transformer_2"))
)
CONFIG = """
[adapter]
rank = 16
alpha = 8.0
use_dora = true
[train]
batch_size = 2
accumulation = 3
[optim]
lr = 0.0002
name = "adamw"
[data]
trigger = "fox `x`"
frames = 81
"""
HEADER = {
    "ditkit.base": "Wan-AI/Wan-Test",
    "ditkit.preset": "tiny",
    "ditkit.step": "40",
    "ditkit.config": CONFIG,
}


def adapter(path: str, **header: str) -> CardFile:
    return CardFile(
        path=path,
        header={**HEADER, **header},
        readers={"diffusers": "", "ComfyUI": "", "other": "rejects"},
    )


def card(*files: CardFile, **given: Any) -> tuple[dict[str, Any], str]:
    _, metadata, body = (
        Card(**{"spec": TOY, "name": "fox", "repository": "me/fox", "files": files, **given})
        .text()
        .split("---\n", 2)
    )
    return yaml.safe_load(metadata), body


def test_it_says_how_the_adapter_was_trained_and_is_loaded() -> None:
    metadata, body = card(adapter("fox.safetensors"), num_samples=12, license="mit")
    assert metadata["base_model"] == "Wan-AI/Wan-Test" and metadata["license"] == "mit"
    for said in (
        (
            "A DoRA of rank 16 for [Wan-AI/Wan-Test](https://huggingface.co/Wan-AI/Wan-Test) (`tiny`), "
            "trained for 40 steps"
        ),
        'from_pretrained(\n    "Wan-AI/Wan-Test", torch_dtype=torch.bfloat16\n)\npipeline.load_lora_weights("me/fox", weight_name="fox.',
        "| `fox.safetensors` | diffusers, ComfyUI |",
        "| batch size | 6 |",
        "| learning rate | 0.0002 (adamw) |",
        "| clips and images | 12 |",
        "Write `fox 'x'` in",
    ):
        assert said in body, body


def test_a_model_that_edits_is_found_among_those_that_edit() -> None:
    stills = replace(TOY, data=replace(TOY.data, frame_step=0))
    edits = replace(stills, data=replace(stills.data, needs_references=True))
    trained = {"ditkit.config": '[data]\nreferences = "before"\n'}
    for spec, header, goal in (
        (TOY, trained, "text-to-video"),
        (stills, {}, "text-to-image"),
        (stills, trained, "image-to-image"),
        (edits, {}, "image-to-image"),
    ):
        metadata, _ = card(adapter("fox.safetensors", **header), spec=spec)
        assert metadata["pipeline_tag"] == goal and goal in metadata["tags"]


@pytest.mark.parametrize(
    ("published", "base", "named"),
    [
        (("one/Tiny",), "models", "one/Tiny"),
        (("one/Tiny", "one/Tiny-2512"), "tiny-2512", "one/Tiny-2512"),
        (("one/Tiny", "one/Tiny-2512"), "models", None),
    ],
)
def test_of_a_local_base_the_published_model_is_named_that_it_is(
    published: tuple[str, ...], base: str, named: str | None
) -> None:
    """A preset of several published models is none of them."""
    ids = dict.fromkeys(published, "tiny")
    spec = replace(TOY, architecture=replace(TOY.architecture, hub_presets=ids))
    metadata, body = card(adapter("fox.safetensors", **{"ditkit.base": base}), spec=spec)
    assert metadata.get("base_model") == named and f'"{named or base}"' in body


def test_values_are_written_as_people_mean_them() -> None:
    """In a configuration an alpha of 0 is the rank, and no targets are the model's first set."""
    header = {
        "ditkit.config": "[adapter]\nrank = 32\nalpha = 0.0\n",
        "ditkit.versions": '{"ditkit": "0.1.0", "torch": "2.15"}',
    }
    _, body = card(adapter("fox.safetensors", **header))
    for row in (
        "| alpha | 32, as the rank |",
        "| layers | qkv, out, query, key\\_value, mlp.0, mlp.2 |",
        "| versions | ditkit 0.1.0, torch 2.15 |",
    ):
        assert row in body, body
    _, body = card(
        adapter("fox.safetensors", **{"ditkit.config": CONFIG, "ditkit.versions": "of yesterday"})
    )
    assert "| alpha | 8.0 |" in body and "| versions | of yesterday |" in body


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ("frames = 81\nheight = 480\nwidth = 832", ["| frames, height, width | 81, 480, 832 |"]),
        (
            "frame_buckets = [17, 33]\nheight = 480\nwidth = 832",
            ["| frames, height, width | 17 or 33, 480, 832 |"],
        ),
        (
            "resolutions = [512, 768, 1024]\nheight = 1024\nwidth = 1024\nframes = 1",
            ["| frames | 1 |", "| resolutions | 512, 768, 1024 (side of a square) |"],
        ),
        ("resolutions = 'all'\nframes = 1", ["| frames, height, width | 1 |"]),
    ],
)
def test_all_sizes_that_were_trained_are_shown(data: str, rows: list[str]) -> None:
    _, body = card(adapter("fox.safetensors", **{"ditkit.config": f"[data]\n{data}\n"}))
    table = [line for line in body.splitlines() if line.startswith(("| frames", "| resolutions"))]
    assert table == rows


def test_each_expert_is_loaded_into_its_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(TOY, architecture=replace(TOY.architecture, experts=lambda arch: (HIGH, LOW)))
    names = [
        (f"fox_{each.name}{form}.safetensors", each.name)
        for each in (HIGH, LOW)
        for form in ("", "_diffusers")
    ]
    _, body = card(*(adapter(path, **{"ditkit.expert": name}) for path, name in names), spec=spec)
    assert [line for line in body.splitlines() if "load_lora_weights" in line] == [
        'pipeline.load_lora_weights("me/fox", weight_name="fox_high_noise.safetensors")',
        'pipeline.load_lora_weights("me/fox", weight_name="fox_low_noise.safetensors", load_into_transformer_2=True)',
    ]


def test_a_whole_transformer_is_loaded_as_one() -> None:
    whole = CardFile(
        path="transformer_diffusers",
        header=HEADER,
        readers=None,
        transformer_class="ToyTransformer",
    )
    metadata, body = card(whole)
    assert metadata["base_model_relation"] == "finetune" and "lora" not in metadata["tags"]
    assert (
        'ToyTransformer.from_pretrained(\n    "me/fox", subfolder="transformer_diffusers"' in body
    )


@pytest.mark.parametrize(
    "config", ["", "not toml [", "a = 1", "x = " + "[" * 5000, "[adapter]\nrank = 'high'\n"]
)
def test_any_header_makes_a_card(config: str) -> None:
    metadata, body = card(
        CardFile(path="a.safetensors", header={"ditkit.config": config}, readers={})
    )
    assert (
        metadata["library_name"] == "diffusers"
        and "## Training" in body
        and "base_model" not in metadata
    )


def test_texts_of_strangers_make_no_markup() -> None:
    hostile = "a\n# title\n---\n<script>|*x*\u202e"
    sample = CardSample(path="samples/a.png", prompt=hostile)
    header = {"ditkit.config": f"[data]\ntrigger = {hostile!r}\n", "ditkit.data": hostile}
    metadata, body = card(
        CardFile(path="a.safetensors", header=header, readers={}), samples=[sample]
    )
    assert metadata["widget"][0]["text"] == " ".join(hostile.split())
    assert "<script>" not in body.replace("    ", "") or all(
        line.startswith("    ") or "`" in line for line in body.splitlines() if "<script>" in line
    )
    assert "\u202e" not in body.replace("    ", "").partition("<details>")[0]
    assert "# title" not in body.splitlines() and "---" not in body.splitlines()
