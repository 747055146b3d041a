"""What a text about GPUs means."""

import pytest
import torch

from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.planner.gpus import (
    KNOWN_GPUS,
    SOLD_GB,
    default_reserve,
    gpu_named,
    gpus_here,
    keeping_reserves,
    of_size,
    parse_gpus,
)
from ditkit_core.planner.gpus import _plain as gpu_name
from ditkit_core.planner.step_time import assumptions
from ditkit_core.planner.workload import Workload

SOLD = {
    "rtx2080ti": 11, "t4": 16, "v100-16": 16, "v100-32": 32, "rtx3060": 12, "rtx3080": 10,
    "rtx3090": 24, "rtx4060ti-16": 16,
    "rtx4070": 12, "rtx4070s": 12, "rtx4070ti": 12, "rtx4070tis": 16, "rtx4080": 16, "rtx4080s": 16,
    "rtx4090": 24, "rtx5080": 16,
    "rtx5090": 32, "a6000": 48, "l40s": 48, "a10": 24, "a100-40": 40, "a100-80": 80, "h100-80": 80,
    "h100pcie": 80, "h200-141": 141,
}  # fmt: skip
"""GB of the datasheets."""


def test_sizes_count_and_order_are_read():
    gpus = parse_gpus("2x24GiB,1x16GiB")
    assert [round(card.total / GIB, 2) for card in gpus] == [23.38, 23.38, 15.42]
    assert all(card.reserve == default_reserve(card.total) for card in gpus)


@pytest.mark.parametrize("text", ["24GiB", "24GB", "24gb", " 24 gib ", "24G", "1x24GiB", "1*24GiB"])
def test_a_size_is_written_in_several_ways(text):
    assert parse_gpus(text) == (parse_gpus("24gib")[0],)


def test_a_size_is_no_more_than_torch_reports_of_a_gpu_that_is_sold_with_it():
    """A plan of 24GiB that fits has to fit an RTX 4090, which is sold with 24 GB and of which torch
    reports 23.5 GiB."""
    ecc = {"t4", "l40s", "a10"}
    for name, size in SOLD.items():
        (card,), (sized,) = parse_gpus(name), parse_gpus(f"{size}GiB")
        if name in ecc:
            assert card.total < 0.93 * size * GIB, name
        else:
            assert 0.975 * card.total < sized.total < card.total + 0.005 * GIB, name


@pytest.mark.parametrize(
    ("name", "gib"),
    # Of torch's messages and device properties where their GPU is named, in public issues and logs
    # from Linux.
    [
        ("rtx4090", 23.49), ("rtx4090", 23.52), ("rtx4090", 23.65), ("rtx3090", 23.56), ("rtx3090", 23.69), ("rtx5090", 31.37),
        ("rtx4060ti-16", 15.57), ("rtx3060", 11.62), ("t4", 14.56), ("t4", 14.75), ("a10", 21.99), ("v100-16", 15.78),
        ("v100-32", 31.74), ("a100-40", 39.5), ("a100-80", 79.15), ("a100-80", 79.25), ("h100", 79.18), ("h100pcie", 79.11),
        ("h200", 139.8), ("a6000", 47.54), ("l40s", 44.52),
    ],
)  # fmt: skip
def test_a_gpu_by_name_has_no_more_memory_than_torch_reports_of_one(name, gib):
    """So what fits by name fits the GPU; and it has no less than 2 % below."""
    (named,), here = parse_gpus(name), gpu_named(name, int(gib * GIB))
    assert 0.98 * here.budget.available <= named.budget.available <= here.budget.available


