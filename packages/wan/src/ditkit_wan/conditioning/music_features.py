"""Music as 35 numbers for each frame of dance: strength of onsets, 20 mel cepstra, 12 tones, and marks on peaks and beats.

Features come from a file, as its owner computed them, or from sound. The latter takes librosa, which the official code uses and which is
not among our dependencies: only its own algorithms give the numbers that the model was trained on.
Source: diffsynth/pipelines/wan_video.py of modelscope/DiffSynth-Studio.
"""

import math
import warnings
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.errors import MissingDependency, UserError

FEATURES = 35
RATE = 30
"""Rows for a second of music, whatever the frame rate of the dance."""
TABLES = (".npy", ".safetensors")
"""Files of features; any other is sound."""
_HOP = 512
_SHORT_ROWS = 15  # half a second: the last row stands for what a file lacks at its end
_MOST_BYTES = 2**28

# libav also reads playlists and scripts, whatever a file is called, and these name other files and hosts.
_OPEN_OPTIONS = {
    "format_whitelist": "wav,w64,aiff,mp3,flac,aac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf",
    "protocol_whitelist": "file",
}


def window(path: Path, *, start_seconds: float, seconds: float) -> Float[Tensor, "rows 35"]:
    """The features of a part of a piece of music; as many rows for every part of one length.

    Args:
        path: `.npy` or `.safetensors` with one table of features, or a file with sound.
        start_seconds: Where the part begins.
        seconds: How long it is.

    Raises:
        UserError: If the file cannot be read or has other numbers, or the music ends before the part does.
    """
    features = read(path, until_seconds=start_seconds + seconds)
    first, count = _part(path, len(features), start_seconds, seconds)
    part = features[first : first + count]
    return torch.cat([part, part[-1:].expand(count - len(part), -1)])


def check(path: Path, *, start_seconds: float, seconds: float) -> None:
    """Read a piece of music and whether it has this part, without making features of sound.

    Args:
        path: As of `window`.
        start_seconds: As of `window`.
        seconds: As of `window`.

    Raises:
        UserError: As `window`.
    """
    if path.suffix.lower() in TABLES:
        rows = len(read(path))
    else:
        sound, rate = decode(path, until_seconds=start_seconds + seconds)
        rows = 1 + math.ceil(len(sound) * RATE * _HOP / rate) // _HOP
    _part(path, rows, start_seconds, seconds)


def check_library(path: Path) -> None:
    """Refuse sound where nothing is installed that makes features of it.

    Raises:
        NotEquipped: With what to install.
    """
    if path.suffix.lower() not in TABLES and find_spec("librosa") is None:
        raise MissingDependency(
            f"{path} is sound, and librosa, which makes features of it, is not installed; install librosa, or give a "
            ".npy of the features"
        )


def _part(path: Path, rows: int, start_seconds: float, seconds: float) -> tuple[int, int]:
    """The first of its rows and how many they are; those that a file lacks at its end are few."""
    first, count = round(start_seconds * RATE), max(1, round(seconds * RATE))
    if min(rows - first, count) < max(1, count - _SHORT_ROWS):
        has, wants = rows / RATE, start_seconds + seconds
        raise UserError(
            f"{path} has {has:.1f} s of music and {wants:.1f} s are danced to; give longer music or a shorter clip"
        )
    return first, count


def read(path: Path, *, until_seconds: float = math.inf) -> Float[Tensor, "rows 35"]:
    """All features of a piece of music, in fp32.

    Args:
        path: As of `window`.
        until_seconds: Where a piece of sound ends for us, however long it is.

    Raises:
        UserError: As `window`.
    """
    features = _table(path) if path.suffix.lower() in TABLES else _of_sound(path, until_seconds)
    if features.ndim != 2 or features.shape[1] != FEATURES or not len(features):
        raise UserError(
            f"{path} holds {tuple(features.shape)} numbers, not rows of {FEATURES}; write features at {RATE} rows a second"
        )
    if not features.isfinite().all():
        raise UserError(f"{path} holds numbers that are not finite; compute the features again")
    return features


