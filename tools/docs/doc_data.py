"""Tables of columns that metadata may have: of every model, and of Wan's conditions."""

from collections.abc import Iterator

from ditkit_core.data.columns import (
    CAPTION_COLUMNS,
    MEDIA_COLUMNS,
    NUMBERED_REFERENCES,
    REFERENCE_COLUMNS,
)
from ditkit_core.data.masks import MASK
from ditkit_wan.spec import WAN


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def metadata_columns() -> Iterator[str]:
    """The columns that every model knows."""
    yield "| column | also called | |"
    yield "|---|---|---|"
    for names, doc in (
        (MEDIA_COLUMNS, "the clip or image, relative to the folder"),
        (CAPTION_COLUMNS, "its caption, or a list of captions"),
        (
            (*REFERENCE_COLUMNS, NUMBERED_REFERENCES),
            (
                f"images to edit, for models that edit: one path, or a list of them in order, or "
                f"`{NUMBERED_REFERENCES}_0`, `{NUMBERED_REFERENCES}_1`, …"
            ),
        ),
        ((MASK.name, *MASK.aliases), "its loss mask: an image, or a video for a clip"),
    ):
        yield f"| `{names[0]}` | {_names(names[1:])} | {doc} |"


def control_columns() -> Iterator[str]:
    """The columns of Wan's conditions; which presets take them is on the same page."""
    columns = {
        column.name: column
        for arch in WAN.architecture.presets.values()
        for column in WAN.for_arch(arch).data.columns(arch)
    }
    yield "| column | also called | kind | |"
    yield "|---|---|---|---|"
    for name, column in sorted(columns.items()):
        kind = f"{column.kind}, required" if column.required else column.kind
        yield f"| `{name}` | {_names(column.aliases)} | {kind} | {column.doc} |"
