"""The table of what diffusers misreads, against diffusers."""

from pathlib import Path

import pytest
from adapted_flux2 import ADALN, Adapted, kinds_of_layers

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import set_forms
from ditkit_flux2.adapters import check_adapter


def is_refused(form: str, modules: tuple[str, ...]) -> bool:
    try:
        check_adapter(form, modules)
    except UserError:
        return True
    return False


@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("layer", kinds_of_layers("dev"))
def test_what_diffusers_misreads_is_refused_and_nothing_else(
    tmp_path: Path, layer: str, form: str
) -> None:
    world = Adapted("dev", (layer,))
    file = world.write(tmp_path, form)
    try:
        line = world.verify(file)
        misread = False
        assert "agrees with our model" in line and "cannot tell" not in line
    except UserError as error:
        assert "differs from ours" in str(error)
        misread = True
    assert is_refused(form, (layer,)) == misread == (form == "official" and layer == ADALN)


def test_the_refusal_is_one_line_with_its_remedy() -> None:
    with pytest.raises(UserError, match=r"official form .* head\.adaLN_modulation\.1 ") as caught:
        check_adapter("official", ["single_blocks.0.linear1", ADALN])
    assert "\n" not in str(caught.value) and set_forms(["diffusers"]) in str(caught.value)
    check_adapter("official", ["single_blocks.0.linear1", "head.linear"])
    check_adapter("diffusers", [ADALN])