def test_gpus_are_known_by_name_in_any_case():
    assert [card.name for card in parse_gpus("2xRTX3090,A100-80")] == [
        "rtx3090",
        "rtx3090",
        "a100-80",
    ]
    for text in ("rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "4090"):
        assert parse_gpus(text)[0].bf16_flops == 165.2e12
    assert parse_gpus("4070 Ti Super") == parse_gpus("rtx4070tis")


@pytest.mark.parametrize(
    ("text", "gib"),
    # What torch reports of them, in GiB: at least that is planned with, and no more.
    [
        ("rtx5070ti", 15.5), ("5070 Ti", 15.5), ("NVIDIA GeForce RTX 5060 Ti", 15.5), ("rtx5060ti-8", 7.5), ("rtx4060", 7.6),
        ("RTX 3070", 7.6), ("L4", 22.03), ("l40", 44.4), ("A40", 44.4), ("RTX PRO 6000", 94.9), ("b200", 178.3), ("B300", 267.6),
        ("h100 nvl", 93.1), ("RTX 6000 Ada", 47.4), ("a10g", 22.0), ("DGX Spark", 119.6), ("4090 laptop", 15.7), ("rtx3090ti", 23.5),
    ],
)  # fmt: skip
def test_gpus_without_rates_of_their_own_are_known_by_their_memory(text, gib):
    (card,) = parse_gpus(text)
    assert 0.97 * gib <= card.total / GIB <= gib, card.total / GIB
    assert "assumed as of" in card.source and card.half == "bf16"


def test_a_gpu_with_slow_memory_gets_no_rates_of_a_fast_one():
    assert parse_gpus("gb10")[0].memory_bandwidth == parse_gpus("4060ti")[0].memory_bandwidth


def test_no_name_is_in_both_tables():
    known = {name for _, names in KNOWN_GPUS for name in names}
    assert not known & {gpu_name(name) for name in SOLD_GB}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("rtx5070it", "'rtx5070it' is not known; did you mean rtx5070ti? Or write its memory, as in 2x24GiB,1x16GiB"),
        ("2xrtx4090s", "'2xrtx4090s' is not known; did you mean rtx4090? Or write its memory"),
        ("a100-800", "'a100-800' is not known; did you mean a100-80? Or write its memory"),
        ("rtx2070", "'rtx2070' is not known; write its memory, as in 2x24GiB,1x16GiB"),
        ("rtx9999", "'rtx9999' is not known; write its memory, as in 2x24GiB,1x16GiB"),
        ("mi300x", "'mi300x' is no GPU of NVIDIA"),
        ("RX 7900 XTX", "'rx 7900 xtx' is no GPU of NVIDIA"),
        ("m3 max", "'m3 max' is no GPU of NVIDIA"),
    ],
)  # fmt: skip
def test_an_unknown_gpu_is_answered_with_the_nearest_or_with_its_size(text, answer):
    with pytest.raises(UserError) as refused:
        parse_gpus(text)
    assert answer in str(refused.value) and len(str(refused.value)) < 220


def test_products_in_8_bits_have_the_published_rates():
    """Of the makers' papers, in TOP/s and TFLOP/s without sparsity, to 2 %; fp8 with sums in
    fp32."""
    rates = {
        "rtx2080ti": (215, 0), "v100": (0, 0), "t4": (130, 0), "rtx3090": (284, 0), "a6000": (309.7,
        0), "a100": (624, 0),
        "rtx4090": (660.6, 330.3), "l40s": (733, 733), "h100": (1979, 1979),
        "h100 pcie": (1513, 1513), "h200": (1979, 1979), "rtx5090": (838, 419),
    }  # fmt: skip
    for name, (int8, fp8) in rates.items():
        (card,) = parse_gpus(name)
        assert (card.int8_flops / 1e12, card.fp8_flops / 1e12) == pytest.approx(
            (int8, fp8), rel=0.02
        ), name


@pytest.mark.parametrize(
    "text",
    ["", "24GiB,", "24", "24MiB", "0x24GiB", "99x24GiB", "rtx9999", "x24GiB", "-1x24GiB", "0.1GiB"],
)
def test_a_wrong_text_is_refused_in_one_line_with_examples(text):
    with pytest.raises(UserError) as refused:
        parse_gpus(text)
    assert (
        "\n" not in str(refused.value)
        and "--gpus" in str(refused.value)
        and "2x24GiB,1x16GiB" in str(refused.value)
    )


