"""What pages say of models, families, keys and measured figures is so today."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from ditkit_core.commands.options import OPTIONS
from ditkit_core.config.schema import config_fields
from ditkit_core.engine.ac_schedule import parse_schedule
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from doc_models import SPECS
from doc_precision import NAMES
from pages import FENCE, PAGES
from test_docs_commands import FAMILIES
from workspace import ROOT, text_files

README, CHANGELOG, LIMITATIONS, EVIDENCE = (
    ROOT / name for name in ("README.md", "CHANGELOG.md", "docs/limitations.md", "docs/evidence.md")
)
FIGURES = (README, CHANGELOG, LIMITATIONS, EVIDENCE)
"""Pages whose measured figures come from a row in `benchmarks/`."""
TEXTS = [
    file for file in text_files() if file.suffix in (".md", ".py") and "tests" not in file.parts
]
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8} | {
    str(number): number for number in range(2, 10)
}


# Families


def miscounts(text: str) -> list[str]:
    """Phrases that count families wrongly, or speak of two where there are more."""
    nouns = r"(?:famil(?:y|ies)|packages?|demos|text encoders)\b"
    pairs = re.findall(
        rf"(?i)\b(?:both|either|neither)(?: of the| model|’s|'s)* {nouns}|\bthe other "
        rf"(?:family|package)\b",
        text,
    )
    counts = re.findall(
        rf"(?i)\b((?:{'|'.join(NUMBERS)}) (?:model )?(?:families|packages))\b", text
    )
    wrong = [phrase for phrase in counts if NUMBERS[phrase.split()[0].lower()] != len(FAMILIES)]
    return [*pairs, *wrong]


def test_a_text_speaks_of_as_many_families_as_there_are():
    wrong = {
        str(file.relative_to(ROOT)): miscounts(" ".join(file.read_text(encoding="utf-8").split()))
        for file in TEXTS
    }
    assert {file: phrases for file, phrases in wrong.items() if phrases} == {}


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and rows of tables, each on one line, without fenced blocks."""
    for part in re.split(r"\n\s*\n|\n(?= *[-*] |\||#)", FENCE.sub("\n\n", text)):
        if line := " ".join(part.split()):
            yield line


def gaps(text: str) -> list[str]:
    """What is named of several families and not of all: `wan-watch` and `flux2-watch`, say."""
    places: dict[str, set[str]] = {}
    for before, name, after in re.findall(
        rf"(packages/)?\b({'|'.join(FAMILIES)})(-[a-z]+|/[\w/.]+)", text
    ):
        if before or after.startswith("-"):
            places.setdefault(before + "…" + after, set()).add(name)
    return [place for place, names in places.items() if 1 < len(names) < len(FAMILIES)]


def test_a_paragraph_that_names_a_thing_of_two_families_names_it_of_all():
    assert {
        (str(page.relative_to(ROOT)), line): found
        for page in PAGES
        for line in paragraphs(page.read_text(encoding="utf-8"))
        if (found := gaps(line))
    } == {}


def test_a_wrong_count_of_families_is_found():
    assert miscounts("both families, of either package") == ["both families", "either package"]
    assert miscounts("two packages; the other family") == ["the other family", "two packages"]
    assert miscounts("eight families and both models") == []
    assert gaps("`wan-watch` and `flux2-watch` serve [it](../packages/wan/README.md)") == [
        "…-watch"
    ]
    assert (
        gaps(
            "`wan-watch`, `flux2-watch`, `flux3-watch`, `krea2-watch`, `ltx-watch`, `qwen-watch`, `qwenimage-watch`, `zimage-watch`; `flux2-train`"
        )
        == []
    )


def edits(spec: ModelSpec) -> bool:
    """Whether one of the family's models takes references."""
    presets = spec.architecture.presets.values()
    return any(spec.for_arch(arch).data.reference_size for arch in presets)


def makes_clips(spec: ModelSpec) -> bool:
    return spec.data.size[0] > 1


