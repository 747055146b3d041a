"""The one exception that means: the person who started this can mend it."""


class UserError(Exception):
    """A mistake in what was given to us: a file, a key, a combination.

    The message is one line that says what is wrong, where, and how to mend it. The command line prints it without a
    traceback and exits non-zero; anything else that is raised is our own fault and keeps its traceback.
    """
