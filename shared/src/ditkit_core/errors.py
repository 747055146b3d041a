"""Exceptions that are no fault of ours: what a person can mend, and what a person asked for."""


class UserError(Exception):
    """A mistake in what was given to us: a file, a key, a combination.

    The message is one line that says what is wrong, where, and how to mend it. The command line prints it without a
    traceback and exits non-zero; anything else that is raised is our own fault and keeps its traceback.
    """


class Stopped(Exception):
    """A signal ended the work early, with everything saved; the message says how to go on."""
