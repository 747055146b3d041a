"""Precision audits: a planted culprit is found, numbers are the batch's alone, and the command as a
person meets it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_world import World

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.commands import audit as audit_stage
from ditkit_core.diagnostics.audit import audit as audit_module
from ditkit_core.diagnostics.audit.audit import (
    BASE,
    EDGES,
    NOT_IN_A_BATCH,
    estimated_seconds,
    num_passes,
    with_adapters_at_work,
)
from ditkit_core.diagnostics.audit.dtype_view import DtypeView, by_op_group
from ditkit_core.diagnostics.audit.findings import audit_from_json, audit_json
from ditkit_core.diagnostics.audit.render import audit_document
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.models.precision import PLACES, Precision, set_precision
from ditkit_core.nn.attention.backends import exact_attention
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.testing.conformance_audit import AuditChecks, errors, findings_of, subject_of
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, ToyModel, toy_items
from ditkit_core.testing.world import make_model

LORA = AdapterConfig(rank=4)
ARCH = ToyArch(dim=16)


class TestToy(AuditChecks):
    spec = TOY
    nightly = ()
    arch = TOY.architecture.presets["dropout"]
    places_without = ("rotary_tables", "rotary", "qk_norms")

    def items(self, count, ragged=False):
        return toy_items(count, ragged=ragged)


class _Block(ToyBlock):
    """The modulation passes through numbers 1000 times its size, where bf16 has three bits of
    it."""

    def forward(self, carry):
        shifted = carry.modulation.to(self.precision.modulation) + 1000
        return super().forward(carry._replace(modulation=shifted - 1000))


class _Model(ToyModel):
    def __init__(self, arch, precision):
        super().__init__(arch, precision)
        self.layers = torch.nn.ModuleList(_Block(arch, precision) for _ in range(arch.depth))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(audit_module, "ROUNDS", 1)


@pytest.fixture
def few(short, monkeypatch):
    monkeypatch.setattr(audit_module, "ACTING", ("modulation", "timestep"))
    monkeypatch.setattr(audit_module, "EDGES", (0.2, 0.8))


def test_a_planted_culprit_is_found(short, monkeypatch):
    places = ("matmul", "residual", "modulation", "timestep")
    monkeypatch.setattr(audit_module, "ACTING", places)
    monkeypatch.setattr(audit_module, "EDGES", (0.2, 0.8))
    spec = altered(TOY, build=_Model)
    findings = findings_of(subject_of(spec, make_model(spec, ARCH, adapter=LORA), toy_items(2)))
    first, second = findings.op_groups[:2]
    assert first.op_group == "modulation" and second.op_group == "timestep"
    assert first.alone.overall.gradient > 2 * second.alone.overall.gradient
    assert first.all_but.overall.gradient < 0.5 * findings.all_lowered.overall.gradient


def test_levels_are_sampled_in_every_range_and_noise_is_the_same(short, monkeypatch):
    monkeypatch.setattr(audit_module, "ACTING", ("timestep",))
    seen: list[tuple[Tensor, list[Tensor]]] = []

    def make_inputs(noised, sigma, items, guidance):
        seen.append((sigma, list(noised)))
        return TOY.training.make_inputs(noised, sigma, items, guidance)

    items = toy_items(3)
    spec = altered(TOY, make_inputs=make_inputs)
    findings = findings_of(subject_of(spec, make_model(TOY, ARCH, adapter=LORA), items))
    levels = [sigma for sigma, _ in seen[: len(EDGES) - 1]]
    assert findings.bin_names == ["0.05-0.25", "0.25-0.5", "0.5-0.75", "0.75-0.95"]
    for low, high, sigma in zip(EDGES, EDGES[1:], levels, strict=False):
        assert low <= sigma.min() and sigma.max() <= high and sigma.unique().numel() == 3
    noise = [
        [(x - (1 - s) * item["latents"]) / s for s, x, item in zip(sigma, noised, items)]
        for sigma, noised in seen
    ]
    assert all(
        torch.allclose(eps, other, atol=1e-4)
        for each in noise
        for eps, other in zip(each, noise[0], strict=True)
    )


def test_lower_precision_of_the_run_shows_in_its_own_error(few):
    findings = {
        dtype: findings_of(
            subject_of(TOY, make_model(TOY, ARCH, dtype=dtype, adapter=LORA), toy_items(2))
        )
        for dtype in (torch.bfloat16, torch.float32)
    }
    narrow, wide = (
        findings[dtype].as_run.overall.gradient for dtype in (torch.bfloat16, torch.float32)
    )
    assert 1e-3 < narrow < 1e-1 and wide < 1e-5
    # the run's own islands keep the timestep, so it is nearer than bf16 throughout
    assert narrow < findings[torch.bfloat16].all_lowered.overall.gradient
    tried = {
        each.op_group: each.cost.dtype for each in findings[torch.bfloat16].op_groups if each.cost
    }
    assert tried == {"modulation": "bf16", "timestep": "bf16"}


def test_a_place_that_is_low_is_raised_for_its_cost(short, monkeypatch):
    monkeypatch.setattr(audit_module, "ACTING", ("attention", "residual"))
    monkeypatch.setattr(audit_module, "EDGES", (0.2, 0.8))
    subject = subject_of(
        TOY, make_model(TOY, ARCH, dtype=torch.bfloat16, adapter=LORA), toy_items(2)
    )
    costs = {each.op_group: each.cost for each in findings_of(subject).op_groups}
    assert costs["attention"].dtype == "fp32" and costs["residual"].dtype == "bf16"
    assert costs["attention"].num_bytes > 0 > costs["residual"].num_bytes


def test_findings_survive_json_and_progress_comes_to_its_end(few, tmp_path):
    done: list[None] = []
    subject = subject_of(TOY, make_model(TOY, ARCH, adapter=LORA), toy_items(2))
    findings = audit_module.audit(subject, advance=lambda: done.append(None), notes=("a", "b"))
    assert len(done) == num_passes(subject)
    assert estimated_seconds(subject) > 0
    assert (
        audit_from_json(json.loads(json.dumps(audit_json(findings), allow_nan=False))) == findings
    )
    document = audit_document(findings)
    files = document.write(tmp_path / "audit" / "precision.json")
    assert [file.name for file in files] == ["precision.json", "precision.html"]
    assert sorted(tmp_path.glob("audit/*")) == sorted(files)
    page = files[1].read_text()
    rows = re.findall(r'<tr><td dir="auto">([^<]*)</td>', page)
    assert rows == [*(each.op_group for each in findings.op_groups), "all lowered", "this run"]
    assert (
        page.count('class="alone" x=') == page.count('class="others" x=') == len(findings.op_groups)
    )
    assert page == document.page() and all(place in page for place in NOT_IN_A_BATCH)
    assert {each.op_group for each in findings.op_groups}.isdisjoint(findings.not_measured)


def test_every_place_is_measured_or_said_not_to_be():
    assert set(audit_module.ACTING) | set(NOT_IN_A_BATCH) == set(PLACES)


def test_adapters_that_start_at_zero_are_woken_and_put_back():
    model = make_model(TOY, ARCH, adapter=LORA)
    trained = trainable_parameters(model)
    with with_adapters_at_work(model, 3) as changed:
        assert not changed
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:
                parameter.zero_()
    drawn: list[Mapping[str, Tensor]] = []
    for _ in range(2):
        with with_adapters_at_work(model, 3) as changed:
            assert changed and all(parameter.any() for parameter in trained.values())
            drawn.append({name: parameter.detach().clone() for name, parameter in trained.items()})
    assert all(torch.equal(value, drawn[1][name]) for name, value in drawn[0].items())
    assert not any(parameter.any() for name, parameter in trained.items() if "lora_B" in name)


def test_what_is_not_finite_in_fp64_is_said(few):
    model = make_model(TOY, ARCH, adapter=LORA)
    with torch.no_grad():
        model.layers[0].mlp[0].base_layer.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite in fp64.*samples 0, 1") as caught:
        findings_of(subject_of(TOY, model, toy_items(2)))
    assert "\n" not in str(caught.value)
    assert model.training and model.embed.precision == Precision(matmul=torch.float32)


def test_times_wait_for_the_devices_of_the_model_alone(monkeypatch):
    """A wait for another GPU would take memory of it."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    one = torch.device("cuda", 1)
    audit_module._wait([torch.device("cpu"), one])
    assert waited == [one]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_in_8_bits_are_a_place_of_their_own(few, kind):
    """Alone they err by the rounding to that format; every other place is measured without them, as
    over the same base stored alone."""
    stored, computed = (
        subject_of(
            TOY, make_quantized(TOY, ARCH, name, dtype=torch.bfloat16, adapter=LORA), toy_items(2)
        )
        for name in (kind, f"{kind} computed")
    )
    done: list[None] = []
    with_it, without = (
        audit_module.audit(computed, advance=lambda: done.append(None)),
        findings_of(stored),
    )
    assert (
        len(done) == num_passes(computed) > num_passes(stored) and estimated_seconds(computed) > 0
    )
    places = {each.op_group: each for each in with_it.op_groups}
    (row,) = [places.pop(place) for place in list(places) if place == BASE]
    assert row.dtype == kind and row.cost is not None and row.cost.dtype == "bf16"
    low, high = {"int8": (1e-3, 5e-2), "fp8": (1e-2, 2e-1)}[kind]
    assert low < row.alone.overall.gradient < high
    assert {place: each.alone for place, each in places.items()} == {
        each.op_group: each.alone for each in without.op_groups
    }
    assert row.all_but == without.all_lowered != with_it.all_lowered, (
        "all in bf16, products of the base too"
    )
    assert with_it.as_run != without.as_run, "this run has them in 8 bits"
    assert all(layer.in_8_bits for layer in quantized_weights(computed.model).values())