def _table(path: Path) -> Tensor:
    """The table of a file of numbers; nothing in it is run."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} is too large for features of music; name the right file")
        if path.suffix.lower() == ".npy":
            return _npy(path)
        tables = load_file(path)
    except (OSError, ValueError, TypeError, EOFError, OverflowError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path} cannot be read as features of music ({reason}); write them again") from error
    if len(tables) != 1:
        raise UserError(f"{path} holds {len(tables)} tensors; write one, the features of music")
    (table,) = tables.values()
    return table.float()


def _npy(path: Path) -> Tensor:
    """The table of a `.npy`, whose header is believed only as far as there are bytes for it."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"its version is {version[0]}.{version[1]}, and tables of numbers have 1.0")
        there = path.stat().st_size - file.tell()
    if dtype.kind not in "fiub":
        raise ValueError(f"it holds {dtype}, not numbers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > there:
        raise ValueError(f"it says that it has {shape} numbers of {dtype}, and has {there} bytes")
    return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))


def _of_sound(path: Path, until_seconds: float) -> Tensor:
    sound, rate = decode(path, until_seconds=until_seconds)
    check_library(path)
    import librosa

    with warnings.catch_warnings():
        # of a second and less: its lowest octaves have fewer samples than a window, one warning each, and what is computed is the same
        warnings.filterwarnings("ignore", "n_fft=", UserWarning)
        return torch.from_numpy(_features(librosa, sound, rate))


def decode(path: Path, *, until_seconds: float = math.inf) -> tuple[Float[np.ndarray, " samples"], int]:
    """The first track of sound of a file, its channels averaged.

    Args:
        path: The file.
        until_seconds: No more than this is decoded.

    Returns:
        Samples in about [-1, 1], fp32, and how many of them are a second.

    Raises:
        UserError: If there is none, it cannot be decoded, or it is not of finite numbers.
    """
    import av

    try:
        with av.open(str(path), options=dict(_OPEN_OPTIONS), metadata_errors="replace") as container:
            if not container.streams.audio:
                raise UserError(f"{path} has no sound; name a file with music")
            stream = container.streams.audio[0]
            rate = stream.rate
            resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
            parts: list[np.ndarray] = []
            there = 0
            for given in chain(container.decode(stream), [None]):  # None: what the resampler still has
                if there >= until_seconds * rate:
                    break
                parts += [frame.to_ndarray().mean(axis=0) for frame in resampler.resample(given)]
                there += 0 if given is None else given.samples
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise UserError(f"{path} cannot be decoded as sound ({reason}); convert it again or remove it") from error
    sound = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    sound = sound[: math.ceil(min(len(sound), until_seconds * rate))]
    if not len(sound):
        raise UserError(f"{path} has no sound in it; give music")
    if not np.isfinite(sound).all():
        raise UserError(f"{path} holds samples that are not finite numbers; convert it again")
    return sound, rate


def _features(librosa: Any, sound: Float[np.ndarray, " samples"], rate: int) -> Float[np.ndarray, "rows 35"]:
    """As the official code has librosa compute them.

    It resamples so that a hop of 512 is a thirtieth of a second, and then tells librosa that the rate is 22050: tones and tempo are
    those of that rate, and the model has learnt them so.
    """
    told = 22050
    data = librosa.resample(sound, orig_sr=rate, target_sr=RATE * _HOP)
    onsets = librosa.onset.onset_strength(y=data, sr=told)
    cepstra = librosa.feature.mfcc(y=data, sr=told, n_mfcc=20).T
    tones = librosa.feature.chroma_cens(y=data, sr=told, hop_length=_HOP, n_chroma=12).T
    peaks = librosa.onset.onset_detect(onset_envelope=onsets, sr=told, hop_length=_HOP)
    whole = librosa.resample(sound, orig_sr=rate, target_sr=told)
    tempo = librosa.feature.tempo(y=whole, sr=told)[0]
    _, beats = librosa.beat.beat_track(
        onset_envelope=onsets, sr=told, hop_length=_HOP, start_bpm=tempo, tightness=100
    )  # fmt: skip
    marks = np.zeros((len(onsets), 2), np.float32)
    marks[peaks, 0], marks[beats, 1] = 1, 1
    return np.concatenate([onsets[:, None], cepstra, tones, marks], axis=1).astype(np.float32)
