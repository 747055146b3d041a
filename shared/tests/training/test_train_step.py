"""One optimizer step: accumulation, clipping, and what happens to a loss that is not finite."""

import json

import pytest
import torch
from toy_training import ToyBatch, toy_model

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.testing.toy import TOY, ToyInputs, toy_items
from ditkit_core.training import flow_matching
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import loss_weight, prepare, sample_noise, sigma_at
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients, training_step

FLOW = FlowConfig(weighting="bell")
PLAIN = BlockEngine()


def batches(sizes, *, ragged=False):
    items = toy_items(sum(sizes), ragged=ragged)
    made, start = [], 0
    for size in sizes:
        made.append(
            ToyBatch([f"clip {i}" for i in range(start, start + size)], items[start : start + size])
        )
        start += size
    return made


def gradients(sizes, *, ragged=False):
    model, trainable = toy_model()
    losses = accumulate_gradients(
        Model(model, BlockEngine(), TOY),
        batches(sizes, ragged=ragged),
        StepContext(step=3, seed=1, flow=FLOW),
    )
    return {name: p.grad for name, p in trainable.items()}, torch.cat(losses.weighted)


def step(model, optimizer, micro_batches, *, clip_norm=0.0, run=PLAIN):
    return training_step(
        Model(model, run, TOY),
        micro_batches,
        optimizer,
        StepContext(step=3, seed=1, flow=FLOW),
        lr=0.01,
        clip_norm=clip_norm,
    )


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 1, 1, 1, 1), (4, 2)])
@pytest.mark.parametrize("ragged", [False, True])
def test_accumulating_micro_batches_equals_one_batch(sizes, ragged):
    whole, whole_losses = gradients((6,), ragged=ragged)
    parts, parts_losses = gradients(sizes, ragged=ragged)
    assert torch.allclose(whole_losses, parts_losses, rtol=1e-5)
    for name, gradient in whole.items():
        # fp32 sums over another order of samples
        assert torch.allclose(
            parts[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max())
        ), name


def test_an_outer_autocast_changes_no_gradient():
    plain, plain_losses = gradients((2, 1))
    with torch.autocast("cpu", torch.bfloat16):
        under, under_losses = gradients((2, 1))
    assert torch.equal(plain_losses, under_losses)
    assert all(torch.equal(plain[name], under[name]) for name in plain)


def test_loss_and_gradient_are_those_of_the_weighted_mean_written_out():
    model, trainable = toy_model()
    made = batches((2, 1))
    result = step(model, NamedOptimizer(trainable, OptimConfig()), made)
    reference, expected = toy_model()
    total = torch.zeros(())
    for place, (name, item) in enumerate(
        (n, i) for batch in made for n, i in zip(batch.ids, batch.items, strict=True)
    ):
        sigma, noise = sample_noise(item["latents"], FLOW, 5.0, 1, "noise", 3, place, name)
        noised = (1 - sigma) * item["latents"] + sigma * noise
        velocity = reference(ToyInputs([noised], sigma[None], [item["text"]]))[0]
        total = (
            total
            + loss_weight(sigma, FLOW, 5.0)
            * (velocity - (noise - item["latents"])).square().mean()
            / 3
        )
    total.backward()
    assert result.loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in expected.items():
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(trainable[name].grad, parameter.grad, rtol=1e-4, atol=1e-6 * scale), (
            name
        )


def test_dropout_has_a_mask_of_its_own_in_every_step_and_micro_batch(monkeypatch):
    item = toy_items(1)[0]
    same = torch.tensor(0.5), torch.ones_like(item["latents"])
    monkeypatch.setattr(flow_matching, "sample_noise", lambda *names, stratum: same)
    model, _ = toy_model(dropout=0.5)
    twice = [ToyBatch(["clip"], [item]), ToyBatch(["clip"], [item])]
    losses = []
    for number in (3, 4):
        made = accumulate_gradients(
            Model(model, PLAIN, TOY), twice, StepContext(step=number, seed=1, flow=FLOW)
        )
        losses += torch.cat(made.weighted).tolist()
    assert len(set(losses)) == 4


