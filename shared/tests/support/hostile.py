"""Input of unknown origin, each case a function of a seed: what it is made of, and what is done
with it.

A kind is prepared once in a folder of its own, and then asked for one case after the other.
`tools/faults/fuzz_models.py` has the two kinds that need the model packages, `fuzz_media.py` the
four of media and captions, and `tools/faults/fuzz.py` runs all of them with limits of time and
memory.
"""

import contextlib
import copy
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from data_specs import EVERY_LENGTH
from front_cases import JUNK, KEYS, LITERALS, TEXTS, line_of_metadata, random_case
from malformed import CATALOGUE, good
from media_files import numbered_video, picture
from safetensors.torch import load_file, save_file
from toy_world import World

from ditkit_core.commands import cli
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.clip import probe, read_clip
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.paths import ModelPaths, nothing_fetched
from ditkit_core.testing.toy import TOY

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(10**400), 1e-320, 0.5, float("nan"),
    float("inf"), "", " ", "x", "\0", "\ud800",
    "\x1b[2J", "é🐕", "../..", "/etc/passwd", "x" * 5000, [], {}, [[]], [1], ["a", 1], {"a": 1},
    [[[[]]]], [0] * 1000, "(a+)+$", "((.*)*)*X",
)  # fmt: skip
"""What may stand where a file has something else."""


class Kind(Protocol):
    """One kind of input."""

    def prepare(self, folder: Path) -> None:
        """Write what all cases share."""

    def use(self, draw: random.Random, folder: Path) -> None:
        """Write one case into an empty folder, and use it; UserError if it is refused."""


class CommandFailed(UserError):
    """A command that ended with an error of its own; the message is all that it printed."""


def run_command(run: Callable[[], int]) -> None:
    """Run a command, and hold it to its contract.

    Raises:
        CommandFailed: If it refused its input.
        AssertionError: If it did so without a line, or printed what changes a terminal.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = run()
    text = said.getvalue()
    hostile = sorted(
        {character for character in text if not character.isprintable()} - set("\n\t ")
    )
    assert not hostile, f"prints {hostile}"
    assert status in (0, 1, 2, 3), f"ends with {status}: {text[-500:]}"
    if status in (1, 2):
        assert any(line.startswith("error: ") for line in text.splitlines()), (
            f"no clear line: {text[-500:]}"
        )
        raise CommandFailed(text)


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes with a few faults: flipped, cut, left out, repeated, or strange ones inserted."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place, length = draw.randrange(len(found) + 1), draw.choice((1, 2, 4, 16, 256))
        match draw.randrange(5):
            case 0:
                found[place : place + length] = draw.randbytes(length)
            case 1:
                del found[place:]
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length] * draw.choice((1, 50))
            case 4:
                found[place:place] = draw.choice(
                    (b"\0", b"\xff\xff\xff\xff", b"{", b"[" * 2000, b'"', b"1e999", b"\xed\xa0\x80")
                )
    return bytes(found)


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Each container and key in a value, so far down as a file of its kind has something to say."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, inner in items[:200]:
        yield value, key
        if depth < 6:
            yield from _places(inner, depth + 1)


def damaged_json(draw: random.Random, value: Any, values: Sequence[Any] = VALUES) -> bytes:
    """A JSON file with a few values or keys changed, left out or moved; seldom with damaged bytes,
    or nested deeply."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            break
        owner, key = draw.choice(places)
        other, other_key = draw.choice(places)
        match draw.randrange(6):
            case 0 | 1 | 2:
                owner[key] = copy.deepcopy(draw.choice(values))  # later changes go into the copy
            case 3:
                del owner[key]
            case 4:
                owner[key] = (
                    json.loads(json.dumps(other[other_key]))
                    if other_key in other or isinstance(other, list) and other_key < len(other)
                    else None
                )
            case 5 if isinstance(owner, dict):
                owner[str(draw.choice(values))] = owner[key]
    text = json.dumps(draw.choice(values) if draw.random() < 0.02 else value)
    if draw.random() < 0.03:
        text = text.replace(
            draw.choice(("1", ": ", '"')),
            draw.choice(("[" * 100_000, '{"a":' * 50_000, "9" * 5000, "1e999", "-0")),
            1,
        )
    return damaged_bytes(draw, text.encode()) if draw.random() < 0.1 else text.encode()


