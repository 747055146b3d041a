"""A model's base without its adapter, by the names of a form."""

from torch import Tensor

from ditkit_core.adapters.diffusers_model import BareBase
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.state_dict import StateDictNames


def base_in_form(model: StagedModel, names: StateDictNames, form: str) -> dict[str, Tensor]:
    base = BareBase(model)
    return {theirs: base.rows(parts) for theirs, parts in base.in_form(names, form).items()}
