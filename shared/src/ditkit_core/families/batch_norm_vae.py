"""The VAE whose latents are the posterior's mode in 2x2 patches, normalised with the statistics of a
batch norm that is never run, as its authors train and sample. The statistics are fp32 in any mode.
"""

from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.families.vae import VaeFamily, config_of_kl_file
from ditkit_core.io.safetensors import SafetensorsSource


def batch_normed(*, label: str, remedy: str) -> VaeFamily:
    """The VAE under a family's name.

    Args:
        label: As `VaeFamily.label`.
        remedy: As `VaeFamily.remedy`.
    """

    def config_of_file(source: SafetensorsSource) -> dict[str, Any]:
        """diffusers' configuration of a single file; the small decoder differs from the usual one
        in widths alone."""
        if "bn.running_mean" not in source.tensors:
            raise UserError(
                f"{source.path} is not {label} (FLUX.1's file has the same name); {remedy}"
            )
        config = config_of_kl_file(family, source)
        latents, patches = config["latent_channels"], source.tensors["bn.running_mean"].shape[0]
        if patches != latents * family.patch**2:
            raise UserError(
                f"{source.path} contradicts itself: {latents} and {patches} channels; {remedy}"
            )
        return config

    family = VaeFamily(
        kind="AutoencoderKLFlux2",
        label=label,
        remedy=remedy,
        published={"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]},
        patch=2,
        statistics=_statistics,
        recipe="posterior mode, 2x2 patches as channel, row, column, batch-norm statistics, {}",
        ignore=frozenset({"bn.num_batches_tracked"}),
        in_fp32=frozenset({"bn.running_mean", "bn.running_var"}),
        prepare=_without_count,
        config_of_file=config_of_file,
    )
    return family


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of the patches over the VAE's own training
    data."""
    return vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.bn.eps)


def _without_count(vae: Any) -> None:
    # used in training alone, and not in every file
    vae.bn.register_buffer("num_batches_tracked", None)