class TomlFiles:
    """Run files."""

    def prepare(self, folder: Path) -> None:
        self.world = World(folder)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert self.world.run("train", "--print-config") == 0
        self.lines = said.getvalue().splitlines()

    def use(self, draw: random.Random, folder: Path) -> None:
        lines, data = list(self.lines), draw.choice(TEXTS)
        if draw.random() < 0.9:
            for _ in range(draw.choice((1, 1, 3, 10))):
                place = draw.randrange(len(lines))
                name = lines[place].partition(" = ")[0]
                lines[place] = draw.choice(
                    (
                        f"{name} = {draw.choice(LITERALS)}",
                        draw.choice(JUNK).replace("\udcff", "?"),
                        "",
                        lines[place] * 2,
                    )
                )
            data = "\n".join(lines).encode()
        path = folder / "run.toml"
        path.write_bytes(damaged_bytes(draw, data) if draw.random() < 0.3 else data)
        run_command(lambda: self.world.run("train", str(path), "--print-config"))


class Flags:
    """Command lines."""

    def prepare(self, folder: Path) -> None:
        self.world = World(folder)

    def use(self, draw: random.Random, folder: Path) -> None:
        given = [text for flag in random_case(draw.randrange(10**9)).flags for text in flag]
        for _ in range(draw.choice((0, 0, 1, 2))):
            given.insert(
                draw.randrange(len(given) + 1),
                draw.choice(
                    (
                        draw.choice(JUNK),
                        "--" + draw.choice(list(KEYS)),
                        "--check",
                        "--fit",
                        "-h",
                        "--",
                    )
                ),
            )
        command = draw.choice(("train", "train", "encode", "sample", "export"))
        run_command(lambda: self.world.run(command, *given, "--print-config"))


class HubIds:
    """Paths and hub ids of models, with nothing to fetch."""

    def prepare(self, folder: Path) -> None:
        self.parts = (
            "transformer",
            "transformer_2",
            "vae",
            "text_encoder",
            "tokenizer",
            "image_encoder",
            "scheduler",
        )

    def use(self, draw: random.Random, folder: Path) -> None:
        pieces = ("a", "Wan-AI", "..", ".", "/", "//", "\\", "~", "~x", ":", "@", "\0", "\n", "é",
            "-", "_", " ", "x" * 300, "\udcff", "model.safetensors", "%2e")  # fmt: skip
        value = (
            draw.choice(JUNK)
            if draw.random() < 0.3
            else "".join(draw.choices(pieces, k=draw.randint(1, 6)))
        )
        if draw.random() < 0.3:
            value = f"owner/name/{value}"
        own = draw.choice((*self.parts[:6], "base", "base", "base"))
        model, errors = ModelPaths(**{own: value}), []
        for part in self.parts:
            for look in (model.here, model.is_elsewhere, model.is_to_be_fetched, model.locate):
                try:
                    with nothing_fetched():
                        look(part)
                except UserError as error:
                    errors.append(error)
            if model.is_elsewhere(part):
                model.fetch_commands([part])
        with nothing_fetched():
            arch_here(TOY, model)
        if errors:
            raise errors[0]


class Metadata:
    """Lists of a dataset, and captions."""

    def prepare(self, folder: Path) -> None:
        self.names = [
            name
            for name, each in CATALOGUE.items()
            if each.kind in ("metadata", "caption") and "megabyte" not in name
        ]

    def use(self, draw: random.Random, folder: Path) -> None:
        lines = good(folder)
        if draw.random() < 0.2:
            each = CATALOGUE[draw.choice(self.names)]
            said = each.put(folder)
            lines += [said] if each.listed else []
        lines += [line_of_metadata(draw) for _ in range(draw.choice((0, 1, 3)))]
        if not any(folder.glob("metadata.*")) and draw.random() < 0.9:
            data = "\n".join(lines).encode("utf-8", "surrogatepass")
            name = draw.choice(
                ("metadata.jsonl", "metadata.jsonl", "metadata.json", "metadata.csv")
            )
            if name == "metadata.json":
                data = (
                    b"[" + b",".join(line.encode("utf-8", "surrogatepass") for line in lines) + b"]"
                )
            elif name == "metadata.csv":
                data = b"video,prompt\n" + b"\n".join(
                    f"good{i}.png,{draw.choice(JUNK)}".encode("utf-8", "replace") for i in range(2)
                )
            (folder / name).write_bytes(damaged_bytes(draw, data) if draw.random() < 0.5 else data)
        elif draw.random() < 0.5:
            (folder / draw.choice(("good0.txt", "prompts.txt", "videos.txt"))).write_bytes(
                damaged_bytes(draw, b"a caption\nanother")
            )
        config = DataConfig(
            folder=str(folder), frames=1, height=16, width=16, on_bad=draw.choice(("error", "skip"))
        )
        scan(config, EVERY_LENGTH)


