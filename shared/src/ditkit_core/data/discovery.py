"""Finding the media files of a dataset folder and their captions: in a metadata file, in two
parallel lists, or in a text next to each clip."""

import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ditkit_core.config.foreign_files import is_archive
from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.masks import MASK, clip_of_mask
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, called_like_media
from ditkit_core.data.media.files import (
    CAPTION_SUFFIXES,
    MOST_LIST_BYTES,
    is_folder,
    is_regular,
    read_dataset_text,
    status,
    walk,
)
from ditkit_core.data.media.image import HEIC_SUFFIXES
from ditkit_core.data.media.image_sequence import numbered
from ditkit_core.data.metadata import (
    NoCaption,
    Reader,
    Record,
    csv_rows,
    json_captions,
    json_lines,
    json_list,
)
from ditkit_core.data.side_names import Names, entries
from ditkit_core.errors import UserError
from ditkit_core.io.files import head_of

METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.json")
_PARQUET = "metadata.parquet"
MEDIA_LISTS = ("videos.txt", "video.txt", "images.txt", "image.txt")
CAPTION_LISTS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")
"""Line i of a caption list is the caption of line i of a media list."""
_TABLE_SUFFIXES = (".json",)
"""Extensions of a file next to a clip that may have its caption among other facts; read if the clip
has no caption file."""
_TEXTS = frozenset({*CAPTION_SUFFIXES, ".json", ".jsonl", ".csv", ".yaml", ".toml", ".md"})
_NO_MEDIA = frozenset({"", ".parquet", ".npy", ".npz", ".safetensors"}) | _TEXTS
"""Extensions of files that may have a text of the same name without being meant as clips."""
_NOT_READ = frozenset(
    {
        ".heic",
        ".heif",
        ".jxl",
        ".jp2",
        ".tga",
        ".psd",
        ".svg",
        ".exr",
        ".dng",
        ".cr2",
        ".nef",
        ".arw",
    }
)
"""Extensions of images that are not read, unless an extra reads them. They are named even without a
caption."""


def list_records(reader: Reader, metadata: str) -> tuple[list[Record], list[tuple[str, str]]]:
    """The records of a dataset folder, in a fixed order; errors in single entries are part of the
    list.

    Args:
        metadata: A .jsonl, .csv or .json file, or a media list with a caption list next to it,
            relative to the folder. If empty, the one that the folder has is used, otherwise every
            media file with a caption file of the same name next to it.

    Returns:
        The records in the order of the file, or of the sorted paths. Then files that were probably
        meant as samples and are none, as (files, reason): if a file lists the clips, those with a
        caption of their own that it does not list; otherwise those that look like clips but are of
        a format that is not read, one entry for each format.
    """
    path = list_file(reader, metadata)
    if path is None:
        return list(side_file_records(reader)), _not_read(reader)
    readers = {".jsonl": json_lines, ".csv": csv_rows, ".json": json_list}
    if path.name.lower() in MEDIA_LISTS:
        readers[".txt"] = _line_lists
    if path.suffix.lower() == ".parquet":
        raise UserError(
            f'{path} is a Parquet table, which is not supported; convert it to metadata.jsonl, with pandas: to_json(…, orient="records", lines=True)'
        )
    if path.suffix.lower() not in readers:
        lists = f"{', '.join(MEDIA_LISTS)} with {CAPTION_LISTS[0]} next to it"
        raise UserError(
            f"data.metadata {path} has an unknown format; accepted are {', '.join(readers)}, and "
            f"{lists}"
        )
    entries = list(readers[path.suffix.lower()](reader, path, read_list(reader, path)))
    if not entries:
        raise UserError(f"{path} lists no clips; write a line for each clip, or remove the file")
    return entries, _not_listed(reader, path, entries)


