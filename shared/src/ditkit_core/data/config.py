"""The `[data]` section of a configuration, and what in it contradicts itself."""

from dataclasses import dataclass
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError

Windows = Literal["first", "uniform", "random", "all"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `[data]` section: which clips and captions, and how clips are cut."""

    folder: str = setting("", resume="refused", holds="path")
    """Folder of videos, images and captions."""
    folders: tuple[str, ...] = setting((), resume="refused", holds="path")
    """Several such folders in place of `folder`; of more than one, ids begin with the folder's name."""
    repeats: tuple[float, ...] = setting((), resume="refused")
    """How often an epoch has each sample of a folder: one number for each folder, above 0. With 1.5 it is in every epoch once and
    in every second one again."""
    metadata: str = setting("", resume="refused", holds="path")
    """A .jsonl, .csv or .json file that lists media and captions, relative to the folder, or videos.txt or images.txt that lists media
    with prompts.txt beside it. Empty: metadata.jsonl, metadata.csv or metadata.json where the folder has it, otherwise a .txt or .caption
    file with the caption beside each media file, or such lists where none has one."""
    frames: int = setting(0, resume="refused")
    """Frames of a clip, 1 + a multiple of the model's frame step; still images are always one frame. 0 means the model's own."""
    frame_buckets: tuple[int, ...] = setting((), resume="refused")
    """Several lengths in place of `frames`: each clip gets the longest that it fills."""
    windows: Windows = setting("first", resume="refused")
    """Which part of a file that is longer than a clip: its first, `uniform` (spread evenly from its start to its end; a single one
    lies in the middle), `random` (drawn once, by data.seed and the file's name), or `all` (one after the other, without the rest)."""
    clips_per_file: int = setting(1, resume="refused")
    """How many uniform or random windows of each file are samples."""
    fps: float = setting(0.0, resume="refused")
    """Frames per second that clips are resampled to, by timestamp; 0 means the model's own rate."""
    height: int = setting(0, resume="refused")
    """Height of a clip in pixels: resized to cover, cropped to the centre. 0 means the model's own."""
    width: int = setting(0, resume="refused")
    """Width of a clip in pixels. 0 means the model's own."""
    buckets: bool = setting(False, resume="refused")
    """Give each picture or clip the size nearest to its own aspect ratio, of about height × width pixels, instead of cropping all
    to one."""
    bucket_step: int = setting(0, resume="refused")
    """Pixels that the sides of buckets are multiples of; itself a multiple of the model's size step. 0 means four such steps."""
    max_aspect: float = setting(2.0, resume="refused")
    """Largest ratio of a bucket's longer side to the shorter, at least 1; what is longer is cropped."""
    image_folders: bool = setting(False, resume="refused")
    """Take a folder of numbered images (`shot/0001.png`, …) as one clip, with its caption in `shot.txt`. A file `fps.txt` in it says
    how many are shown in a second; without one each is a frame of the clip."""
    captions: Literal["whole", "lines"] = setting("whole", resume="refused")
    """Whether a text is one caption, or each of its lines that is not empty. Of several one is picked at each use; a list in
    metadata is several anyway."""
    trigger: str = setting("", resume="refused")
    """Word that stands for what is learnt: put in front of each caption that does not have it."""
    shuffle_tags: bool = setting(False, resume="refused")
    """Train with the tags of a caption in changing order."""
    tag_separator: str = setting(",", resume="refused")
    """What stands between tags."""
    keep_tags: int = setting(0, resume="refused")
    """Tags at the beginning that stay where they are."""
    tag_variants: int = setting(4, resume="refused")
    """Orders of tags drawn for each caption, the first as it is written; each is encoded once."""
    references: str = setting("", resume="refused", holds="path")
    """Folder of pictures to edit: for `cat.png` of the dataset, `cat.png` here, or `cat_0.png`, `cat_1.png`, … Metadata may name
    them instead, in a column `references`."""
    controls: tuple[str, ...] = setting((), resume="refused", holds="path")
    """Folders of what goes with the clips, as `column=folder`: for `cat.mp4` of the dataset, the file called `cat` there. Metadata may
    name them instead, in a column of that name."""
    seed: int = setting(0, resume="refused")
    """What random windows and orders of tags are drawn by."""
    allow_outside: bool = setting(False, resume="free")
    """Allow paths and links that lead out of the folder."""
    on_bad: Literal["error", "skip"] = setting("error", resume="refused")
    """What to do with unusable files and captions: stop, or leave them out and say so."""
    short_clips: Literal["error", "skip", "shorten"] = setting("error", resume="refused")
    """What to do with clips that have too few frames: stop, leave them out, or use as many frames as fit."""

    def __post_init__(self) -> None:
        bounds = {
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
                raise UserError(f"data.{name} = {value} is not between {least} and {most}; set {nearest}")
        self._check_folders()
        self._check_windows()
        self._check_captions()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames that a clip may have, longest first."""
        return tuple(sorted(self.frame_buckets, reverse=True)) or (self.frames,)

    def _check_folders(self) -> None:
        if self.folder and self.folders:
            raise UserError("data.folder and data.folders are both set; put all folders into data.folders")
        if "" in self.folders:
            raise UserError("data.folders has an empty name; write the folder, or remove it")
        if len(set(self.folders)) < len(self.folders):
            raise UserError("data.folders has a folder twice; name it once, and raise its number in data.repeats")
        for repeats in self.repeats:
            if not 0 < repeats <= 1000:
                raise UserError(
                    f"data.repeats has {repeats:g}, which is not above 0 and up to 1000; set 1, or leave the folder out"
                )
        named = max(1, len(self.folders))
        if self.repeats and len(self.repeats) != named:
            raise UserError(
                f"data.repeats has {len(self.repeats)} numbers for {named} folders; write one for each, in the same order"
            )
        if len(self.folders) > 1 and (self.references or self.controls):
            name = "data.references" if self.references else "data.controls"
            raise UserError(f"{name} is of one folder, and there are several; name the files in each folder's metadata")

    def _check_windows(self) -> None:
        if len(set(self.frame_buckets)) < len(self.frame_buckets) or any(
            not 1 <= n <= 65536 for n in self.frame_buckets
        ):
            raise UserError(
                f"data.frame_buckets = {list(self.frame_buckets)} has a length twice or below 1; name each once, such as [1, 33, 81]"
            )
        if self.frame_buckets and self.frames not in (0, max(self.frame_buckets)):
            raise UserError("data.frames and data.frame_buckets are both set; leave data.frames out")
        if self.clips_per_file > 1 and self.windows in ("first", "all"):
            remedy = 'set data.windows = "uniform" or "random"' if self.windows == "first" else "leave it out"
            raise UserError(
                f'data.clips_per_file = {self.clips_per_file} does not go with data.windows = "{self.windows}"; {remedy}'
            )

    def _check_captions(self) -> None:
        for name in ("trigger", "tag_separator"):
            value = getattr(self, name)
            if value != "" and not value.strip() or (name == "tag_separator" and not value):
                raise UserError(f"data.{name} is blank; write it out, or leave it out")
            if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
                raise UserError(f"data.{name} has half of a character (a lone surrogate); correct it")
        for name in () if self.shuffle_tags else ("keep_tags", "tag_variants", "tag_separator"):
            value = getattr(self, name)
            if value != getattr(DataConfig, name):  # its default
                raise UserError(f"data.{name} = {value} does nothing without data.shuffle_tags = true; set it too")
