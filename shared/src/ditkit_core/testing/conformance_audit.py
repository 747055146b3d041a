"""Checks for every model that a precision audit is exact where nothing is lowered, finds the
timestep, and sees no lever."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.diagnostics.audit import audit as audit_module
from ditkit_core.diagnostics.audit.audit import ACTING, Subject, audit
from ditkit_core.diagnostics.audit.findings import AuditFindings, Errors, audit_from_json
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import Precision, precision_of
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.conformance_split import layouts
from ditkit_core.testing.conformance_swap import stream
from ditkit_core.testing.demo import Demo
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.world import Items, ModelChecks, make_model, outcome

_LORA = AdapterConfig(rank=4, dropout=0.2)


def subject_of(
    spec: ModelSpec, model: Any, items: Items, engine: BlockEngine | None = None
) -> Subject:
    """A model with the precision that it has, and items under the names 0, 1, …"""
    return Subject(
        model=model, spec=spec, precision=precision_of(model), run=engine or BlockEngine(),
        ids=[str(i) for i in range(len(items))],
        items=items, guidance=1.0, seed=7,
    )  # fmt: skip


def findings_of(subject: Subject) -> AuditFindings:
    """An audit's findings."""
    return audit(subject, advance=lambda: None)


def errors(findings: AuditFindings) -> dict[str, list[Errors]]:
    """Every number that does not depend on the machine's speed or memory."""
    cases = {"own": findings.as_run, "all lowered": findings.all_lowered}
    for entry in findings.op_groups:
        cases |= {
            f"alone {entry.op_group}": entry.alone,
            f"all but {entry.op_group}": entry.all_but,
        }
    return {name: [case.overall, *case.bins] for name, case in cases.items()}


class AuditChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    nightly: ClassVar[tuple[str, ...]] = (
        "test_division_and_streaming_change_no_number",
        "test_every_place_shows_and_the_timestep_most",
        "test_the_model_is_as_before",
        "test_what_is_not_lowered_has_no_error",
    )
    """Checks that run nightly; daily for the core's own model. A family's places and their order
    are checked daily by `PrecisionChecks`, and that its steps repeat by those of policies."""
    places_without: ClassVar[tuple[str, ...]] = ()
    """Places that this family has no operation for."""

    @pytest.fixture(autouse=True)
    def _shortened(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(audit_module, "ROUNDS", 1)
        monkeypatch.setattr(audit_module, "EDGES", (0.05, 0.95))

    @pytest.fixture
    def few_places(self, _shortened: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where it is not the places that matter."""
        monkeypatch.setattr(audit_module, "ACTING", ("matmul", "modulation"))

    @pytest.mark.usefixtures("few_places")
    def test_what_is_not_lowered_has_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With every place in fp64, results are bitwise identical to the exact ones."""
        monkeypatch.setattr(Subject, "lowered", torch.float64)
        findings = findings_of(
            subject_of(self.spec, make_model(self.spec, self.arch, adapter=_LORA), self.items(2))
        )
        assert 0 < findings.as_run.overall.gradient < 1e-4
        all_errors = errors(findings)
        del all_errors["own"]
        assert {value for case_errors in all_errors.values() for value in case_errors} == {
            Errors(velocity=0.0, loss=0.0, gradient=0.0)
        }

    def test_every_place_shows_and_the_timestep_most(self) -> None:
        """In bf16; what the family has no operation for makes no error at all."""
        findings = findings_of(
            subject_of(self.spec, make_model(self.spec, self.arch, adapter=_LORA), self.items(2))
        )
        assert findings.op_groups[0].op_group == "timestep"
        gradients = {entry.op_group: entry.alone.overall.gradient for entry in findings.op_groups}
        assert {name for name, error in gradients.items() if not error} == set(self.places_without)
        assert set(gradients) == set(ACTING)
        all_but = {entry.op_group: entry.all_but.overall.gradient for entry in findings.op_groups}
        assert min(all_but, key=lambda name: all_but[name]) == "timestep"
        costs = {entry.op_group: entry.cost for entry in findings.op_groups}
        assert costs.pop("matmul") is None
        assert all(cost is not None and cost.time_ratio > 0 for cost in costs.values())
        assert findings.seconds > 0 and findings.peak_bytes > 0

    @pytest.mark.usefixtures("few_places")
    @pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
    def test_division_and_streaming_change_no_number(self, quantize: str) -> None:
        """Over a base in bf16 or in 4 bits, samples of several sizes in the batch."""

        def model() -> Any:
            return make_quantized(
                self.spec, self.arch, quantize, dtype=torch.bfloat16, adapter=_LORA
            )

        items = self.items(2, ragged=True)
        plain = errors(findings_of(subject_of(self.spec, _frozen(model()), items)))
        assert 0 < plain["own"][0].gradient < 0.2
        divided = _frozen(model())
        devices = layouts(len(divided.blocks()))["three"]
        divide(divided, devices)
        with PretendDevices():
            swap = stream(divided, 1, devices[1:-1])
            there = findings_of(
                subject_of(
                    self.spec, divided, items, BlockEngine(policy="attn_only", hooks=(swap,))
                )
            )
        assert errors(there) == plain

    @pytest.mark.usefixtures("few_places")
    @pytest.mark.parametrize("adapter", ["lora", "full"])
    def test_the_model_is_as_before(self, adapter: str) -> None:
        """A step after an audit is bitwise identical to the step before it, and a second audit
        finds the same."""
        items = self.items(2)
        model = make_model(self.spec, self.arch, adapter=_LORA if adapter == "lora" else None)
        before = outcome(self.spec, model, items, BlockEngine())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        subject = subject_of(self.spec, model, items)
        first = errors(findings_of(subject))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, values[name]) and parameter.grad is gradients[name], name
        assert model.training and precision_of(model) == Precision(matmul=torch.float32)
        assert outcome(self.spec, model, items, BlockEngine()).equals(before)
        assert errors(findings_of(replace(subject))) == first


def _frozen(model: Any) -> Any:
    """Nothing but the adapters is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def check_demo(demo: Demo, folder: Path) -> None:
    """Audit a demo by its command, and read the findings that it wrote.

    Args:
        demo: Its inputs, written.
        folder: Of the run.
    """
    assert demo.train(folder, "--audit-precision") == 0
    findings = audit_from_json(
        json.loads((folder / "audit" / "precision.json").read_text(encoding="utf-8"))
    )
    assert findings.as_run.overall.gradient < 1e-5 < findings.op_groups[-1].alone.overall.gradient
    page = (folder / "audit" / "precision.html").read_text(encoding="utf-8")
    assert page.count('class="alone" x=') == len(findings.op_groups)
