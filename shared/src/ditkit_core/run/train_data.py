"""The data that a run trains on: its micro-batches in order, and whether the model takes it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, TrainDataLoader
from ditkit_core.encoding.prior_preservation import PriorDataLoader
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.data import RunData
from ditkit_core.training.train_model import batch_size_of, data_loader


def training_data(
    data: RunData, samples: Sequence[EncodedSample], prior: Sequence[EncodedSample]
) -> TrainDataLoader | PriorDataLoader:
    """The data loader of a run."""
    config = data.config.train
    loader = data_loader(data.spec, config, samples, base_steps(data))
    if loader.num_shapes > 1:
        say(
            f"{len(samples)} samples have {loader.num_shapes} shapes: {loader.mean_size:.1f} in a micro-batch on average"
        )
    if not prior:
        return loader
    return PriorDataLoader(
        loader,
        prior,
        seed=config.seed,
        batch_size=batch_size_of(data.spec, config),
        weight=data.config.prior.weight,
        caption_dropout=config.caption_dropout,
        control_dropout=config.control_dropout,
    )


def base_steps(data: RunData) -> BaseSteps | None:
    """The steps whose target is the base's own prediction; None for none."""
    prior = data.config.prior
    if not prior.match_base:
        return None
    key = text_key(prior.prompt, data.auxiliary.encoders[1]) if prior.prompt else ""
    return BaseSteps(
        share=prior.match_base, accumulation=data.config.train.accumulation, weight=prior.weight, text_key=key
    )


def check_item(spec: ModelSpec, model: StagedModel, item: Mapping[str, Tensor]) -> None:
    """Run the embedding on the shapes of a sample, on `meta`: the shapes of another model fail here, before weights are read."""
    try:
        with torch.no_grad():
            # Only shapes matter here, so any noise level works.
            sigma = torch.zeros(1, device="meta")
            model.embed(spec.training.make_inputs([item["latents"]], sigma, [item], 1.0))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in item.items())
        raise UserError(
            f"the encoded samples do not fit the transformer ({shapes}: {str(error).splitlines()[0]}); "
            "set model.vae and model.text_encoder to those that belong to it"
        ) from error
