"""Features of music, 35 numbers per row: onset strength, 20 mel cepstra, 12 tones, and marks on
peaks and beats.

Features come from a file or are computed from sound. The latter needs librosa, an optional
dependency that the official code uses: only its algorithms give the numbers that the model was
trained on. Source: diffsynth/pipelines/wan_video.py of modelscope/DiffSynth-Studio.
"""

import math
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.sound import decode_sound
from ditkit_core.errors import MissingDependency, UserError

FEATURES = 35
RATE = 30
"""Rows per second of music, at any frame rate of the clip."""
TABLES = (".npy", ".safetensors")
"""Suffixes of files with features; any other file is sound."""
_HOP = 512
_SHORT_ROWS = 15  # half a second: the last row is repeated for rows that a file lacks at its end
_MOST_BYTES = 2**28


def window(path: Path, *, start_seconds: float, seconds: float) -> Float[Tensor, "rows 35"]:
    """The features of a part of a piece of music; the number of rows depends on the part's length
    alone.

    Args:
        path: `.npy` or `.safetensors` with one table of features, or a file with sound.
        start_seconds: Start of the part.
        seconds: Length of the part.

    Raises:
        UserError: If the file cannot be read or contains something else, or the music ends before
            the part does.
    """
    features = read(path, until_seconds=start_seconds + seconds)
    first, count = _part(path, len(features), start_seconds, seconds)
    part = features[first : first + count]
    return torch.cat([part, part[-1:].expand(count - len(part), -1)])


def check(path: Path, *, start_seconds: float, seconds: float) -> None:
    """Check that a piece of music can be read and contains a part, without computing features of
    sound.

    Args:
        path: As for `window`.
        start_seconds: As for `window`.
        seconds: As for `window`.

    Raises:
        UserError: As `window`.
    """
    if path.suffix.lower() in TABLES:
        rows = len(read(path))
    else:
        sound, rate = decode_sound(path, until_seconds=start_seconds + seconds)
        rows = 1 + math.ceil(len(sound) * RATE * _HOP / rate) // _HOP
    _part(path, rows, start_seconds, seconds)


def check_library(path: Path) -> None:
    """Refuse sound if librosa is not installed.

    Raises:
        MissingDependency: If the file is sound and librosa is missing.
    """
    if path.suffix.lower() not in TABLES and find_spec("librosa") is None:
        raise MissingDependency(
            f"{path} is a sound file, whose features need librosa, which is not installed; install "
            "librosa, or give a .npy of the features"
        )


def _part(path: Path, rows: int, start_seconds: float, seconds: float) -> tuple[int, int]:
    """The first row of a part and the number of rows; a file may lack a few at its end."""
    first, count = round(start_seconds * RATE), max(1, round(seconds * RATE))
    if min(rows - first, count) < max(1, count - _SHORT_ROWS):
        has, wants = rows / RATE, start_seconds + seconds
        raise UserError(
            f"{path} has {has:.1f} s of music and the clip needs {wants:.1f} s; give longer music "
            f"or a shorter clip"
        )
    return first, count


def read(path: Path, *, until_seconds: float = math.inf) -> Float[Tensor, "rows 35"]:
    """All features of a piece of music, in fp32.

    Args:
        path: As for `window`.
        until_seconds: Sound after this time is ignored.

    Raises:
        UserError: As `window`.
    """
    features = _table(path) if path.suffix.lower() in TABLES else _of_sound(path, until_seconds)
    if features.ndim != 2 or features.shape[1] != FEATURES or not len(features):
        raise UserError(
            f"{path} contains {tuple(features.shape)} numbers, not rows of {FEATURES}; write "
            f"features at {RATE} rows a second"
        )
    if not features.isfinite().all():
        raise UserError(f"{path} contains numbers that are not finite; compute the features again")
    return features


def _table(path: Path) -> Tensor:
    """The table of a file of features; no code in it is run."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} is too large for features of music; give the right file")
        if path.suffix.lower() == ".npy":
            return _npy(path)
        tables = load_file(path)
    except (OSError, ValueError, TypeError, EOFError, OverflowError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{path} cannot be read as features of music ({reason}); write them again"
        ) from error
    if len(tables) != 1:
        raise UserError(f"{path} contains {len(tables)} tensors; write one, the features of music")
    (table,) = tables.values()
    return table.float()


def _npy(path: Path) -> Tensor:
    """The table of a `.npy` file; its header is checked against the number of bytes before memory
    is allocated."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(
                f"its version is {version[0]}.{version[1]}, and tables of numbers have 1.0"
            )
        num_bytes = path.stat().st_size - file.tell()
    if dtype.kind not in "fiub":
        raise ValueError(f"it contains {dtype}, not numbers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > num_bytes:
        raise ValueError(
            f"it says that it has {shape} numbers of {dtype}, and has {num_bytes} bytes"
        )
    return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))


def _of_sound(path: Path, until_seconds: float) -> Tensor:
    sound, rate = decode_sound(path, until_seconds=until_seconds)
    check_library(path)
    import librosa

    with warnings.catch_warnings():
        # sound of a second or less has fewer samples than a window in the lowest octaves, which
        # changes no result
        warnings.filterwarnings("ignore", "n_fft=", UserWarning)
        return torch.from_numpy(_features(librosa, sound, rate))


def _features(
    librosa: Any, sound: Float[np.ndarray, " samples"], rate: int
) -> Float[np.ndarray, "rows 35"]:
    """The features, computed with librosa as in the official code.

    The sound is resampled so that a hop of 512 is a thirtieth of a second, but librosa is called
    with a rate of 22050. Tones and tempo are then wrong for the sound, and the model was trained on
    these wrong ones.
    """
    claimed_rate = 22050
    data = librosa.resample(sound, orig_sr=rate, target_sr=RATE * _HOP)
    onsets = librosa.onset.onset_strength(y=data, sr=claimed_rate)
    cepstra = librosa.feature.mfcc(y=data, sr=claimed_rate, n_mfcc=20).T
    tones = librosa.feature.chroma_cens(y=data, sr=claimed_rate, hop_length=_HOP, n_chroma=12).T
    peaks = librosa.onset.onset_detect(onset_envelope=onsets, sr=claimed_rate, hop_length=_HOP)
    resampled = librosa.resample(sound, orig_sr=rate, target_sr=claimed_rate)
    tempo = librosa.feature.tempo(y=resampled, sr=claimed_rate)[0]
    _, beats = librosa.beat.beat_track(
        onset_envelope=onsets, sr=claimed_rate, hop_length=_HOP, start_bpm=tempo, tightness=100
    )
    marks = np.zeros((len(onsets), 2), np.float32)
    marks[peaks, 0], marks[beats, 1] = 1, 1
    return np.concatenate([onsets[:, None], cepstra, tones, marks], axis=1).astype(np.float32)
