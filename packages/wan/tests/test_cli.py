"""Wan's commands answer what needs no model before anything that takes seconds to import is
touched."""

from ditkit_core.testing.commands import check_commands


def test_help_version_and_mistakes_are_answered_before_slow_libraries_are_imported(tmp_path):
    check_commands("wan", "ditkit_wan", tmp_path)
