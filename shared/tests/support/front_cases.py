"""Random command lines, run files and datasets for the front door, each a function of a seed; and
the least of one that still fails."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from malformed import CATALOGUE, good
from toy_world import World

from ditkit_core.config.schema import config_fields
from ditkit_core.run.config import RunConfig

KEYS = {key: field.type for key, field in config_fields(RunConfig).items()}
LONG = "9" * 5000

JUNK = [
    "", " ", "x", "äöü 🐕", "a\0b", "a\nb", "\udcff", "\x1b[31m", "y" * 5000, "../..", "/dev/null/x",
    "~", "-1", "0", "1", "3",
    "1e400", "nan", "inf", "-inf", "1.5", "1e-30", str(10**30), LONG, f"-{LONG}", "true", "false",
    "null", "none", "[]", '["a"',
    "[" * 3000, "[1, 2]", '["a", 1]', "[[1]]", "{}", '{"a": 1}', "2024-01-01", "0x10", "1_000",
    "cuda:7", "meta", "a=b", "bf16", "[nan]",
]  # fmt: skip
"""What anybody may write behind a flag."""

LITERALS = [
    "1", "-1", "0", "1.5", "nan", "-inf", "1e400", str(10**30), "true", '"x"', '""', "'~'",
    '"\\u0000"', "[]", "[1]", '["a", 1]',
    "[[1]]", "[true]", "{a = 1}", "2024-01-01", "12:00:00", "[1e400]", '"äöü 🐕"',
    '"' + "y" * 5000 + '"', LONG,
]  # fmt: skip
"""What may stand behind a key of a run file."""

TEXTS = [
    b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"[train", b"train = 3", b"[train]\n[train]",
    b"[[train]]\nsteps = 1", b"a.b.c.d = 1",
    b'"" = 1', b"[x]\ny = 1", b"x = " + b"[" * 20_000, b"x = {" * 3000, b"steps = 1",
    b"[train]\nsteps = 1\nsteps = 2", b"= 1",
    b"[data.deep]\nx = 1", "[дата]\nпапка = 'x'".encode(), b"x = '''", b"[train]\rsteps = 1",
]  # fmt: skip
"""Whole run files."""

CHEAP: dict[str, list[str]] = {
    "train.steps": ["1"], "train.batch_size": ["1", "2"], "train.accumulation": ["1", "2"],
    "train.threads": ["0", "1"],
    "train.device": ["auto", "cpu"], "train.devices": ["[]"], "adapter.rank": ["1", "2"],
    "data.frames": ["1", "5"],
    "data.height": ["16", "32"], "data.width": ["16", "32"], "data.clips_per_file": ["1", "2"],
    "data.tag_variants": ["4", "2"],
    "prior.images": ["2"], "prior.prompt": [""], "prior.folder": [""], "sample.prompts": ["[]"],
    "sample.captions": ["0", "1"],
    "sample.images": ["1"], "sample.steps": ["0", "1"], "sample.frames": ["0", "1"],
    "sample.height": ["0", "16"],
    "sample.width": ["0", "16"], "sample.every_steps": ["0", "1"], "sample.device": ["", "cuda:7"],
    "held_out.clips": ["0", "1"], "held_out.sigmas": ["[0.5]"],
    "base.quantize": ["none"], "data.bucket_step": ["0", "16"], "train.split_points": ["[]"],
    "train.swap_blocks": ["[]", "[1]"],
    "run.folder": ["run"], "encode.cache": ["cache", ""], "data.max_aspect": ["1", "2"],
    "train.attention": ["sdpa", "math"],
    "optim.name": ["adamw", "muon", "adafactor"], "train.checkpointing": ["none", "full"],
    "export.merged": ["false", "true"],
}  # fmt: skip
"""What is tried beyond reading where another value would take minutes or memory, as it is asked
for."""

HEAVY = {
    "png with a bomb of text",
    "clip 10000 wide",
    "10000 high",
    "10000 wide",
    "caption of a megabyte",
}
ENTRIES = [
    name for name, each in CATALOGUE.items() if each.outcome != "refused" and name not in HEAVY
]
WHOLE = [name for name, each in CATALOGUE.items() if each.outcome == "refused"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is thrown at the front door."""

    seed: int
    flags: tuple[tuple[str, ...], ...] = ()
    file: bytes | None = None
    entries: tuple[str, ...] = ()
    """Of the catalogue."""
    lines: tuple[str, ...] = ()
    """More of metadata.jsonl; with any, or with an entry that is one, the dataset is listed
    there."""
    sound: int = 2
    """Images with nothing wrong."""
    steps: tuple[Literal["plan", "check"], ...] = ()
    """What is done where the configuration can be read."""

    def smaller(self) -> Iterator["Case"]:
        """The same with one thing less."""
        for name in ("flags", "entries", "lines", "steps"):
            items = getattr(self, name)
            yield from (
                replace(self, **{name: items[:i] + items[i + 1 :]}) for i in range(len(items))
            )
        if self.file is not None:
            rows = self.file.split(b"\n")
            yield replace(self, file=None)
            yield from (
                replace(self, file=b"\n".join(rows[:i] + rows[i + 1 :]))
                for i in range(len(rows) * (len(rows) > 1))
            )

    def arguments(self, world: World) -> list[str]:
        """The command line behind the sound flags of the world."""
        given = [text for flag in self.flags for text in flag]
        if self.file is not None:
            path = world.folder / "run.toml"
            path.write_bytes(self.file)
            given.append(str(path))
        return given

    def write(self, folder: Path) -> None:
        """The dataset."""
        lines = good(folder, self.sound)
        listed = bool(self.lines)
        for i, name in enumerate(self.entries):
            each = CATALOGUE[name]
            said = each.put(folder, f"bad{i}x")
            lines += [said] if each.listed else []
            listed |= each.listed
        if listed and not any(name in WHOLE for name in self.entries):
            (folder / "metadata.jsonl").write_text(
                "\n".join([*lines, *self.lines]), encoding="utf-8"
            )


