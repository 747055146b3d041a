"""What readers of adapter files make of FLUX.2's: which modules they would ignore or misread, form by form.

Measured by loading an adapter on each Linear layer alone, in each form, with diffusers 0.42: `Flux2LoraLoaderMixin` takes every
one of them, those outside the blocks too, and gets one wrong. Readers of the official form that keep the official names have
nothing to get wrong, but a file that means two things is not written.
"""

from collections.abc import Collection, Mapping

from ditkit_core.errors import UserError

MISREAD: Mapping[str, Mapping[str, str]] = {
    "official": {
        "head.adaLN_modulation.1": "diffusers renames it but leaves shift and scale in the official order, which is not its own"
    }
}
"""By form and module of ours: what goes wrong."""


def check_adapter(form: str, modules: Collection[str]) -> None:
    """Refuse a form in which a reader would ignore or misread an adapted module.

    Args:
        form: The form of the file.
        modules: The adapted modules, by our names.

    Raises:
        UserError: Naming the module, and how to do without that form.
    """
    for module, reason in MISREAD.get(form, {}).items():
        if module in modules:
            raise UserError(
                f"export.forms: the {form} form cannot hold an adapter on {module} ({reason}); "
                'set export.forms = ["diffusers"], or leave the module out of adapter.targets'
            )