def test_a_sample_that_comes_twice_in_a_step_has_two_noises():
    model, _ = toy_model()
    item = toy_items(1)[0]
    twice = [ToyBatch(["clip", "clip"], [item, item])]
    losses = accumulate_gradients(
        Model(model, BlockEngine(), TOY), twice, StepContext(step=0, seed=1, flow=FLOW)
    )
    assert losses.sigmas[0][0] != losses.sigmas[0][1]


def prepared(micro_batches, *, step=3, stratified=True):
    flow = FlowConfig(stratified=stratified, sampling="logit_normal", min_sigma=0.1)
    return [
        prepare(TOY, flow, micro_batches, micro, seed=1, step=step)
        for micro in range(len(micro_batches))
    ]


def levels(micro_batches, **options):
    return torch.cat([batch.sigma for batch in prepared(micro_batches, **options)]).tolist()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_stratified_levels_have_one_sample_in_each_equally_likely_part(count):
    flow = FlowConfig(stratified=True, sampling="logit_normal", min_sigma=0.1)
    bounds = sigma_at(torch.arange(count + 1) / count, flow, 5.0).tolist()
    orders = set()
    for step in range(20):
        sampled = levels(batches([1] * count), step=step)
        assert all(
            low <= level <= high
            for low, level, high in zip(bounds, sorted(sampled), bounds[1:], strict=False)
        ), sampled
        orders.add(tuple(sorted(range(count), key=sampled.__getitem__)))
    assert len(orders) > 1, "a sample's place in the step would decide its level"


def test_stratified_levels_are_spread_over_their_part():
    lowest = [min(levels(batches((1, 1)), step=step)) for step in range(60)]
    flow = FlowConfig(sampling="logit_normal", min_sigma=0.1)
    quartile = float(sigma_at(torch.tensor(0.25), flow, 5.0))
    # 30 expected, with a standard deviation of 3.9
    assert 15 < sum(level < quartile for level in lowest) < 45


def test_stratified_levels_depend_on_no_grouping_and_change_no_noise():
    assert levels(batches((2, 2))) == levels(batches((1, 3))) == levels(batches((4,)))
    stratified, plain = (prepared(batches((4,)), stratified=chosen)[0] for chosen in (True, False))
    assert not torch.equal(stratified.sigma, plain.sigma)
    assert all(map(torch.equal, stratified.noised.noise, plain.noised.noise))


def test_class_images_have_strata_of_their_own():
    data, extra = batches((2,)), ToyBatch(["class"], toy_items(1), counted=0.0)
    alone = levels(data)
    assert levels([data[0], extra])[:2] == alone
    flow = FlowConfig(sampling="logit_normal", min_sigma=0.1)
    middle = float(sigma_at(torch.tensor(0.5), flow, 5.0))
    sides = {levels([data[0], extra], step=step)[2] < middle for step in range(20)}
    assert sides == {True, False}  # one class image: all of the distribution


def test_the_update_is_the_optimizers_own():
    model, trainable = toy_model()
    result = step(model, NamedOptimizer(trainable, OptimConfig(weight_decay=0.0)), batches((2,)))
    reference, expected = toy_model()
    accumulate_gradients(
        Model(reference, BlockEngine(), TOY), batches((2,)), StepContext(step=3, seed=1, flow=FLOW)
    )
    norm = torch.stack([p.grad.norm() for p in expected.values()]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    torch.optim.AdamW(expected.values(), lr=0.01, weight_decay=0.0, fused=True).step()
    assert all(torch.equal(trainable[name], expected[name]) for name in trainable)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05, 1e6])
