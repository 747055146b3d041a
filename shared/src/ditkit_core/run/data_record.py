"""`data.json`: the record of the samples that a run trains on, which a run that continues is
compared with.

It has no folder in it: data that was moved is the same data.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.io.files import json_hash, read_json_object, write_text
from ditkit_core.io.run_dir import RunFolder

EMPTY_CAPTION = "(empty caption)"
"""Key of the empty caption that caption dropout uses."""
BASE_WEIGHTS = "(base weights)"
"""Key of the fingerprint of the base."""
BASE_CAPTION = "(caption of the steps that match the base)"
"""Key of `prior.prompt` with `prior.match_base`. It is there so that the cache's entry is not
pruned; a run may change it."""
SLIDER_CAPTIONS = "(prompts of the slider)"
"""Key of the prompts of a slider but the empty one. A run may not change them."""
NO_SAMPLES = {EMPTY_CAPTION, BASE_WEIGHTS, BASE_CAPTION, SLIDER_CAPTIONS}
_DIGEST = "(digest)"
"""Key of the digest of the others; files of earlier versions have none."""
_REMEDY = "restore it, or remove it to continue on the data as it is now"


def keys_of(encoded: Sequence[EncodedSample]) -> dict[str, list[str]]:
    """The cache keys of each sample, by its id."""
    return {sample.id: sample.keys for sample in encoded}


def read_record(folder: RunFolder) -> dict[str, Any] | None:
    """The record of the samples that a run was trained on; None before its first save, because
    until then nothing depends on them."""
    if not (folder.data_file.exists() and folder.has_save):
        return None
    record = read_json_object(folder.data_file, _REMEDY)
    # Without the digest, damage would be taken for other data.
    if record.pop(_DIGEST, None) not in (None, json_hash(record)):
        raise UserError(f"{folder.data_file} is damaged; {_REMEDY}")
    return record


def write_record(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write the record with its digest."""
    write_text(
        folder.data_file,
        json.dumps({**record, _DIGEST: json_hash(record)}, indent=0, sort_keys=True),
    )


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """The keys whose values differ, or that one of two records lacks."""
    return {id for id in now.keys() | before.keys() if now.get(id) != before.get(id)}
