"""The `[experts]` section: which of a model's experts are trained, and the settings of each.

Experts split the noise levels between them and share no weight, so each is trained as a run of its
own, on the levels that it will see. A level reaches the model as the timestep 1000 · sigma in fp32,
which decides which expert sees it, as in the official sampler.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.config import BaseConfig
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.config.nearest import path_remedy
from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.config import ExpertsConfig
from ditkit_core.training.config import FlowConfig, HeldOutConfig
from ditkit_core.training.validation import sigmas_between

_NAMED = re.compile(r"(?<![a-z])(high|low)[-_. ]?noise(?![a-z])", re.IGNORECASE)
# In upper case the word alone counts; in lower case it is part of too many other names without
# `noise`.
_SHOUTED = re.compile(r"(?<![A-Za-z])(HIGH|LOW)(?![A-Za-z])")


def check_experts(
    config: ExpertsConfig,
    experts: Sequence[Expert],
    model: ModelPaths,
    presets_of_two: Sequence[str],
) -> None:
    """Refuse settings of [experts] and [model] that do not fit the architecture. `presets_of_two` are the
    presets that have experts."""
    if not experts:
        presets = (
            f"set model.preset to one of {', '.join(presets_of_two)}"
            if presets_of_two
            else "no preset of this model has any"
        )
        settings = [
            name
            for name in ("train", "rank", "lr", "steps")
            if getattr(config, name) != getattr(ExpertsConfig(), name)
        ]
        if settings:
            raise UserError(
                f"experts.{settings[0]} is for a model of two experts, and this one has one "
                f"transformer; {presets}, or leave it out"
            )
        if model.transformer_2:
            raise UserError(
                f"model.transformer_2 is the second of two experts, and this model has one "
                f"transformer; {presets}, or leave it out"
            )
        if presets_of_two and (expert_name := named_after(model.transformer)):
            raise UserError(
                f"model.transformer = {model.transformer!r} is named after one of two experts "
                f"({expert_name}), and nothing says that the model has two; {presets}, or rename it"
            )
        return
    for name in ("rank", "lr", "steps"):
        count = len(getattr(config, name))
        if count not in (0, 1, len(experts)):
            order = ", ".join(expert.name for expert in experts)
            raise UserError(
                f"experts.{name} has {count} numbers; give one for each expert ({order}), or one "
                f"for all"
            )
    for expert in experts:
        path = getattr(model, expert.part)
        if (expert_name := named_after(path)) not in ("", expert.name):
            others = " and ".join(
                f"model.{other.part} is the {other.name} expert" for other in experts
            )
            raise UserError(
                f"model.{expert.part} = {path!r} is named after the {expert_name} expert; {others}: "
                f"exchange them, or rename the file"
            )
        # The first expert's folder name proves nothing: every checkpoint with one transformer uses
        # it.
        folders = {Path(path).name, Path(path).parent.name}
        if other := next(
            (
                candidate
                for candidate in experts[1:]
                if candidate != expert and candidate.part in folders
            ),
            None,
        ):
            raise UserError(
                f"model.{expert.part} = {path!r} is in {other.part!r}, which is the folder of the "
                f"{other.name} expert: exchange them, or rename it"
            )


def check_merges(base: BaseConfig, experts: Sequence[Expert], *, trains: Expert | None) -> None:
    """Refuse files of `base.merge` and `base.merge_low` that are missing, of the other expert, or
    do not say which expert they are for. `trains` is the expert that is trained; None for all of
    them."""
    if base.merge_low and not experts:
        raise UserError(
            "base.merge_low is for the second of two experts, and this model has one transformer; "
            "add its files to base.merge"
        )
    for expert, (key, entries) in zip(experts, base.merges, strict=False):
        for path, _ in (parse_merge(entry, key) for entry in entries):
            check_named(expert, key, str(path))
            if not path.exists():
                raise UserError(f"{key}: there is no file {path}; {path_remedy(path)}")
    # Not taken for both: which one a file is for cannot be seen from it, and one that is merged
    # into the wrong expert trains without a word.
    if experts and base.merge and not base.merge_low and trains != experts[0]:
        raise UserError(
            f"base.merge is for the {experts[0].name} expert; name the files of the "
            f"{experts[1].name} one in base.merge_low (FILE@0 for none), also if they are the same"
        )


def check_named(expert: Expert, key: str, path: str) -> None:
    """Refuse a file for an expert, given as this key or flag, that is named after the other one."""
    if (expert_name := named_after(path)) not in ("", expert.name):
        raise UserError(
            f"{key} = {path!r} is named after the {expert_name} expert, and this is the {expert.name} "
            f"one; give its own file"
        )


def named_after(path: str) -> str:
    """The expert that the name of a file or folder says: `high_noise`, `low_noise`, or empty.

    All experts have the same shapes, so only names can tell them apart, of the file or else of its
    folder: `high_noise_model/`, `…_low_noise_14B.safetensors`, `…-HIGH-fp8.safetensors`.
    """
    for part in (Path(path).name, Path(path).parent.name):
        words = {match.lower() for pattern in (_NAMED, _SHOUTED) for match in pattern.findall(part)}
        # A name with both words proves nothing.
        if words:
            return f"{words.pop()}_noise" if len(words) == 1 else ""
    return ""


def noise_range(expert: Expert) -> tuple[float, float]:
    """The lowest and the highest noise level that an expert sees, both in fp32 and both included.

    Each is the outermost level whose fp32 timestep is on the expert's side of the boundary, so no
    level between them is on the other side.
    """
    lowest = float(_first_from(expert.min_sigma))
    if expert.max_sigma >= 1:
        return lowest, 1.0
    return lowest, float(torch.nextafter(_first_from(expert.max_sigma), torch.tensor(0.0)))


def _first_from(sigma: float) -> torch.Tensor:
    """The lowest fp32 level whose timestep is not below the timestep of `sigma`."""
    # 1000 · sigma is rounded in fp32, so the boundary is found by stepping over neighbouring
    # numbers, not by dividing.
    level = torch.tensor(sigma, dtype=torch.float32)
    while float(1000 * level) >= 1000 * sigma and level > 0:
        level = torch.nextafter(level, torch.tensor(0.0))
    while float(1000 * level) < 1000 * sigma:
        level = torch.nextafter(level, torch.tensor(1.0))
    return level


def restricted(
    expert: Expert, flow: FlowConfig, held_out: HeldOutConfig
) -> tuple[FlowConfig, HeldOutConfig]:
    """The [flow] and [held_out] sections of an expert: the configured noise levels that it sees,
    and a grid over its whole range."""
    lowest, highest = noise_range(expert)
    low, high = max(lowest, flow.min_sigma), min(highest, flow.max_sigma)
    if low >= high:
        raise UserError(
            f"flow.min_sigma = {flow.min_sigma:g} and flow.max_sigma = {flow.max_sigma:g} leave "
            f"nothing to the {expert.name} expert, which sees {expert.min_sigma:g} to "
            f"{expert.max_sigma:g}; widen them, or choose another experts.train"
        )
    # The grid spans the expert's whole range: [flow] may change when a run is resumed, and the grid
    # may not.
    sigmas = tuple(
        min(max(sigma, lowest), highest)
        for sigma in sigmas_between(held_out.sigmas, lowest, highest)
    )
    return replace(flow, min_sigma=low, max_sigma=high), replace(held_out, sigmas=sigmas)


def restrict_to_expert(config: Any, spec: ModelSpec, arch: Any) -> Any:
    """A `RunConfig`, checked against the architecture's experts and restricted to the noise levels
    of the one that it trains."""
    experts = spec.architecture.experts(arch)
    presets_of_two = [
        name
        for name, other in spec.architecture.presets.items()
        if spec.architecture.experts(other)
    ]
    check_experts(config.experts, experts, config.model, presets_of_two)
    expert = next(
        (candidate for candidate in experts if candidate.name == config.experts.train), None
    )
    if expert is None:
        return config
    check_named(expert, "adapter.init", config.adapter.init)
    flow, held_out = restricted(expert, config.flow, config.held_out)
    return replace(config, flow=flow, held_out=held_out)


def describe_expert(expert: Expert, flow: FlowConfig, held_out: HeldOutConfig) -> str:
    """One line with the noise levels that an expert is trained and validated on."""
    measured = (
        f"; validation levels {', '.join(f'{sigma:g}' for sigma in held_out.sigmas)}"
        if held_out.clips
        else ""
    )
    return f"{expert.name} expert (model.{expert.part}): noise levels {flow.min_sigma:.6g} to {flow.max_sigma:.6g}{measured}"


def own_settings(config: Any, experts: Sequence[Expert], expert: Expert) -> Any:
    """A `RunConfig` that trains one expert alone, with its rank, learning rate and steps in their
    usual keys."""
    index, section = list(experts).index(expert), config.experts
    return replace(
        config,
        adapter=replace(config.adapter, rank=section.of("rank", index, config.adapter.rank)),
        optim=replace(config.optim, lr=section.of("lr", index, config.optim.lr)),
        train=replace(config.train, steps=section.of("steps", index, config.train.steps)),
        experts=ExpertsConfig(train=expert.name),  # type: ignore[arg-type]  # the literals are the experts' names
    )
