"""The `[data]` section of a configuration, and the checks that its settings agree."""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.config.foreign_files import is_archive
from ditkit_core.config.nearest import nearest_word, path_remedy
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import head_of, local_path

Windows = Literal["first", "uniform", "random", "all"]


def folder_error(folder: str, key: str, *, folders: Iterable[Path] = ()) -> UserError:
    """The error for a folder of data that is not set or does not exist; `folders` as for
    `path_remedy`."""
    if not folder:
        return UserError(f"{key} is not set; name the folder of your clips and captions")
    # A run file may be elsewhere, and its relative paths start here.
    where = "" if local_path(folder).is_absolute() else f" in {Path.cwd()}"
    if os.path.isfile(local_path(folder)):
        if is_archive(head_of(local_path(folder))):
            return UserError(
                f"{key} {folder} is an archive; unpack it, and name the folder with its files"
            )
        return UserError(f"{key} {folder} is a file; name the folder that it is in")
    return UserError(
        f"{key} {folder} does not exist or is not a folder{where}; "
        f"{path_remedy(folder, folders=folders)}"
    )


class UnknownNames(UserError):
    """`data.exclude` or `data.crops` names a file that the dataset does not have."""

    def __init__(self, message: str, exclude: tuple[str, ...], crops: tuple[str, ...]):
        """Store the message and what remains of both keys without such names."""
        super().__init__(message)
        self.exclude, self.crops = exclude, crops


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `[data]` section: the clips and captions to train on, and how clips are extracted from
    files."""

    folder: str = setting("", resume="stated", holds="path")
    """Folder of videos, images and captions. A run can be continued after its dataset was moved,
    with metadata, references, controls and masks, but not with other samples."""
    folders: tuple[str, ...] = setting((), resume="refused", holds="path")
    """Several such folders instead of `folder`; with more than one, sample ids begin with the
    folder's name."""
    repeats: tuple[float, ...] = setting((), resume="refused")
    """How often each sample of a folder is used per epoch: one number above 0 for each folder. With
    1.5 a sample is used once in every epoch and a second time in every other epoch."""
    metadata: str = setting("", resume="stated", holds="path")
    """A .jsonl, .csv or .json file that lists media and captions, relative to the folder; or
    videos.txt or images.txt that lists media, with prompts.txt next to it. Empty: metadata.jsonl,
    metadata.csv or metadata.json if the folder has one, otherwise a .txt or .caption file next to
    each media file (or a .json with its caption), or such lists if no media file has one."""
    exclude: tuple[str, ...] = setting((), resume="refused", holds="path", is_set=True)
    """Files that are not trained, by their path in the folder, such as ["sub/cat.png"]; with more
    than one folder, the folder's name comes first."""
    crops: tuple[str, ...] = setting((), resume="refused", holds="path", is_set=True)
    """Where files are cropped, if not at their centre, as `NAME=RIGHT,DOWN`, with names as in
    `exclude`: cat.png=0.5,0 keeps the upper end, 0 and 1 are the ends. Masks, videos of poses and
    first images are cropped alike; references are not."""
    frames: int = setting(0, resume="refused")
    """Frames per clip: 1 + a multiple of the model's frame step. Still images always have one
    frame. 0 means the model's default."""
    frame_buckets: tuple[int, ...] = setting((), resume="refused")
    """Several clip lengths instead of `frames`: each clip gets the longest length that it has
    frames for."""
    windows: Windows = setting("first", resume="refused")
    """Which part of a file to use if the file is longer than a clip: the `first`, `uniform`
    (windows spread evenly from start to end; a single one is in the middle), `random` (sampled
    once, from data.seed and the file's name), or `all` (one after the other, the remainder is
    dropped)."""
    clips_per_file: int = setting(1, resume="refused")
    """Number of uniform or random windows per file; each is a sample."""
    fps: float = setting(0.0, resume="refused")
    """Frames per second that clips are resampled to, by timestamp. 0 means the model's own rate."""
    height: int = setting(0, resume="refused")
    """Height of a clip in pixels; clips are resized to cover the size and cropped to the centre. 0
    means the model's default."""
    width: int = setting(0, resume="refused")
    """Width of a clip in pixels. 0 means the model's default."""
    resolutions: tuple[int, ...] = setting((), resume="refused")
    """Several resolutions in one run instead of height and width, such as [512, 768, 1024]: each
    image or clip gets the largest that it fills without being enlarged, or the smallest. Each
    number is the side of a square in pixels; for other shapes see `buckets`."""
    buckets: bool | Literal["auto"] = setting("auto", resume="refused")
    """Aspect-ratio buckets. `auto`: images and clips have height × width if that cuts at most a
    tenth of them away, otherwise the size nearest to their own aspect ratio, with at most as many
    pixels. `true`: all have the nearest of sizes of about height × width pixels. `false`: all have
    height × width."""
    bucket_step: int = setting(0, resume="refused")
    """Sides of buckets are multiples of this many pixels, which must be a multiple of the model's
    size step. 0 means four size steps."""
    max_aspect: float = setting(2.0, resume="refused")
    """Largest ratio of a bucket's longer side to the shorter, at least 1; longer images are
    cropped."""
    flip: bool = setting(False, resume="refused")
    """Mirror half of all uses of a sample left to right, with its references, conditions and mask;
    the seed chooses which. Refused if captions say left or right. For subjects that look the same
    in a mirror: not for faces, texts and most characters."""
    image_folders: bool = setting(False, resume="refused")
    """Read a folder of numbered images (`shot/0001.png`, …) as one clip, with its caption in
    `shot.txt`. A file `fps.txt` in it gives the images per second; without it every image is one
    frame of the clip."""
    captions: Literal["whole", "lines"] = setting("whole", resume="refused")
    """Whether a text is one caption, or each of its non-empty lines is a caption. If a sample has
    several, each use samples one. A list in metadata always means several captions."""
    trigger: str = setting("", resume="refused")
    """Trigger word for the trained concept; it is put in front of each caption that does not
    contain it."""
    shuffle_tags: bool = setting(False, resume="refused")
    """Train with the tags of each caption in varying order."""
    tag_separator: str = setting(",", resume="refused")
    """Text that separates tags."""
    keep_tags: int = setting(0, resume="refused")
    """Number of tags at the beginning that are not shuffled."""
    tag_variants: int = setting(4, resume="refused")
    """Number of tag orders per caption; the first is the written order. Each is encoded once."""
    references: str = setting("", resume="stated", holds="path")
    """Folder of reference images for editing: `cat.png` of the dataset uses `cat.png` here, or
    `cat_0.png`, `cat_1.png`, … Metadata may name them instead, in a column `references`."""
    controls: tuple[str, ...] = setting((), resume="stated", holds="path")
    """Folders of further conditions, as `column=folder`: `cat.mp4` of the dataset uses the file
    named `cat` there. Metadata may name the files instead, in a column of that name."""
    masks: str = setting("", resume="stated", holds="path")
    """Folder of loss masks: `cat.png` of the dataset uses the image or video named `cat` there;
    white is learnt, and train.mask_weight is the weight of the rest. Without metadata
    `cat-mask.png` next to `cat.png` is its mask, too; metadata has a column `mask`."""
    seed: int = setting(0, resume="refused")
    """Seed for random windows and tag orders."""
    allow_outside: bool = setting(False, resume="free")
    """Allow paths and links that lead outside the folder."""
    on_bad: Literal["error", "skip"] = setting("error", resume="refused")
    """What to do with unusable files and captions: stop with an error, or skip and report them."""
    short_clips: Literal["auto", "error", "skip", "shorten"] = setting("auto", resume="refused")
    """What to do with clips that have too few frames: stop with an error, skip them, or shorten the
    clip to the frames that exist. `auto` shortens them if the number of frames is left to the
    model, and stops if `frames` or `frame_buckets` ask for it."""

    def __post_init__(self) -> None:
        bounds = {
            # Far beyond any model: a value outside is a slip, such as a number with too many zeros.
            "frames": (0, 65536),
            "fps": (0, 1000),
            "height": (0, 16384),
            "width": (0, 16384),
            "bucket_step": (0, 4096),
            "max_aspect": (1, 16),
            "clips_per_file": (1, 1000),
            "keep_tags": (0, 1000),
            "tag_variants": (1, 64),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                nearest = most if value > most else least
                raise UserError(
                    f"{argument(f'data.{name}')} = {value} is not between {least} and {most}; set "
                    f"{nearest}"
                )
        self._check_folders()
        self._check_resolutions()
        self._check_windows()
        self._check_captions()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that a clip may have, in frames, longest first."""
        return tuple(sorted(self.frame_buckets, reverse=True)) or (self.frames,)

    def check_steps(self, frame_step: int, size_step: int) -> None:
        """Refuse lengths and sizes that a model cannot have: clips have 1 + k * frame_step frames
        (0: still images only), sides k * size_step pixels."""
        for frames in self.lengths:
            several = f"data.frame_buckets = {list(self.frame_buckets)}: {frames}"
            length_setting = several if self.frame_buckets else f"data.frames = {frames}"
            if frame_step == 0 and frames != 1:
                raise UserError(
                    f"{argument('data.frames')} = {frames}: this model takes still images only; "
                    f"set 1"
                )
            if frame_step and (frames - 1) % frame_step:
                below = 1 + (frames - 1) // frame_step * frame_step
                raise UserError(
                    f"{length_setting} is not 1 + k * {frame_step}; set {below} or "
                    f"{below + frame_step}"
                )
        sides = [("resolutions", side) for side in self.resolutions] or [
            ("height", self.height),
            ("width", self.width),
        ]
        for name, pixels in (*sides, ("bucket_step", self.bucket_step)):
            if (pixels < size_step or pixels % size_step) and not (
                name == "bucket_step" and pixels == 0
            ):
                below = max(1, pixels // size_step) * size_step
                has = (
                    f"data.{name} has {pixels}, which"
                    if name == "resolutions"
                    else f"data.{name} = {pixels}"
                )
                raise UserError(
                    f"{has} is not a multiple of {size_step}; set {below} or {below + size_step}"
                )

    def crop_of(self, name: str) -> Crop:
        """Where a file is cropped; `name` as in `exclude`."""
        return _crops_by_name(self.crops).get(name, CENTRE)

    def check_names(self, media: Iterable[str]) -> None:
        """Refuse a name in `exclude` or `crops` that no media file has; `media` are the names of
        all files, as `exclude` has them.

        Raises:
            UnknownNames: If there is one.
        """
        names = set(media)
        exclude = tuple(name for name in self.exclude if name in names)
        crops = tuple(entry for entry in self.crops if entry.rpartition("=")[0] in names)
        cropped = (entry.rpartition("=")[0] for entry in self.crops)
        for key, wanted in (("exclude", self.exclude), ("crops", cropped)):
            if unknown := sorted({*wanted} - names):
                near = nearest_word(unknown[0], sorted(names))
                hint = f"did you mean {near}?" if near else "correct the name, or remove it"
                raise UnknownNames(
                    f"{argument(f'data.{key}')} has {unknown[0]!r}, which the dataset does not "
                    f"have; {hint}",
                    exclude,
                    crops,
                )

    def with_home(self) -> "DataConfig":
        """The section with `~` replaced in its paths: no shell has done it for a run file."""

        def path(text: str) -> str:
            return str(local_path(text)) if text.startswith("~") else text

        controls = [entry.partition("=") for entry in self.controls]
        return replace(
            self,
            folder=path(self.folder),
            folders=tuple(map(path, self.folders)),
            metadata=path(self.metadata),
            references=path(self.references),
            controls=tuple(
                f"{column}{equals}{path(folder)}" for column, equals, folder in controls
            ),
            masks=path(self.masks),
        )

    def _check_folders(self) -> None:
        if self.folder and self.folders:
            raise UserError(
                f"{argument('data.folder')} and {argument('data.folders')} are both set; put all "
                f"folders into {argument('data.folders')}"
            )
        self.crop_of("")
        if len(set(self.exclude)) < len(self.exclude):
            raise UserError(f"{argument('data.exclude')} has a name twice; name it once")
        if "" in self.folders:
            raise UserError(
                f"{argument('data.folders')} has an empty name; enter the folder, or remove the "
                f"item"
            )
        if len(set(self.folders)) < len(self.folders):
            raise UserError(
                f"{argument('data.folders')} has a folder twice; name it once and raise its number "
                f"in {argument('data.repeats')}"
            )
        for repeats in self.repeats:
            if not 0 < repeats <= 1000:
                raise UserError(
                    f"{argument('data.repeats')} has {repeats:g}, which is not above 0 and at most "
                    f"1000; set 1, or remove the folder"
                )
        named = max(1, len(self.folders))
        if self.repeats and len(self.repeats) != named:
            raise UserError(
                f"{argument('data.repeats')} has {len(self.repeats)} numbers for {named} folders; "
                f"set one for each, in the same order"
            )
        if len(self.folders) > 1 and (
            settings := [
                setting for setting in ("references", "controls", "masks") if getattr(self, setting)
            ]
        ):
            name = f"data.{settings[0]}"
            raise UserError(
                f"{name} works with one folder only; with {argument('data.folders')}, name the "
                f"files in each folder's metadata"
            )

    def _check_resolutions(self) -> None:
        listed = f"data.resolutions = {list(self.resolutions)}"
        if len(set(self.resolutions)) < len(self.resolutions) or any(
            not 1 <= side <= 16384 for side in self.resolutions
        ):
            raise UserError(
                f"{listed} must contain different sides from 1 to 16384, such as [512, 768, 1024]"
            )
        sides = {self.height, self.width} - {0, max(self.resolutions, default=0)}
        if self.resolutions and sides:
            raise UserError(
                f"{listed} and {argument('data.height')} or {argument('data.width')} are both set; "
                f"remove {argument('data.height')} and {argument('data.width')}"
            )

    def _check_windows(self) -> None:
        if len(set(self.frame_buckets)) < len(self.frame_buckets) or any(
            not 1 <= n <= 65536 for n in self.frame_buckets
        ):
            raise UserError(
                f"{argument('data.frame_buckets')} = {list(self.frame_buckets)} must contain "
                f"different lengths from 1 to 65536, such as [1, 33, 81]"
            )
        if self.frame_buckets and self.frames not in (0, max(self.frame_buckets)):
            raise UserError(
                f"{argument('data.frames')} and {argument('data.frame_buckets')} are both set; "
                f"remove {argument('data.frames')}"
            )
        if self.clips_per_file > 1 and self.windows in ("first", "all"):
            remedy = (
                'set data.windows = "uniform" or "random"'
                if self.windows == "first"
                else "remove it"
            )
            raise UserError(
                f'{argument("data.clips_per_file")} = {self.clips_per_file} has no effect with {argument("data.windows")} = "{self.windows}"; {remedy}'
            )

    def _check_captions(self) -> None:
        for name in ("trigger", "tag_separator"):
            value = getattr(self, name)
            if value != "" and not value.strip() or (name == "tag_separator" and not value):
                raise UserError(
                    f"{argument(f'data.{name}')} is blank; enter a text, or remove the setting"
                )
            # Python keeps bytes of the command line that are not UTF-8 as lone surrogates, which
            # tokenizers and files refuse.
            if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
                raise UserError(
                    f"{argument(f'data.{name}')} contains a lone surrogate (half of a character); "
                    f"correct it"
                )
        for name in () if self.shuffle_tags else ("keep_tags", "tag_variants", "tag_separator"):
            value = getattr(self, name)
            if value != getattr(DataConfig, name):  # its default
                raise UserError(
                    f"{argument(f'data.{name}')} = {value} has no effect without "
                    f"{argument('data.shuffle_tags')} = true; set it as well"
                )


@functools.cache  # asked for each file of a dataset
def _crops_by_name(entries: tuple[str, ...]) -> dict[str, Crop]:
    crops: dict[str, Crop] = {}
    for entry in entries:
        file, _, shares = entry.rpartition("=")
        try:
            right, down = map(float, shares.split(","))
            crop = Crop(right, down)
        except ValueError:
            crop = Crop(-1.0)
        if not file or file in crops or not all(0 <= share <= 1 for share in crop):
            raise UserError(
                f"{argument('data.crops')} has {entry!r}; write NAME=RIGHT,DOWN, once for each "
                f"file, with numbers from 0 to 1, such as cat.png=0.5,0"
            )
        crops[file] = crop
    return crops
