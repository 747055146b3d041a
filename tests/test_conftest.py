"""What conftest.py promises to every test, seen from inside one, in whatever worker it runs."""

import faulthandler
import gc
import os
import re
import shlex
import socket
import sys
import time
import warnings
from types import ModuleType, SimpleNamespace

import jaxtyping
import pytest
import torch
from _pytest.mark.expression import Expression
from jaxtyping import Float
from torch import Tensor

from annotation_checks import _checkable, beartyped, checked
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.training.flow_matching import shift_sigma
from ditkit_wan.conditioning.camera import moving
from workspace import ROOT


def test_annotations_of_modules_that_name_shapes_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="scaling"):
        low_rank_sum(
            torch.ones(2, 3), torch.ones(1, 3), torch.ones(5, 1), "1", lambda _: torch.ones(2, 5)
        )  # type: ignore[arg-type]
    with pytest.raises(jaxtyping.TypeCheckError, match="down"):
        low_rank_sum(
            torch.ones(2, 3), torch.ones(1, 4), torch.ones(5, 1), 1.0, lambda _: torch.ones(2, 5)
        )
    assert hasattr(moving, "__wrapped__"), (
        "it returns what its module calls `Poses`, which is a shape"
    )
    assert not hasattr(shift_sigma, "__wrapped__"), (
        "it names no shapes, and types alone are mypy's work"
    )


def test_a_result_is_checked_too_by_the_dimensions_of_the_arguments():
    @checked
    def use(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "columns rows"]:
        return x.T if len(x) < 4 else x

    use(torch.ones(2, 3))
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        use(torch.ones(4, 3))


def test_what_differs_from_calls_that_passed_is_checked():
    def made():
        @checked
        def use(
            x: Float[Tensor, "rows columns"], *, by: Float[Tensor, " rows"] | None = None
        ) -> Float[Tensor, " rows"]:
            return x.sum(1) if by is None else x[:, 0] + by

        return use

    assert made()(torch.ones(2, 3)).tolist() == [3.0, 3.0]
    assert made()(torch.ones(2, 3), by=torch.ones(2)).tolist() == [2.0, 2.0]
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.long), [1.0, 1.0]):
        with pytest.raises(jaxtyping.TypeCheckError, match="by"):
            made()(torch.ones(2, 3), by=wrong)
    for wrong in (torch.ones(2), torch.ones(2, 3, dtype=torch.long)):
        with pytest.raises(jaxtyping.TypeCheckError, match="x"):
            made()(wrong)


def test_annotations_that_depend_on_values_are_checked_at_every_call():
    @checked
    def use(rows: int) -> Float[Tensor, " {rows}"]:
        return torch.ones(3)

    use(3)
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        use(2)


def test_a_protocol_counts_as_any_and_what_stands_next_to_it_is_still_checked():
    from ditkit_core.models.protocol import StagedModel

    assert _checkable(StagedModel | None) == (_checkable(StagedModel) | None)
    assert _checkable(dict[str, StagedModel | int]) != dict[str, StagedModel | int]

    @beartyped
    def use(model: StagedModel, num_steps: int) -> None: ...

    use(object(), 3)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="num_steps"):
        use(object(), "three")  # type: ignore[arg-type]


def test_a_connection_to_another_machine_fails_the_test():
    with (
        socket.socket() as connection,
        pytest.raises(pytest.fail.Exception, match="must not use the network"),
    ):
        connection.connect(("192.0.2.1", 80))


def test_a_plugin_for_benchmarks_stops_no_run(request):
    """Before pytest-benchmark 5.3 its warning next to pytest-xdist ended the run."""
    assert request.config.pluginmanager.is_blocked("benchmark")


