"""The table of what diffusers misreads; test_conformance.py holds it against diffusers."""

import pytest
from adapted_flux2 import ADALN, kinds_of_layers

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import set_forms
from ditkit_flux2.adapters import check_adapter


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_one_layer_is_refused_in_the_official_form_and_no_other(form: str) -> None:
    for layer in kinds_of_layers("dev"):
        if form == "official" and layer == ADALN:
            continue
        check_adapter(form, [layer])


def test_the_refusal_is_one_line_with_its_remedy() -> None:
    with pytest.raises(UserError, match=r"official form .* head\.adaLN_modulation\.1 ") as caught:
        check_adapter("official", ["single_blocks.0.linear1", ADALN])
    assert "\n" not in str(caught.value) and set_forms(["diffusers"]) in str(caught.value)