def test_every_name_leads_to_one_gpu():
    names = [name for _, each in KNOWN_GPUS for name in each]
    assert len(names) == len(set(names)) and {card.name for card, _ in KNOWN_GPUS} == SOLD.keys()
    for card, each in KNOWN_GPUS:
        assert all(parse_gpus(name) == (card,) for name in each)
        assert card.reserve < card.total / 10 and card.source and card.fp32_flops < card.bf16_flops


def test_a_size_takes_the_rates_of_the_slowest_gpu_with_as_much_and_says_so():
    for size in (8, 16, 24, 32, 40, 48, 80, 141):
        card = of_size(size * GIB, f"{size}GiB")
        as_large = [
            known
            for known, _ in KNOWN_GPUS
            if known.total > 0.9 * size * GIB and known.half == "bf16"
        ]
        assert card.bf16_flops == min(known.bf16_flops for known in as_large), size
        assert "assumed as of" in card.source
    assert of_size(1000 * GIB, "1000GiB").bf16_flops == max(
        card.bf16_flops for card, _ in KNOWN_GPUS
    )


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80"),
        ("NVIDIA H100 PCIe", 79.2, "h100pcie"),
        ("NVIDIA H200", 139.8, "h200-141"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "rtx4070tis"),
        ("NVIDIA GeForce RTX 4070", 11.7, "rtx4070"),
        ("NVIDIA GeForce RTX 4070 SUPER", 11.7, "rtx4070s"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.7, "rtx4070ti"),
        ("NVIDIA GeForce RTX 4080", 15.7, "rtx4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.7, "rtx4080s"),
        ("NVIDIA GeForce RTX 3060", 11.6, "rtx3060"),
        ("NVIDIA GeForce RTX 3080", 9.8, "rtx3080"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "rtx2080ti"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA A10", 22.1, "a10"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
    ],
)
def test_what_a_driver_calls_a_gpu_is_recognised_and_its_own_memory_kept(name, gib, known):
    total = int(gib * GIB)
    card = gpu_named(name, total)
    assert (card.name, card.total) == (name, total)
    assert card.bf16_flops == parse_gpus(known)[0].bf16_flops and "assumed" not in card.source


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA GeForce RTX 4090 D", 23.6),
        ("NVIDIA GeForce RTX 3060 Ti", 8),
        ("NVIDIA GeForce RTX 5080 SUPER", 15.7),
        ("NVIDIA GeForce RTX 3080 Ti", 12),
        ("NVIDIA A10G", 22.1),
        ("NVIDIA H200 NVL", 139.8),
    ],
)
def test_a_gpu_is_not_taken_for_its_namesake(name, gib):
    assert "assumed" in gpu_named(name, int(gib * GIB)).source


def test_gpus_before_ampere_compute_in_fp16_alone_and_stand_for_no_size():
    old = {gpu.name for gpu, _ in KNOWN_GPUS if gpu.half == "fp16"}
    assert old == {"rtx2080ti", "t4", "v100-16", "v100-32"}
    assert not any(of_size(size * GIB, "").half == "fp16" for size in (8, 11, 12, 15, 16, 32))
    assert "82% of 65 TFLOP/s in fp16" in assumptions(parse_gpus("t4"), Workload())[0]


def test_what_is_no_gpu_is_refused():
    with pytest.raises(UserError, match="--gpus 24GiB"):
        gpus_here([torch.device("cpu")])


def test_what_others_use_adds_to_the_reserve():
    (card,) = parse_gpus("24GiB")
    (kept,) = keeping_reserves((card,), [1.0])
    assert kept.reserve == card.reserve + GIB