class SafetensorsHeaders:
    """Headers of weights."""

    def prepare(self, folder: Path) -> None:
        self.world = World(folder)
        self.header, self.data = header_of(folder / "toy.safetensors")

    def use(self, draw: random.Random, folder: Path) -> None:
        path = folder / draw.choice(("x.safetensors", "\x1b[2J.safetensors"))
        header = {
            **self.header,
            "__metadata__": {
                draw.choice(("format", "\x1b[31m", "_quantization_metadata")): draw.choice(
                    ("pt", "[" * 20_000, "\r")
                )
            },
        }
        raw = (
            damaged_header(draw, header, len(self.data))
            if draw.random() < 0.8
            else json.dumps(header).encode()
        )
        length = draw.choice(
            (len(raw),) * 12 + (0, len(raw) + 1, len(raw) - 1, 2**63, 2**40, 10**8)
        )
        data = self.data if draw.random() < 0.9 else self.data[: draw.randrange(len(self.data))]
        path.write_bytes(length.to_bytes(8, "little") + raw + data)
        run_command(lambda: self.world.run("export", "--inspect", str(path)))
        source = SafetensorsSource.open(folder if draw.random() < 0.5 else path)
        source.fingerprint()
        for name in source.tensors:
            source.read(name)


class AdapterHeaders:
    """Headers and keys of adapters."""

    def prepare(self, folder: Path) -> None:
        self.world = World(folder)
        tensors = {}
        for name, weight in load_file(folder / "toy.safetensors").items():
            if weight.dim() == 2 and name.endswith(".weight") and "blocks." in name:
                stem = f"transformer.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.ones(2, weight.shape[1])
                tensors[f"{stem}.lora_B.weight"] = torch.ones(weight.shape[0], 2)
        save_file(tensors, folder / "lora.safetensors")
        self.header, self.data = header_of(folder / "lora.safetensors")
        self.config = {"transformer.r": 2, "transformer.lora_alpha": 2,
            "transformer.use_rslora": False,
                       "transformer.alpha_pattern": {"qkv": 4, r"^blocks\.0\.out": 1},
                       "transformer.rank_pattern": {"qkv": 2}}  # fmt: skip
        self.endings = (
            "lora_A.weight",
            "lora_B.weight",
            "lora_down.weight",
            "lora_up.weight",
            "alpha",
            "dora_scale",
            "lokr_w1",
            "hada_w1_a",
            "diff",
        )
        self.starts = (
            "transformer.",
            "transformer_2.",
            "diffusion_model.",
            "lora_unet_",
            "base_model.model.",
            "",
            "\x1b[2J",
        )

    def use(self, draw: random.Random, folder: Path) -> None:
        header = dict(self.header)
        for name in draw.sample(list(header), draw.choice((0, 0, 1, 3))):
            stem, _, ending = name.partition(".lora_")
            ending = draw.choice((f"lora_{ending}", draw.choice(self.endings)))
            header[draw.choice(self.starts) + stem.removeprefix("transformer.") + "." + ending] = (
                header.pop(name)
            )
        for name in draw.sample(list(header), draw.choice((0, 0, 1))):
            header[name] = {
                **header[name],
                "shape": draw.choice(([2, 2], [], [1], [10**6, 1], header[name]["shape"][::-1])),
            }
        about = damaged_json(draw, self.config, (*VALUES, r".*\.qkv", "([a-z0-9_.]+)+X"))
        key = draw.choice(
            ("lora_adapter_metadata",) * 4
            + ("ditkit.config", "ditkit.base", "_quantization_metadata", "\x1b[2J")
        )
        header["__metadata__"] = {key: about.decode("utf-8", "replace"), "format": "pt"}
        raw = (
            json.dumps(header).encode()
            if draw.random() < 0.8
            else damaged_header(draw, header, len(self.data))
        )
        path = folder / "lora.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + self.data)
        if draw.random() < 0.2:
            (folder / "adapter_config.json").write_bytes(damaged_json(draw, self.config))
        more = draw.choice((("--inspect", str(path)), ("--inspect", str(path)), ("--adapter",
            str(path), "--to", draw.choice(("diffusers", "official", "musubi")), "--out",
            str(folder / "out.safetensors"))))  # fmt: skip
        run_command(lambda: self.world.run("export", *more))


