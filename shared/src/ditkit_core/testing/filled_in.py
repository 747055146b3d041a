"""Which places of a package that the generator wrote an author has still to fill in."""

import re
from pathlib import Path

MARK = re.compile(r"FILL IN (\d+): *(.*)")


def marks(folder: Path) -> list[tuple[int, str, str]]:
    """Every marked place as (number of the step, file and line, what belongs there), in order of
    work."""
    marked = []
    for file in sorted(
        path for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")
    ):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if match := MARK.search(line):
                marked.append(
                    (
                        int(match[1]),
                        f"{file.relative_to(folder).as_posix()}:{number}",
                        match[2].strip(),
                    )
                )
    return sorted(marked)


def next_step(folder: Path) -> str:
    """One line: the next place to fill in, and how many there are."""
    marked = marks(folder)
    if not marked:
        return "every place is filled in"
    step, location, task = marked[0]
    return f"next: step {step} of the guide, {location}: {task} ({len(marked)} places are marked)"