def least(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case that still fails, one thing being left out at a time."""
    while (found := next((other for other in case.smaller() if fails(other)), None)) is not None:
        case = found
    return case


def random_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(f"front {seed}")
    if draw.random() < 0.15:
        return replace(_of_data(draw), seed=seed)
    case = _of_settings(draw)
    # Reading takes no time, training does.
    return replace(case, seed=seed, steps=() if seed % 2 else case.steps)


def _of_settings(draw: random.Random) -> Case:
    """Settings, most of them wrong, over a sound dataset."""
    if draw.random() < 0.1:
        return Case(seed=0, file=draw.choice(TEXTS), steps=("check",))
    sane = draw.random() < 0.15
    flags, rows, wild = [], [], False
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(list(KEYS))
        if sane or draw.random() < 0.3:
            flags.append((f"--{key}", _fitting(draw, key, KEYS[key])))
        elif draw.random() < 0.5:
            name = _misspelt(draw, key) if draw.random() < 0.1 else key
            flags.append((f"--{name}={draw.choice(JUNK)}",))
            wild |= key in CHEAP
        else:
            section, name = key.split(".")
            rows.append(
                f"[{section}]\n{_misspelt(draw, name) if draw.random() < 0.1 else name} = "
                f"{draw.choice(LITERALS)}"
            )
            wild |= key in CHEAP
    file = "\n".join(rows).encode() if rows else None
    steps: tuple[Any, ...] = () if wild else (("plan",) if draw.random() < 0.05 else ("check",))
    return Case(seed=0, flags=tuple(flags), file=file, steps=steps)


def _of_data(draw: random.Random) -> Case:
    """A dataset of anything, under settings that go with it."""
    flags = [
        ("--data.frames", draw.choice(["1", "5", "9"])),
        ("--data.on_bad", draw.choice(["error", "skip", "skip", "skip"])),
    ]
    flags += [("--data.short_clips", draw.choice(["skip", "skip", "shorten", "error"]))]
    flags += [draw.choice([("--data.windows", "all"), ("--data.buckets", "true"),
        ("--data.captions", "lines"), ("--data.image_folders", "true"),
                           ("--held_out.clips", "1"), ("--train.batch_size", "2"),
                           ("--data.shuffle_tags", "true"), ("--data.fps", "3.5")])]  # fmt: skip
    entries = tuple(draw.sample(ENTRIES, draw.randint(1, 5)))
    if draw.random() < 0.1:
        entries = (draw.choice(WHOLE),)
    lines = tuple(line_of_metadata(draw) for _ in range(draw.choice([0, 0, 1, 3])))
    return Case(
        seed=0, flags=tuple(flags), entries=entries, lines=() if entries[0] in WHOLE else lines,
        sound=draw.randint(0, 3),
        steps=("check",),
    )  # fmt: skip


def line_of_metadata(draw: random.Random) -> str:
    """A line of metadata."""
    values: list[Any] = [
        None, True, 0, -1.5, float("nan"), 10**40, "", " ", "x", "good0.png", "good1.png", ".",
        "..", "/", "C:\\a.png", "a\0.png", "\ud800",
        "gone.mp4", [], ["x"], [["x"]], {}, {"a": "b"}, "🐕", "x" * 300, "good0.png ",
    ]  # fmt: skip
    keys = [
        "file_name",
        "text",
        "video",
        "prompt",
        "caption",
        "control_video",
        "start_image",
        "direction",
        "references",
        "id",
        "",
        "🐕",
        "Text",
    ]
    row = {draw.choice(keys): draw.choice(values) for _ in range(draw.randint(0, 4))}
    row |= {"file_name": "good0.png"} if draw.random() < 0.5 else {}
    text = json.dumps(row)
    cut = draw.random()
    return (
        text
        if cut < 0.7
        else text[: draw.randint(0, len(text))]
        if cut < 0.9
        else draw.choice(JUNK).replace("\udcff", "?")
    )


def _misspelt(draw: random.Random, key: str) -> str:
    place = draw.randrange(len(key) + 1)
    return key[:place] + draw.choice(["x", "-", ".", "é", "_", ""]) + key[place + 1 :]


def _fitting(draw: random.Random, key: str, hint: Any) -> str:
    """A value that the type takes."""
    if key in CHEAP:
        return draw.choice(CHEAP[key])
    if get_origin(hint) is Literal:
        return draw.choice(get_args(hint))
    if hint is bool:
        return draw.choice(["true", "false"])
    if hint in (int, float):
        return draw.choice(["0", "1", "2", "3", "0.5", "1e-4", "-1"])
    if hint is str:
        return draw.choice(["", "x", "x/y", "tests"])
    return draw.choice(["[]", "[0.5]", "[1]", '["x"]', "bf16", "fp32", "[0.1, 0.9]"])
