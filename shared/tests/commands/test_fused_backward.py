"""A run that updates weights in the backward, by the train command."""

from toy_world import World, equal

from ditkit_core.training.checkpoint import load_state


def test_the_command_trains_bitwise_and_refuses_before_anything_is_loaded(tmp_path, capsys):
    world = World(tmp_path, captions=0)
    common = ["--train.clip_norm", "0", "--optim.lr", "0.01"]
    fused = ["--optim.fused_backward", "true"]
    assert world.train("lora", 3, *common) == world.train("lora-fused", 3, *common, *fused) == 0
    assert equal(world.adapter("lora"), world.adapter("lora-fused"))
    full = ["--adapter.method", "full"]
    assert (
        world.train("full", 3, *common, *full)
        == world.train("full-fused", 3, *common, *full, *fused)
        == 0
    )
    for group, tensors in load_state(tmp_path / "full" / "state" / "step-000003").tensors.items():
        assert equal(
            tensors, load_state(tmp_path / "full-fused" / "state" / "step-000003").tensors[group]
        ), group
    summed = ["--optim.lr", "0.01", *full, "--train.accumulation", "2", "--train.clip_by", "block"]
    assert world.train("summed", 2, *summed) == 0
    assert (
        world.train("summed-fused", 1, *summed, *fused)
        == world.train("summed-fused", 2, *summed, *fused)
        == 0
    )
    for group, tensors in load_state(tmp_path / "summed" / "state" / "step-000002").tensors.items():
        assert equal(
            tensors, load_state(tmp_path / "summed-fused" / "state" / "step-000002").tensors[group]
        ), group
    capsys.readouterr()
    for flags in (fused, [*common, *fused, "--prior.folder", str(tmp_path / "clips")]):
        assert world.train("refused", 3, *flags) != 0
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "optim.fused_backward" in line
    assert not (tmp_path / "refused" / "state").exists()