class RunFolders:
    """What a run left, read again when it is continued or reported."""

    def prepare(self, folder: Path) -> None:
        self.world = World(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert (
                self.world.train(
                    "run",
                    2,
                    "--save.every_steps",
                    "1",
                    "--save.keep_last",
                    "2",
                    "--sample.captions",
                    "0",
                )
                == 0
            )
        shutil.rmtree(folder / "run" / "exports", ignore_errors=True)
        self.run = folder / "run"
        names = (".json", ".jsonl", ".toml", ".safetensors", ".owner", ".csv")
        self.files = [
            path.relative_to(self.run)
            for path in sorted(self.run.rglob("*"))
            if path.is_file() and path.suffix in names
        ]

    def use(self, draw: random.Random, folder: Path) -> None:
        copy = folder / "run"
        shutil.copytree(self.run, copy)
        for name in draw.sample(self.files, draw.choice((1, 1, 2))):
            path = copy / name
            data = path.read_bytes()
            if path.suffix == ".json" and draw.random() < 0.7:
                data = damaged_json(draw, json.loads(data))
            elif path.suffix == ".jsonl" and draw.random() < 0.7:
                lines = data.splitlines()
                place = draw.randrange(len(lines))
                lines[place] = damaged_json(draw, json.loads(lines[place]))
                data = b"\n".join(lines) + b"\n"
            else:
                data = damaged_bytes(draw, data)
            path.write_bytes(data)
        if draw.random() < 0.5:
            (copy / "complete.json").unlink(missing_ok=True)
        more = draw.choice((("--report",), ("--train.steps", "3")))
        run_command(lambda: cli.run(self.world.spec, "train", ["--run", str(copy), *more]))


class MediaFiles:
    """Images and videos."""

    def prepare(self, folder: Path) -> None:
        self.files = [numbered_video(folder / "a.mp4"), picture(folder / "a.png")]
        self.files += [picture(folder / f"a.{suffix}") for suffix in ("jpg", "webp", "bmp", "tif")]

    def use(self, draw: random.Random, folder: Path) -> None:
        source = draw.choice((self.files[0], *self.files))
        path = (
            folder
            / f"x{draw.choice((source.suffix, source.suffix, source.suffix, '.mp4', '.png', '.jpg'))}"
        )
        path.write_bytes(damaged_bytes(draw, source.read_bytes()))
        path.with_suffix(".txt").write_text("a caption")
        config = DataConfig(folder=str(folder), frames=1, height=16, width=16, on_bad="skip")
        try:
            found = probe(path)
            assert found
        finally:
            try:
                scan(config, EVERY_LENGTH)
            finally:
                read_clip(path, frames=draw.choice((1, 5)), fps=8.0, height=16, width=16)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def damaged_header(draw: random.Random, header: Mapping[str, Any], num_bytes: int) -> bytes:
    """A header with damaged entries: with places and shapes near the right ones, or anything."""
    near = (
        0,
        1,
        8,
        num_bytes,
        num_bytes - 8,
        num_bytes + 8,
        [0, num_bytes],
        [0, 0],
        [8, 0],
        [2**40, 2**40],
        "F32",
        "F64",
        "BF16",
        "F8_E4M3",
        "U8",
        "I4",
    )
    return damaged_json(draw, dict(header), draw.choice((near, VALUES)))


KINDS: dict[str, Callable[[], Kind]] = {
    "toml": TomlFiles,
    "flags": Flags,
    "hub-ids": HubIds,
    "metadata": Metadata,
    "safetensors": SafetensorsHeaders,
    "adapters": AdapterHeaders,
    "runs": RunFolders,
    "media": MediaFiles,
}
"""Those that need no model package."""
