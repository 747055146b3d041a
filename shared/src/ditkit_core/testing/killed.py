"""A kill, in a test that goes on after it."""


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""
