"""FLUX.2's commands answer what needs no model before anything that takes seconds to import is
touched."""

from ditkit_core.testing.commands import check_commands


def test_help_version_and_mistakes_are_answered_before_slow_libraries_are_imported(tmp_path):
    check_commands("flux2", "ditkit_flux2", tmp_path)
