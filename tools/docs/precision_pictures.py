"""What low precision does to a picture: the demos' bases sampled with other dtypes, for
docs/precision.md. Writes docs/pictures/precision.png and prints the table of
benchmarks/precision_cpu.md.

    uv run tools/docs/precision_pictures.py
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFont

import demo_pictures
from ditkit_core.diagnostics.audit.pictures import GAIN

FAMILIES = {"wan": "Wan", "flux2": "FLUX.2", "zimage": "Z-Image"}
"""The demos, by the names of their commands."""
_TILE, _GAP, _LINE = 96, 4, 20


def sampled(family: str) -> Mapping[str, Image.Image]:
    """The pictures of a demo's base by the name of their dtypes, of a clip the first frame; prints
    their rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = Path(sys.executable).with_name(f"{family}-train")
        flags = ["--demo", "--audit-precision", "--pictures", "--model.dtype", "bf16"]
        subprocess.run(
            [command, *flags, "--run.folder", f"{folder}/run"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        written = Path(folder) / "run" / "audit" / "pictures"
        images = {}
        for one in json.loads((written / "pictures.json").read_text())["pictures"]:
            print(
                f"| {FAMILIES[family]}, {one['name']} | {one['mean']:.2f} | {one['largest']:.0f} |"
            )
            with Image.open(written / one["file"]) as image:
                side = image.height
                images[one["name"]] = image.convert("RGB").crop((0, 0, side, side))
        return images


def main() -> None:
    """Sample, and write the picture."""
    print("| demo, dtypes | mean difference | largest |\n|---|---:|---:|")
    rows = {name: sampled(family) for family, name in FAMILIES.items()}
    columns = list(next(iter(rows.values())))
    sheet = Image.new(
        "RGB",
        (len(columns) * (_TILE + _GAP), _LINE + 2 * len(rows) * (_TILE + _GAP)),
        "white",
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, name in enumerate(columns):
        left = column * (_TILE + _GAP)
        draw.text((left, 2), name, "#1b1f24", font)
        for row, images in enumerate(rows.values()):
            exact, image = images[columns[0]], images[name]
            difference = ImageChops.difference(image, exact).point(lambda level: GAIN * level)
            for half, shown in enumerate((image, difference)):
                top = _LINE + (2 * row + half) * (_TILE + _GAP)
                sheet.paste(shown.resize((_TILE, _TILE), Image.Resampling.NEAREST), (left, top))
    demo_pictures.write_picture(sheet, demo_pictures.FOLDER / "precision.png", {})


if __name__ == "__main__":
    main()
