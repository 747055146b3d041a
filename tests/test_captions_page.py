"""The page about captions: each program's files are read as it says, and its numbers are those of
the code."""

import json
import re

import pytest
from PIL import Image

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.diagnostics.doctor.findings import CODES
from ditkit_core.training.config import TrainConfig
from ditkit_flux2.encoders import TEXT as FLUX2_TEXT
from ditkit_flux3.spec import TEXT as FLUX3_TEXT
from ditkit_krea2 import encoders as krea2
from ditkit_ltx import encoders as ltx
from ditkit_qwen.encoders import TEXT as QWEN_TEXT
from ditkit_qwenimage import encoders as qwenimage
from ditkit_wan.encoders import text as wan
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import TEXT as ZIMAGE_TEXT
from doc_models import SPECS
from workspace import ROOT

PAGE = (ROOT / "docs/captions.md").read_text(encoding="utf-8")
PROGRAMS = re.search(r"<!-- programs: .*?-->(.*?)<!-- end of programs -->", PAGE, re.DOTALL)[1]
ROWS = [re.findall(r"[^|]+", line) for line in PROGRAMS.strip().splitlines()[2:]]
CAPTIONS = ("a cat, asleep", "a dog")

BESIDE = {"a.txt": CAPTIONS[0], "b.txt": CAPTIONS[1]}
WRITTEN = {
    "TagGUI": (BESIDE, {}),
    "OneTrainer": ({"a.txt": "a cat\na cat, asleep\n", "b.txt": "a dog"}, {"captions": "lines"}),
    "kohya's scripts: BLIP": ({"a.caption": CAPTIONS[0], "b.caption": CAPTIONS[1]}, {}),
    "musubi-tuner": (
        {"captions.jsonl": ("image_path", "caption", "absolute")},
        {"metadata": "captions.jsonl"},
    ),
    "finetrainers": ({"videos.txt": "a.png\nb.png\n", "prompts.txt": "\n".join(CAPTIONS)}, {}),
    "VideoX-Fun": ({"train.json": ("file_path", "text", "list")}, {"metadata": "train.json"}),
    "Hugging Face": ({"metadata.jsonl": ("file_name", "text", "")}, {}),
}
"""By the beginning of the program's row: what it writes (for tables the names of their columns),
and the settings of the page."""


def table(folder, media, caption, form):
    """A list of both images with their captions, as one of the programs writes it."""
    paths = [str(folder / name) if form == "absolute" else name for name in ("a.png", "b.png")]
    rows = [{media: path, caption: words} for path, words in zip(paths, CAPTIONS, strict=True)]
    return json.dumps(rows) if form == "list" else "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize("program", WRITTEN)
def test_what_each_program_writes_is_read(program, tmp_path):
    (row,) = [row for row in ROWS if row[0].strip().startswith(program)]
    files, settings = WRITTEN[program]
    assert all(name in row[2] for name in settings) and ("nothing" in row[2]) == (not settings)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    for name, content in files.items():
        (tmp_path / name).write_text(
            table(tmp_path, *content) if isinstance(content, tuple) else content
        )
    config = DataConfig(folder=str(tmp_path), frames=1, height=32, width=32, **settings)
    dataset = scan(config, WAN.data)
    assert [sample.captions[-1] for sample in dataset.samples] == list(
        CAPTIONS
    ) and not dataset.excluded


def test_every_program_of_the_page_is_tried():
    assert len(ROWS) == len(WRITTEN)


NUM_TOKENS = {
    "Wan": (wan.TEXT_TOKENS,),
    "FLUX.2": (FLUX2_TEXT.num_tokens,),
    "FLUX.3": (FLUX3_TEXT.num_tokens,),
    "Krea 2": (krea2.TEXT_TOKENS,),
    "LTX-Video": (ltx.TEXT.num_tokens, ltx.CAUSAL_TEXT.num_tokens),
    "Qwen-Image 2.1": (QWEN_TEXT.num_tokens,),
    "Qwen-Image": (qwenimage.TEXT_TOKENS,),
    "Z-Image": (ZIMAGE_TEXT.num_tokens,),
}
"""By family: how many tokens of a caption its text encoders read."""


@pytest.mark.parametrize("family", NUM_TOKENS)
def test_the_page_says_how_much_each_text_encoder_reads(family):
    (row,) = re.findall(rf"^\| {re.escape(family)} \|[^|]+\|([^|]+)\|", PAGE, re.MULTILINE)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"(?<!\.)\b\d[\d,]+\b", row)]
    assert numbers == list(NUM_TOKENS[family])


def test_the_page_says_how_many_words_a_model_is_asked_for():
    words = {spec.name: "{} to {} words".format(*spec.data.caption_words) for spec in SPECS}
    of_wan, of_others = words.pop("wan"), " ".join(set(words.values()))
    sentence = f"asks for {of_wan} for Wan, and for {of_others} for the others, or"
    assert sentence in " ".join(PAGE.split())
    assert len(NUM_TOKENS) == len(SPECS)


def test_the_page_says_what_is_default():
    assert TrainConfig().caption_dropout == 0 and "The default is 0." in PAGE


def test_the_page_names_every_finding_about_captions():
    about_captions = {code for code, what in CODES.items() if re.search("caption|trigger", what)}
    assert about_captions - {"D02"} <= set(re.findall(r"D\d\d", PAGE)) <= CODES.keys()