def test_weights_are_cast_where_they_are_used_and_gradients_handed_over():
    """The same values stored in fp64 give the same numbers, bitwise."""
    wide = Precision(**dict.fromkeys(PLACES, torch.float64))
    model = make_model(TOY, ARCH, dtype=torch.bfloat16, adapter=LORA)
    stored = make_model(TOY, ARCH, dtype=torch.bfloat16, adapter=LORA).double()
    items = toy_items(2)
    inputs = TOY.training.make_inputs(
        [item["latents"] for item in items], torch.tensor([0.3, 0.8]), items, 1.0
    )
    taken: dict[str, Tensor] = {}
    for each in (model, stored):
        set_precision(each, wide)
    cast = DtypeView(model, by_op_group(wide, TOY.precision.op_group_of), taken.__setitem__)(
        inputs, engine=BlockEngine(policy="full")
    )
    plain = stored(inputs)
    for outputs in (cast, plain):
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cast, plain, strict=True))
    expected = {
        name: parameter.grad
        for name, parameter in trainable_parameters(stored).items()
        if parameter.grad is not None
    }
    assert taken.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in taken.items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("at_once", [2**26, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_attention_is_attention(monkeypatch, at_once, masked):
    from ditkit_core.nn.attention import backends as module
    from ditkit_core.nn.attention.backends import BACKENDS

    monkeypatch.setattr(module, "SCORES_AT_ONCE", at_once)
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, 3, 8, generator=random, dtype=torch.float64).requires_grad_()
        for n in (7, 5, 5)
    )
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]]) if masked else None
    weight = torch.randn(2, 7, 3, 8, generator=random, dtype=torch.float64)
    results = []
    for kernel in (exact_attention, BACKENDS["sdpa_math"].kernel):
        out = kernel(q, k, v, mask, 0.0)
        results.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


