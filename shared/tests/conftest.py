"""What the core's tests share. Imports no torch: pytest-xdist's controller, which runs no test,
reads it too."""

from profiled_once import equal_steps_are_profiled_once  # noqa: F401 (a fixture)

from ditkit_core.testing.gpu import gpu  # noqa: F401 (a fixture)