def is_guided(spec: ModelSpec) -> bool:
    """Whether samples of one of its models take a second prediction by default."""
    presets = spec.architecture.presets.values()
    defaults = [spec.for_arch(arch).auxiliary.sample_defaults(arch) for arch in presets]
    return any(default.guided_by == "negative" and default.guidance > 1 for default in defaults)


def families_in(text: str) -> set[str]:
    """The families that a text names by the names of their models."""
    found = set[str]()
    for family, name in sorted(NAMES.items(), key=lambda item: -len(item[1])):
        if name in text:
            found.add(family)
            text = text.replace(name, "")
    return found


@pytest.mark.parametrize(
    ("page", "pattern", "holds"),
    [
        ("README.md", r"two CPU cores\. (.*?) learn a motion, all others a place", makes_clips),
        ("README.md", r"\(images, but for (.*?)\)", makes_clips),
        ("docs/configuration.md", r"All but (.*?) take a folder of images", makes_clips),
        ("docs/tasks.md", r"For (.*?), photographs are clips", makes_clips),
        ("docs/tasks.md", r"## Motion (.*?) learn a motion", makes_clips),
        ("docs/tasks.md", r"## Edit pairs (.*?) learn an edit", edits),
        ("docs/captions.md", r"\| a motion \((.*?)\)", makes_clips),
        ("docs/captions.md", r"\| an edit \((.*?)\)", edits),
        ("docs/captions.md", r"\| model \| why \| \|---\|---\| (.*?) they sample", is_guided),
    ],
)
def test_a_sentence_about_some_families_names_those_of_which_it_is_true(page, pattern, holds):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    (models,) = re.findall(pattern, text)
    assert families_in(models) == {spec.name for spec in SPECS if holds(spec)}


def test_every_demo_has_a_trained_base_as_the_readme_says():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert "which their trained bases do not know" in text
    assert all(spec.demo.trained_base for spec in SPECS)


def test_families_are_read_from_a_sentence():
    assert families_in("Qwen-Image 2.1 and LTX-Video") == {"qwen", "ltx"}
    assert families_in("Wan, Qwen-Image-Edit") == {"wan", "qwenimage"}
    assert NAMES.keys() == FAMILIES.keys()