# the command


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    return World(tmp_path)


def entries(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "audit" not in p.parts
    }


def test_the_command_writes_its_folder_and_nothing_else(few, world, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(audit_stage, "_LONG_SECONDS", 0)
        assert world.train("run", 2, "--audit-precision") == 0
    said = capsys.readouterr().out
    assert (
        "the run's initial weights" in said
        and "B of the adapters is zero and gets small random values" in said
    )
    assert "what matters most:" in said and "precision.html" in said
    lines = said.splitlines()
    (line,) = [line for line in lines if "at most" in line]
    assert "fp64" in line and lines.index(line) < next(
        i for i, x in enumerate(lines) if x.startswith("audit ")
    ), "what takes long is said first"
    run = world.folder / "run"
    assert entries(run) == {}
    assert world.train("run", 2) == 0, capsys.readouterr().err
    before = entries(run)
    assert (
        world.train(
            "run", 2, "--audit-precision", "--train.swap_blocks", "1", "--base.quantize", "int8"
        )
        == 0
    )
    assert entries(run) == before
    said = capsys.readouterr().out
    assert "the run's save of step 2" in said and "small random values" not in said


def test_the_same_run_is_audited_alike_and_json_is_all_of_stdout(few, world, capsys):
    twice = []
    for _ in range(2):
        assert world.train("run", 2, "--audit-precision", "--json", "--train.batch_size", "3") == 0
        twice.append(audit_from_json(json.loads(capsys.readouterr().out)))
    assert len(twice[0].samples) == audit_stage.SAMPLES and twice[0].lowered == "bf16"
    assert errors(twice[0]) == errors(twice[1])
    written = world.folder / "run" / "audit" / "precision.json"
    assert twice[1] == audit_from_json(json.loads(written.read_text()))


def test_memory_that_runs_out_is_one_line(world, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(audit_stage, "audit", full)
    assert world.train("run", 2, "--audit-precision") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: memory ran out in the audit") and "--data.frames" in line


@pytest.mark.parametrize("other", ["--plan", "--fit"])
def test_it_does_not_go_with_plans(world, capsys, other):
    assert world.train("run", 2, "--audit-precision", other) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --audit-precision and {other}:")
    assert not (world.folder / "run").exists()