def list_file(reader: Reader, metadata: str) -> Path | None:
    """The file that lists the samples of a dataset folder; None if captions are next to the clips.
    `metadata` as for `list_records`."""
    folder = reader.folder
    names = (
        [reader.stored(metadata)]
        if metadata
        else lists_of(folder, skip=reader.skip, image_folders=reader.image_folders)
    )
    if len(names) > 1:
        raise UserError(
            f"{folder} has {'both ' * (len(names) == 2)}{' and '.join(names)}; set data.metadata "
            f"to the right one"
        )
    if names and status(folder / names[0]) is None:
        raise UserError(
            f"data.metadata {folder / names[0]} does not exist; {_path_remedy(folder, names[0])}"
        )
    return folder / names[0] if names else None


def _path_remedy(folder: Path, metadata: str) -> str:
    """How to correct a `data.metadata` that does not exist; other settings name paths from the
    working directory, so it is looked for there."""
    absolute = Path(os.path.abspath(metadata))
    if not absolute.is_file():
        remedy = path_remedy(folder / metadata)
        return f"{remedy} {'Or' if remedy.endswith('?') else 'or'} leave data.metadata empty"
    inside = os.path.abspath(folder)
    relative = absolute.relative_to(inside) if absolute.is_relative_to(inside) else absolute
    return f'the path starts at data.folder: set data.metadata = "{relative.as_posix()}"'


def read_list(reader: Reader, path: Path) -> str:
    """The text of a file that lists samples: in the dataset folder, or in the folder that
    `data.metadata` names."""
    name = os.path.abspath(path)
    folder = (
        reader.folder if Path(name).is_relative_to(os.path.abspath(reader.folder)) else path.parent
    )
    return read_dataset_text(
        folder, name, allow_outside=reader.allow_outside, most_bytes=MOST_LIST_BYTES
    )


def lists_of(folder: Path, *, skip: Sequence[Path] = (), image_folders: bool = False) -> list[str]:
    """Names of the files in a dataset folder that list its clips and captions; if there are
    several, `data.metadata` has to choose.

    Metadata takes precedence over caption files next to the clips, and those over parallel lists
    and a Parquet table. So a notes file that happens to be in the folder does not change what is
    read.
    """
    if names := [name for name in METADATA_NAMES if status(folder / name) is not None]:
        return names
    if names := [name for name in entries(folder) if name.lower() in METADATA_NAMES]:
        return names
    names = _both_lists(folder, image_folders)
    if not names and status(folder / _PARQUET) is not None:
        names = [_PARQUET]
    texts = _Texts(folder)
    if names and any(map(texts.of, media_files(folder, skip=skip, image_folders=image_folders))):
        return []
    return names


def _both_lists(folder: Path, image_folders: bool) -> list[str]:
    """The media lists of a folder that has caption lists as well."""
    # A single list may be somebody's notes. Only both together mean that lists describe the folder.
    captions = _lists_in(folder, CAPTION_LISTS, image_folders)
    return _lists_in(folder, MEDIA_LISTS, image_folders) if captions else []


def _lists_in(folder: Path, accepted: Collection[str], image_folders: bool) -> list[str]:
    """Names of the lists in a folder; a text next to a clip or image of the same name is its
    caption and not a list."""
    names = entries(folder)
    media = {
        Path(name).stem
        for name in names
        if Path(name).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES
    }
    lists = [name for name in names if name.lower() in accepted and Path(name).stem not in media]
    return [
        name
        for name in lists
        if not (image_folders and numbered(entries(folder / Path(name).stem)))
    ]