def test_the_page_of_experts_has_the_boundary_and_guidance_of_each_preset():
    page = (ROOT / "docs/experts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w.*?`) \| (0\.\d+) \| (.*?) \|$", page, re.MULTILINE)
    written = {
        name: (float(boundary), guidance)
        for names, boundary, guidance in rows
        for name in re.findall("`(.*?)`", names)
    }
    architecture = next(spec for spec in SPECS if spec.name == "wan").architecture
    of_presets = {name: architecture.experts(arch) for name, arch in architecture.presets.items()}
    assert written == {
        name: (experts[0].min_sigma, ", ".join(f"{expert.guidance:g}" for expert in experts))
        for name, experts in of_presets.items()
        if experts
    }


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_page_says_how_large_the_base_of_its_demo_is(spec):
    folder = ROOT / "packages" / spec.name
    page = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    base = folder / "src" / f"ditkit_{spec.name}" / "demo" / "base"
    written = re.findall(r"base of ([\d.]+) million parameters \(([\d.]+) MB with its VAE", page)
    if not spec.demo.trained_base:
        assert written == [] and "base has random weights" in page
        return
    with safe_open(base / "transformer.safetensors", "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
    size = sum(file.stat().st_size for file in base.iterdir())
    assert written == [(f"{sum(map(prod, shapes)) / 1e6:.1f}", f"{size / 1e6:.1f}")]


def test_the_readme_lists_every_command_of_a_family():
    table = README.read_text(encoding="utf-8").partition("## Commands")[2].partition("\n## ")[0]
    assert [name for name in OPTIONS if f"`uv run wan-{name} " not in table] == []


# The files of a run


def test_the_page_of_run_files_names_all_that_a_run_has():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    table = page.partition("## What a run writes")[2].partition("\n## ")[0]
    folder = RunFolder(Path("run"))
    paths = [path for name in vars(RunFolder) if isinstance(path := getattr(folder, name), Path)]
    names = [path.relative_to("run").as_posix() for path in paths]
    missing = [
        name
        for name in names
        if f"`{name}" not in table and f"`{name.rpartition('/')[0]}/`" not in table
    ]
    assert len(names) > 15 and missing == []


# What is missing, and what was removed


def missing_models(text: str) -> list[str]:
    """The last words of the models that a page calls missing: `klein-9b-kv`."""
    (sentence,) = re.findall(r"([^.\n:]*(?:\.\d[^.\n:]*)*) (?:is|are) missing\b", text)
    names = re.split(r", | and ", sentence.strip("- "))
    return [name.split()[-1].lower() for name in names]


def test_what_the_readme_calls_missing_is_no_preset_and_stands_in_the_limitations():
    presets = {name for family in FAMILIES.values() for name in family.presets}
    unsupported = LIMITATIONS.read_text(encoding="utf-8").partition("## Not supported")[2].lower()
    names = missing_models(README.read_text(encoding="utf-8"))
    assert (
        names
        and [(name, preset) for name in names for preset in presets if preset.startswith(name)]
        == []
    )
    assert [name for name in names if name not in unsupported] == []


def test_missing_models_are_read_from_a_sentence():
    assert missing_models("- Wan Animate and FLUX.2 klein-9b-kv are missing. More.") == [
        "animate",
        "klein-9b-kv",
    ]


def test_what_the_changelog_lists_as_removed_is_in_no_schema():
    removed = (
        CHANGELOG.read_text(encoding="utf-8").partition("### Removed")[2].partition("\n### ")[0]
    )
    removed = " ".join(removed.split())
    keys = [
        f"{section}.{key}"
        for key, section in re.findall(r"`(\w+)`(?: of| in) `\[(\w+)\]`", removed)
    ]
    assert len(keys) >= 3 and [key for key in keys if key in config_fields(RunConfig)] == []
    policies = re.findall(r"policies `(\w+)\(…\)`", removed)
    assert policies == ["ops"]
    for policy in policies:
        with pytest.raises(UserError):
            parse_schedule(f"{policy}(matmul)")


# Measured figures

UNIT = r"(?:%|(?:ms|s|µs|GB/s|MiB|GiB)\b|times as (?:fast|long)\b)"
FIGURE = re.compile(
    rf"(?<![\w.,×-])(\d+(?:,\d{{3}})*(?:\.\d+)?)(?:(?: to |–)(\d+(?:\.\d+)?))? ?(?={UNIT})"
)
MARK = re.compile(r"<!-- from ([\w./]+): (.+?)(?: \[([^]]+)\])? -->")
"""Behind a figure: the page in `benchmarks/`, what its rows contain, and their column if one is
meant."""


@dataclass(frozen=True)
class Claim:
    """A sentence or a row with figures, and the rows that it names."""

    text: str
    marks: tuple[tuple[str, str, str], ...]

    @property
    def figures(self) -> list[str]:
        """Numbers with a unit of time, memory, rate or share, `within …` left out."""
        plain = re.sub(r"[Ww]ithin \d+(\.\d+)? ?%", "", self.words)
        found = [number for pair in FIGURE.findall(plain) for number in pair if number]
        return found + [
            number for row in re.findall(r"(\d\.\d+)–(\d\.\d+)", plain) for number in row
        ]

    @property
    def shares(self) -> list[float]:
        """How far from 1 ratios may be: 0.05 of `within 5 %`."""
        return [
            float(number) / 100
            for number in re.findall(r"[Ww]ithin (\d+(?:\.\d+)?) ?%", self.words)
        ]

    @property
    def words(self) -> str:
        """The text without code, comments, pictures and targets of links."""
        text = re.sub(r"<!--.*?-->|`[^`]*`|!\[[^]]*\]\([^)]*\)", "", self.text)
        return re.sub(r"\]\([^)]*\)", "]", text)

    @property
    def is_tested(self) -> bool:
        """Whether it is a row of a table that names the test of its figures."""
        return self.text.startswith("|") and re.search(r"test_\w+\.py", self.text) is not None


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, each with the marks behind it; a row of a table is one."""
    if paragraph.startswith("|"):
        return [paragraph]
    return re.split(r"(?:(?<=[.!?])|(?<=-->)) (?=[A-Z*`\[])", paragraph)


def claims(page: Path) -> list[Claim]:
    lines = paragraphs(page.read_text(encoding="utf-8"))
    found = [Claim(text, tuple(MARK.findall(text))) for line in lines for text in sentences(line)]
    return [claim for claim in found if claim.figures or claim.shares or claim.marks]


def rows(page: str, key: str, column: str) -> Iterator[str]:
    """The lines of a page that contain a text, or their cells in a column."""
    heads: list[str] = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        if key in line and (not column or column in heads):
            yield cells[heads.index(column)] if column else line


def numbers(texts: Iterator[str]) -> set[str]:
    return {
        number.replace(",", "")
        for text in texts
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    }


def is_measured(figure: str, measured: set[str]) -> bool:
    """Whether a number was measured; it may have another unit (ms, %) and fewer digits."""
    figure = figure.replace(",", "")
    digits = len(figure.partition(".")[2])
    scaled = {float(number) * scale for number in measured for scale in (1, 100, 1000)}
    return any(f"{number:.{digits}f}" == figure for number in scaled)


def faults(claim: Claim) -> list[str]:
    """What of a claim is not in the rows that it names."""
    found: set[str] = set()
    for page, keys, column in claim.marks:
        for key in keys.split("; "):
            here = numbers(rows(page, key, column))
            if not here:
                return [f"{page} has no row {key} [{column}]"]
            found |= here
    off = [figure for figure in claim.figures if not is_measured(figure, found)]
    if claim.shares and max(abs(float(number) - 1) for number in found) > min(claim.shares) + 5e-4:
        off.append(f"within {claim.shares}")
    return off


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: page.name)
def test_every_measured_figure_names_its_row(page):
    assert [claim.text for claim in claims(page) if not claim.marks and not claim.is_tested] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_that_names_its_row_is_in_it(page):
    assert {
        claim.text: off for claim in claims(page) if claim.marks and (off := faults(claim))
    } == {}


def test_a_mark_is_of_its_own_sentence():
    text = "It takes 5 s. With it, 3 s.<!-- from a.md: b --> More."
    assert sentences(text) == ["It takes 5 s.", "With it, 3 s.<!-- from a.md: b -->", "More."]


def test_pages_name_rows():
    assert sum(len(claim.marks) for page in FIGURES for claim in claims(page)) > 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 52 ms, 203 ms in diffusers <!-- from benchmarks/a.md: klein 4B, none -->", []),
        ("takes 51 ms <!-- from benchmarks/a.md: klein 4B, none -->", ["51"]),
        ("0.98–1.05 of it <!-- from benchmarks/a.md: klein 4B, none; dev [ratio] -->", []),
        ("within 5 % <!-- from benchmarks/a.md: klein 4B, none; dev [ratio] -->", []),
        (
            "within 2 % <!-- from benchmarks/a.md: klein 4B, none; dev [ratio] -->",
            ["within [0.02]"],
        ),
        ("takes 52 ms <!-- from benchmarks/a.md: Wan -->", ["benchmarks/a.md has no row Wan []"]),
    ],
)
def test_a_figure_that_is_in_no_row_is_found(text, expected, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    page = (
        "| step | ours | diffusers | ratio |\n|---|---|---|---|\n"
        "| klein 4B, none | 0.05214 s | 0.2027 s | 1.05 |\n| dev | 2 s | 3 s | 0.98 |\n"
    )
    (tmp_path / "benchmarks" / "a.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert faults(Claim(text, tuple(MARK.findall(text)))) == expected