def test_the_stacks_of_a_worker_that_hangs_are_printed(request, monkeypatch, tmp_path):
    """Also where a test hangs in C, where no signal is handled."""
    (conftest,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "conftest.py")
    )
    assert conftest._stderr > 2 and os.fstat(conftest._stderr), "a copy, which no capture replaces"
    assert conftest._watch_began > 0, "it has begun"
    assert conftest._STUCK_AFTER < float(request.config.getini("timeout"))
    stacks = tmp_path / "stacks"
    with stacks.open("w") as file:
        monkeypatch.setattr(conftest, "_stderr", file.fileno())
        monkeypatch.setattr(conftest, "_STUCK_AFTER", 0.01)
        try:
            monkeypatch.setattr(conftest, "_BETWEEN_WATCHES", 1e6)
            conftest._watch()
            time.sleep(0.1)
            assert not stacks.stat().st_size, "not started by each test"
            monkeypatch.setattr(conftest, "_BETWEEN_WATCHES", 0.0)
            conftest._watch()
            deadline = time.monotonic() + 60
            while not stacks.stat().st_size and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            faulthandler.cancel_dump_traceback_later()
    assert "in test_the_stacks_of_a_worker" in stacks.read_text()


def test_torch_runs_on_one_thread():
    assert torch.get_num_threads() == 1


def test_what_tests_import_and_keep_is_looked_through_by_no_later_collection_of_garbage(
    request, monkeypatch
):
    plugins = request.config.pluginmanager.get_plugins()
    (conftest,) = (
        plugin
        for plugin in plugins
        if getattr(plugin, "__file__", None) == str(ROOT / "conftest.py")
    )
    monkeypatch.setattr(conftest, "_imported", len(sys.modules))
    monkeypatch.setattr(conftest, "_num_tests", 0)

    def is_looked_through(kept: list[int]) -> bool:
        # Without what is set aside, which takes a second to count after thousands of tests.
        return any(other is kept for other in gc.get_objects())

    first = [1]
    conftest.pytest_runtest_setup()
    assert is_looked_through(first), "nothing was imported"
    for number in range(30):
        monkeypatch.setitem(sys.modules, f"imported_{number}", ModuleType(f"imported_{number}"))
    conftest.pytest_runtest_setup()
    assert not is_looked_through(first)
    second = [2]
    for _ in range(19):
        conftest.pytest_runtest_setup()
    assert is_looked_through(second), "few tests since"
    conftest.pytest_runtest_setup()
    assert not is_looked_through(second)


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        ("not slow and not exhaustive and not gpu", ""),
        ("slow", ""),
        ("", ""),
        ("gpu", "0"),
        ("gpu or slow", "0"),
    ],
)
def test_only_tests_for_a_gpu_see_one(chosen, seen, request, monkeypatch):
    """A run that names no device takes a GPU where there is one."""
    plugins = request.config.pluginmanager.get_plugins()
    (conftest,) = (
        plugin
        for plugin in plugins
        if getattr(plugin, "__file__", None) == str(ROOT / "conftest.py")
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=chosen)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_every_command_for_a_gpu_chooses_all_tests_for_it_and_runs_them_in_one_process(request):
    """Also slow and exhaustive ones. Several processes would share the GPU's memory, which some of
    the tests measure."""
    parser = request.config._parser
    pages = [
        ".github/workflows/gpu.yml",
        "CONTRIBUTING.md",
        "docs/checkpointing.md",
        "shared/tests/README.md",
    ]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        commands = re.findall(r"pytest ([^`\n]*-m [^`\n]*gpu[^`\n]*)", text)
        assert commands, page
        for command in commands:
            given = parser.parse_known_args(shlex.split(command))
            chosen = Expression.compile(given.markexpr)
            assert given.numprocesses == 0, (page, command)
            for others in ((), ("slow",), ("exhaustive",), ("slow", "ranks")):
                marks = {"gpu", *others}
                assert chosen.evaluate(lambda name, marks=marks, **_: name in marks), (
                    page,
                    command,
                    others,
                )
            assert not chosen.evaluate(lambda name, **_: name == "slow"), (page, command)


@pytest.mark.parametrize(
    "said",
    [
        (
            "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the "
            "primary context..."
        ),
        (
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
            "Consider setting it"
        ),
    ],
)
def test_what_torch_says_on_a_gpu_fails_no_test(said):
    warnings.warn(said, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="another"):
        warnings.warn("another", UserWarning, stacklevel=1)
