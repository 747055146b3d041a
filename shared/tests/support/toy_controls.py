"""A toy that is conditioned on where to go: by a word next to each clip, or a file of numbers, and
by a video that goes with it."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from media_files import picture
from torch import Tensor
from toy_world import World

from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import MissingDependency, UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs, Column
from ditkit_core.testing.specs import altered

COLUMNS = (
    Column(name="direction", kind="text", doc="left or right."),
    Column(name="poses", kind="table", doc="One number."),
    Column(name="control_video", kind="video", doc="What the clip follows."),
)


class Way:
    """`way` [1]: -1 or 1 by the word in `direction`, or the number in the file `poses`; `bright`
    [1] of the control video."""

    kind, optional, items_at_once, identity = "way", False, 1, "way"

    def __init__(self) -> None:
        self.asked: list[ClipInputs] = []
        self.lacks = ""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        if self.lacks:
            raise MissingDependency(f"{self.lacks} is not installed; install it")
        used = tuple(column.name for column in COLUMNS if column.name in controls.files)
        if "direction" not in used and "poses" not in used:
            raise UserError(
                f"{controls.clip or 'a drawing'} has no direction and no poses; give one"
            )
        return used

    def check(self, controls: ClipInputs) -> None:
        self.asked.append(controls)
        self.uses(controls)
        self._read(controls)

    def load(self) -> None:
        pass

    def unload(self) -> None:
        pass

    def encode(
        self, items: Sequence[ClipInputs], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (controls,) = items
        advance(1.0)
        return [self._read(controls)]

    def _read(self, controls: ClipInputs) -> dict[str, Tensor]:
        item, files = {}, controls.files
        if "control_video" in files:
            clip = read_clip(
                Path(files["control_video"]), frames=controls.frames, fps=controls.fps,
                height=controls.height,
                width=controls.width, start_seconds=controls.start_seconds,
            )  # fmt: skip
            item["bright"] = clip.mean()[None]
        if "poses" in files:
            try:
                return {**item, "way": torch.tensor([float(Path(files["poses"]).read_text())])}
            except ValueError as error:
                raise UserError(f"{files['poses']} is no number; write one") from error
        if files["direction"] not in ("left", "right"):
            raise UserError(f"direction = {files['direction']!r}: use left or right")
        return {**item, "way": torch.tensor([1.0 if files["direction"] == "right" else -1.0])}


class Guided(World):
    """Four images that each go left or right."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.way = Way()
        self.spec = altered(
            self.spec, columns=lambda arch: COLUMNS, conditioners=lambda *given: [self.way]
        )
        self.clips = folder / "clips"
        shutil.rmtree(self.clips)
        self.lines: list[dict[str, Any]] = []
        for number, colour in enumerate(("teal", "gold", "navy", "red")):
            self.put(f"{number}.png", colour, direction=("left", "right")[number % 2])

    def put(
        self, name: str, colour: str = "white", size: tuple[int, int] = (16, 16), **columns: Any
    ) -> None:
        """Add an image, and what goes with it."""
        picture(self.clips / name, size, colour)
        self.list(name, **columns)

    def list(self, name: str, **columns: Any) -> None:
        """Add a line to the metadata."""
        self.lines.append({"file_name": name, "text": f"picture {name}", **columns})
        lines = "\n".join(map(json.dumps, self.lines))
        (self.clips / "metadata.jsonl").write_text(lines)

    def check(self, *flags: str) -> tuple[int, dict[str, Any]]:
        """Exit status and JSON of a check."""
        status = self.run(
            "train",
            "--run.folder",
            str(self.folder / "run"),
            "--train.steps",
            "1",
            "--check",
            *flags,
        )
        return status, json.loads((self.folder / "run" / "check.json").read_text())