def test_gradients_are_clipped_once_over_the_whole_step(clip_norm, monkeypatch):
    calls = []
    original = torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grads_with_norm_",
        lambda *a, **k: calls.append(1) or original(*a, **k),
    )
    model, trainable = toy_model()
    result = step(
        model, NamedOptimizer(trainable, OptimConfig()), batches((2, 2, 2)), clip_norm=clip_norm
    )
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in trainable.values()]))
    assert len(calls) == (1 if clip_norm else 0)
    assert result.grad_norm > 0.05
    assert norm == pytest.approx(clip_norm if clip_norm == 0.05 else result.grad_norm, rel=1e-4)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_with_evidence_and_changes_nothing(where):
    model, trainable = toy_model()
    optimizer = NamedOptimizer(trainable, OptimConfig())
    step(model, optimizer, batches((2,)))
    before = {name: p.detach().clone() for name, p in trainable.items()}
    state = {name: tensor.clone() for name, tensor in optimizer.state()[0].items()}
    made = batches((2, 2))
    if where == "loss":
        made[1].items[0]["latents"][0, 0, 0, 0] = float("inf")
        hook = None
    else:
        hook = model.head.out.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteLoss) as error:
        step(model, optimizer, made, clip_norm=1.0)
    evidence = json.loads(json.dumps(error.value.evidence, allow_nan=False))
    assert evidence["step"] == 3
    assert [(s["micro_batch"], s["id"]) for s in evidence["samples"]] == [
        (i // 2, f"clip {i}") for i in range(4)
    ]
    assert all(0 <= sample["sigma"] <= 1 for sample in evidence["samples"])
    finite = [isinstance(sample["loss"], float) for sample in evidence["samples"]]
    assert finite == ([True, True, False, True] if where == "loss" else [True] * 4)
    named = evidence["first_parameters_with_non_finite_gradients"]
    assert named == (["head.out.weight"] if hook else list(trainable)[:10])
    assert evidence["num_parameters_with_non_finite_gradients"] == (1 if hook else len(trainable))
    assert all(
        torch.equal(trainable[name], before[name]) and trainable[name].grad is None
        for name in trainable
    )
    assert all(torch.equal(optimizer.state()[0][name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_the_engine_changes_no_number(policy):
    plain, plain_weights = toy_model(dropout=0.3)
    other, other_weights = toy_model(dropout=0.3)
    first = step(plain, NamedOptimizer(plain_weights, OptimConfig()), batches((2, 1)))
    second = step(
        other,
        NamedOptimizer(other_weights, OptimConfig()),
        batches((2, 1)),
        run=BlockEngine(policy=policy),
    )
    assert first == second
    assert all(torch.equal(plain_weights[name], other_weights[name]) for name in plain_weights)


def by_hand(micro_batches, factors, counted):
    """Each sample's loss by the formula, as one sum: (factor of its micro-batch's samples) / (what
    is counted)."""
    model, trainable = toy_model()
    total, place = torch.zeros(()), 0
    for batch, factor in zip(micro_batches, factors, strict=True):
        for name, item in zip(batch.ids, batch.items, strict=True):
            sigma, noise = sample_noise(item["latents"], FLOW, 5.0, 1, "noise", 3, place, name)
            noised = (1 - sigma) * item["latents"] + sigma * noise
            velocity = model(ToyInputs([noised], sigma[None], [item["text"]]))[0]
            error = (velocity - (noise - item["latents"])).square().mean()
            total, place = (
                total + factor * loss_weight(sigma, FLOW, 5.0) * error / counted,
                place + 1,
            )
    total.backward()
    return total.item(), trainable


def same_gradients(ours, theirs):
    for name, parameter in theirs.items():
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6 * scale), name


def test_samples_of_the_prior_add_their_own_weighted_mean():
    """Two micro-batches of 2 and 1 instance samples, each with as many of the prior: mean + 0.4 *
    mean over the prior."""
    instance, prior, instance_2, prior_2 = batches((2, 2, 1, 1))
    prior, prior_2 = (b._replace(weights=[0.4] * len(b.ids), counted=0.0) for b in (prior, prior_2))
    made = [instance, prior, instance_2, prior_2]
    model, trainable = toy_model()
    result = step(model, NamedOptimizer(trainable, OptimConfig()), made)
    loss, expected = by_hand(made, (1.0, 0.4, 1.0, 0.4), counted=3)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    same_gradients(trainable, expected)


def test_a_micro_batch_may_count_for_more_or_less_than_it_has():
    made = [batch._replace(counted=1.4) for batch in batches((1, 2))]
    model, trainable = toy_model()
    result = step(model, NamedOptimizer(trainable, OptimConfig()), made)
    _, expected = by_hand(made, (1.0, 1.0), counted=2.8)
    same_gradients(trainable, expected)
    mean, _ = by_hand(made, (1.0, 1.0), counted=3)
    assert result.loss == pytest.approx(mean, rel=1e-5), (
        "what is reported is the mean over the samples there were"
    )
