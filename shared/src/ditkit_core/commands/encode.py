"""The encode command: fills the cache, and on request verifies or prunes it, or writes the
preprocessed samples as files."""

from collections.abc import Sequence
from pathlib import Path

from ditkit_core.commands.options import EncodeOptions
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.encoding.cache import Cache, MediaHashes, Rule, keys_in, parse_rule, prune, verify
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.preview_dataset import dump
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.checks import check_run
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import encode_all
from ditkit_core.run.training import base_steps


def encode_run(spec: ModelSpec, config: RunConfig, options: EncodeOptions) -> None:
    """Encode the run's data into the cache, and do what the options ask for; nothing is trained."""
    # as before training: what a run would refuse is not worth encoding
    check_run(create_run(spec, config))
    if options.demo:
        spec.demo.write(config.run_folder.inputs)
    run = create_run(spec, config, fetch=True)
    # parsed now: encoding may take hours
    rule = parse_rule(options.prune_cache) if options.prune_cache else None
    if options.dump:
        _check_dump(run.data, local_path(options.dump))
    if options.verify_cache:
        _verify_cache(run.data.cache)
    encoded, prior = encode_all(run.data)
    count = len(encoded) + len(prior)
    say(
        f"{plural(count, 'sample')} {'is' if count == 1 else 'are'} encoded in "
        f"{run.data.cache.folder}"
    )
    if options.dump:
        encoded_ids, folder = {sample.id for sample in encoded}, local_path(options.dump)
        samples = [s for s in run.data.dataset.samples if s.id in encoded_ids]
        columns = run.data.auxiliary.columns
        with progress("dump", len(samples)) as bar:
            dump(
                samples,
                folder,
                fps=run.data.dataset.fps,
                columns=columns,
                reference_size=run.spec.data.reference_size,
                advance=bar.advance,
            )
        say(f"{len(samples)} samples as they are encoded: {folder}")
    if rule is not None:  # last, when it is known which entries this data needs
        _prune_cache(run.data, rule, [*encoded, *prior])


def _verify_cache(cache: Cache) -> None:
    """Compare every cache entry with its digest, and report those that differ; have every file that
    entries were made of read again."""
    with MediaHashes(cache.folder) as hashes:
        hashes.forget()
    say("all files are read again; whatever has changed unnoticed is encoded again")
    count = sum(1 for _ in cache.entries())
    with progress("verify cache", count) as bar:
        damaged = verify(cache, bar.advance)
    say(f"{cache.folder}: {count} entries read, {damaged} damaged")


def _prune_cache(data: RunData, rule: Rule, encoded: Sequence[EncodedSample]) -> None:
    """Remove entries by a rule. Entries of this run's data stay; with `unused`, so do the entries
    of every run in the same parent folder."""
    keep = {
        part.rpartition(" ")[2]
        for sample in encoded
        for part in (*sample.keys, *sample.caption_keys)
    }
    if base := base_steps(data):
        keep.add(base.text_key)
    if rule.unused:
        runs = data.config.run_folder.path.absolute().parent
        # Two levels: a run of several experts contains a run folder for each.
        of_experts = [
            file
            for file in runs.glob("*/*/data.json")
            if RunFolder(file.parent).config_file.exists()
        ]
        keep |= keys_in(sorted([*runs.glob("*/data.json"), *of_experts]))
    done = prune(data.cache, rule, keep)
    say(
        f"{data.cache.folder}: removed {done.removed} entries ({done.removed_bytes / 1e9:.2f} GB), "
        f"{done.remaining} ({done.left_bytes / 1e9:.2f} GB) are left"
    )


def _check_dump(data: RunData, folder: Path) -> None:
    """Refuse to write samples into the folders of the data, where they would be read as clips or
    overwrite some."""
    target, section = folder.resolve(), data.config.data
    folders = [*section.folders, section.folder, section.references, section.masks]
    folders += [item.partition("=")[2] for item in section.controls]
    folders += [str(data.prior_folder)] if data.config.prior.wanted else []
    for name in folders:
        data_folder = local_path(name.strip()).resolve()
        if name and (target.is_relative_to(data_folder) or data_folder.is_relative_to(target)):
            raise UserError(
                f"--dump {folder} would write into {name}, which is data; name a folder apart from "
                f"the data"
            )