class _Texts:
    """The caption files of a folder's media."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._listed: dict[Path, tuple[Names, set[str]]] = {}

    def of(self, media: str, suffixes: Sequence[str] = CAPTION_SUFFIXES) -> list[str]:
        """The caption files next to a media file or folder of images: `cat.txt` and `cat.caption`,
        the one to read first.

        Where there is neither, those whose names differ in case or Unicode form, and `cat.png.txt`
        of `cat.png`: some programs write such.
        """
        stem = _stem(media)
        exact = [
            f"{stem}{suffix}" for suffix in suffixes if is_regular(self._folder / f"{stem}{suffix}")
        ]
        return exact or self._similar(media, suffixes)

    def _similar(self, media: str, suffixes: Sequence[str]) -> list[str]:
        directory = Path(media).parent
        if directory not in self._listed:
            listed = entries(self._folder / directory)
            stems = {_stem(name) for name in listed if called_like_media(name)}
            self._listed[directory] = Names(listed), stems
        names, stems = self._listed[directory]
        text_stems = dict.fromkeys((Path(_stem(media)).name, Path(media).name))
        candidates = [
            text
            for name in text_stems
            for suffix in suffixes
            for text in names.similar(f"{name}{suffix}")
        ]
        # `A.png` does not take the caption of `a.png`.
        free = [
            text
            for text in dict.fromkeys(candidates)
            if Path(text).stem in text_stems or Path(text).stem not in stems
        ]
        return [
            (directory / text).as_posix()
            for text in free
            if is_regular(self._folder / directory / text)
        ]


def _stem(media: str) -> str:
    return str(Path(media).with_suffix("")) if called_like_media(media) else media


def side_file_records(reader: Reader) -> Iterator[Record]:
    """The records of a folder without metadata: every media file, with the caption in a text file
    next to it."""
    folder = reader.folder
    lists, shots = _hint_at_lists(reader), functools.partial(_hint_at_shots, reader)
    media_paths = list(media_files(folder, skip=reader.skip, image_folders=reader.image_folders))
    texts = _Texts(folder)
    masks = _masks_by_clip(media_paths, texts)
    are_masks = {mask for names in masks.values() for mask in names}
    for media in (path for path in media_paths if path not in are_masks):
        try:
            if called_like_media(media) and is_folder(folder / media):
                raise UserError(
                    f"{folder / media} is a folder, not a media file; rename it or remove it"
                )
            caption_files = texts.of(media) or texts.of(media, _TABLE_SUFFIXES)
            if len(caption_files) > 1 and caption_files[0] not in {
                f"{_stem(media)}{suffix}" for suffix in CAPTION_SUFFIXES
            }:
                raise UserError(
                    f"{' and '.join(caption_files)} in {folder} are both the caption of {media}; "
                    f"remove all but one"
                )
            if not caption_files:
                raise NoCaption(
                    f"{folder / media} has no caption; write one to "
                    f"{folder / _stem(media)}.txt{lists or shots(media)}"
                )
            text = read_dataset_text(folder, caption_files[0], allow_outside=reader.allow_outside)
            clip_masks = masks.get(_stem(media), [])
            if len(clip_masks) > 1:
                raise UserError(
                    f"{' and '.join(clip_masks)} in {folder} are both the mask of {media}; remove "
                    f"all but one"
                )
            if caption_files[0].lower().endswith(_TABLE_SUFFIXES):
                captions = json_captions(reader, folder / caption_files[0], text)
            else:
                captions = reader.split(f"caption {folder / caption_files[0]}", [text])
            yield Record(
                media=media,
                captions=captions,
                controls={MASK.name: clip_masks[0]} if clip_masks else {},
            )
        except UserError as error:
            yield Record(media=media, problem=error)
    if not media_paths:
        _hint_at_tables(folder)


def side_files(folder: Path, media: Sequence[str]) -> dict[str, str]:
    """By media file, the text next to it that has its caption, or that gets it if there is none."""
    texts = _Texts(folder)
    return {
        name: next(iter(texts.of(name)), f"{_stem(name)}{CAPTION_SUFFIXES[0]}") for name in media
    }


def _masks_by_clip(media: Sequence[str], texts: _Texts) -> dict[str, list[str]]:
    """The masks among the media files of a folder, by the name of their clip; a file with a caption
    of its own is a sample."""
    masks: dict[str, list[str]] = defaultdict(list)
    stems = Names(map(_stem, media))
    for path in media:
        if (clip := clip_of_mask(_stem(path), stems)) is not None and not texts.of(path):
            masks[clip].append(path)
    return masks


def _hint_at_tables(folder: Path) -> None:
    """Explain a folder without media files that has an archive or a Parquet table, which may
    contain them."""
    archive = next(
        (
            path
            for path in sorted(folder.glob("*"))
            if is_regular(path) and is_archive(head_of(path))
        ),
        None,
    )
    if archive is not None:
        raise UserError(
            f"{folder} has no media files, only the archive {archive.name}; unpack it, or name the "
            f"folder with its files"
        )
    table = next(
        (path for pattern in ("*.parquet", "*/*.parquet") for path in sorted(folder.glob(pattern))),
        None,
    )
    if table is not None:
        raise UserError(
            f"{folder} has no media files, only {table.relative_to(folder)}: Parquet tables are "
            f"not supported; write the images or "
            "clips to files, and their names and captions to metadata.jsonl"
        )


def _hint_at_lists(reader: Reader) -> str:
    """End of the message on a missing caption: the setting for a file that may list captions, or
    the list that is missing."""
    folder = reader.folder
    if both := _both_lists(folder, reader.image_folders):
        return f', or set data.metadata = "{both[0]}" if that lists the clips'
    names = entries(folder)
    if half := _lists_in(folder, (*MEDIA_LISTS, *CAPTION_LISTS), reader.image_folders)[:1]:
        other, content = (
            (CAPTION_LISTS[0], "clips") if half[0] in MEDIA_LISTS else (MEDIA_LISTS[0], "captions")
        )
        return f", or, if {half[0]} lists {content}, write {other} next to it, line by line"
    kinds = {Path(name).suffix for name in METADATA_NAMES}
    candidates = [name for name in names if Path(name).suffix.lower() in kinds]
    if not candidates or any(name.lower().endswith(".txt") for name in names):
        return ""
    return f", or set data.metadata = {json.dumps(candidates[0], ensure_ascii=False)} if that lists clips and captions"


def _hint_at_shots(reader: Reader, media: str) -> str:
    """End of the message on an image without a caption whose folder has one: the folder may be
    meant as one clip."""
    shot = Path(media).parent.as_posix()
    if (
        Path(media).suffix.lower() not in IMAGE_SUFFIXES
        or not (reader.folder / f"{shot}.txt").is_file()
    ):
        return ""
    if not reader.image_folders:
        return f", or set data.image_folders = true if {shot} is one clip"
    return f", or, if {shot} is one clip, leave only consistently numbered images in it"


def names_of(folders: Sequence[str]) -> list[str]:
    """The start of sample ids for each folder: its name, with as much of its path as makes it
    unique; "" if there is only one folder."""
    if len(folders) == 1:
        return [""]
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for path_parts in parts:
        count = 1
        while (
            count < len(path_parts)
            and sum(other[-count:] == path_parts[-count:] for other in parts) > 1
        ):
            count += 1
        names.append("/".join(path_parts[-count:]) + "/")
    return names


def media_files(
    folder: Path, *, skip: Sequence[Path] = (), image_folders: bool = False
) -> Iterator[str]:
    """Relative paths of media files, and of folders with the name of one; hidden ones are ignored,
    links followed once.

    With `image_folders` a subfolder that contains only numbered images is listed instead of its
    images.
    """
    for directory, folders, names in walk(folder, skip=skip):
        if image_folders and directory != Path(folder) and not folders and numbered(names):
            yield directory.relative_to(folder).as_posix()
            continue
        yield from (
            (directory / name).relative_to(folder).as_posix()
            for name in sorted(folders + names)
            if called_like_media(name)
        )
        folders[:] = [name for name in folders if not called_like_media(name)]


def _not_read(reader: Reader) -> list[tuple[str, str]]:
    """The images and videos of formats that are not read, and other files with a caption: for each
    format its files and the reason."""
    by_format: dict[str, list[str]] = defaultdict(list)
    for directory, _, names in walk(reader.folder, skip=reader.skip):
        paths = list(map(Path, names))
        read = {path.stem for path in paths if called_like_media(path)}
        captioned = {path.stem for path in paths if path.suffix.lower() in CAPTION_SUFFIXES} - read
        for path in paths:
            suffix = path.suffix.lower()
            is_unread_media = suffix in _NOT_READ and not called_like_media(path)
            if is_unread_media or (path.stem in captioned and suffix not in _NO_MEDIA):
                by_format[suffix].append((directory / path).relative_to(reader.folder).as_posix())
    unread = []
    for suffix, files in sorted(by_format.items()):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        extra = (
            ", or install the extra heic of ditkit-core (pillow-heif)"
            if suffix in HEIC_SUFFIXES
            else ""
        )
        unread.append((files[0] + more, f"{suffix} is not read; convert to png, jpg or mp4{extra}"))
    return unread


def _not_listed(reader: Reader, path: Path, entries: Sequence[Record]) -> list[tuple[str, str]]:
    """The captioned media files of a folder that its list does not have, as one entry; files
    without a caption may be references or masks."""
    folder, listed = reader.folder, set[str]()
    for entry in entries:
        names = (entry.media, *entry.references, *entry.controls.values())
        listed |= {os.path.realpath(folder / name) for name in names if "\0" not in name}
    texts = _Texts(folder)
    files = [
        media
        for media in media_files(folder, skip=reader.skip, image_folders=reader.image_folders)
        if texts.of(media) and os.path.realpath(folder / media) not in listed
    ]
    if not files:
        return []
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    lacks, lines = ("these are", "lines for them") if more else ("this is", "a line for it")
    remedy = f"add {lines}, or remove {path.name} to use the captions next to all files"
    return [(files[0] + more, f"{path.name} lists the samples, and {lacks} not in it; {remedy}")]


def _line_lists(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The records of a media list and the caption list next to it."""
    captions = _caption_list(reader, path)
    clips, texts = _lines(text), _lines(read_list(reader, captions))
    if len(clips) != len(texts):
        remedy = "write one caption per file, each on one line"
        for file, lines in ((path, clips), (captions, texts)):
            if "" in lines:
                remedy = (
                    f"line {lines.index('') + 1} of {file.name} is empty: remove it, or fill it in"
                )
        raise UserError(
            f"{path} has {len(clips)} lines but {captions} has {len(texts)}: line i of one belongs "
            f"to line i of the other; {remedy}"
        )
    # Each line is one caption: with data.captions = "lines" U+2028 and the like would split it
    # again.
    line_reader = replace(reader, captions="whole")
    for line, (media, caption) in enumerate(zip(clips, texts, strict=True), start=1):
        if not (media or caption):
            continue
        where = f"{path} line {line}"
        try:
            if not media:
                raise UserError(
                    f"{where} is empty, but {captions.name} has a caption there; name its file, or "
                    f"remove both lines"
                )
            split = line_reader.split(f"{captions} line {line}", [caption])
            media = reader.stored(media)
            reader.check_media(where, [media])
            yield Record(media=media, captions=split)
        except UserError as error:
            yield reader.broken(where, [media], error)


def _caption_list(reader: Reader, media: Path) -> Path:
    """The caption list next to a media list."""
    names = _lists_in(media.parent, CAPTION_LISTS, reader.image_folders)
    if not names:
        raise UserError(
            f"{media} lists clips, but there is no caption list next to it; write one to "
            f"{media.parent / CAPTION_LISTS[0]}, line by line"
        )
    if len(names) > 1:
        both = "both " if len(names) == 2 else ""
        raise UserError(
            f"{media.parent} has {both}{' and '.join(names)} for {media.name}; remove or rename "
            f"all but one"
        )
    return media.parent / names[0]


def _lines(text: str) -> list[str]:
    """The stripped lines, without empty ones at the end."""
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
