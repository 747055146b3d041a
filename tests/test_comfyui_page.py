"""The page about ComfyUI names the files that a run writes for it, and the boundary between the
experts."""

import re
from pathlib import Path

import pytest

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import with_forms_of
from ditkit_core.adapters.files.export_names import adapter_file
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE
from workspace import ROOT

PAGE = (ROOT / "docs/comfyui.md").read_text(encoding="utf-8")
METHODS = {"lora": {}, "dora": {"use_dora": True}, "lokr": {"method": "lokr"}}
SPECS = {"wan": WAN, "flux2": FLUX2, "zimage": ZIMAGE}


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("method", METHODS)
def test_the_file_of_each_method_is_one_that_comfyui_reads(family, method):
    (name,) = re.findall(rf"<!-- {family} {method} -->[^|]+\| `([^`]+)`", PAGE)
    adapter = AdapterConfig(**METHODS[method])
    forms = with_forms_of(ExportConfig(), adapter, SPECS[family]).forms
    written = {adapter_file(Path(), "NAME", form).name: form for form in forms}
    form = written[name]
    layout = ADAPTER_FORMS[form].layout("bare", use_dora=adapter.use_dora, method=adapter.method)
    assert SPECS[family].adapters.rules.readers(layout, ["blocks.0"])["ComfyUI"] == ""


def test_the_boundaries_are_those_of_the_presets():
    assert (
        f"({PRESETS['t2v-a14b'].boundary} for text to video, {PRESETS['i2v-a14b'].boundary:.3f} "
        f"for image" in PAGE
    )
