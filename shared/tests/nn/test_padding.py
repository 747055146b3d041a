"""The mask that hides padding."""

import torch

from ditkit_core.nn.padding import padding_mask


def test_the_mask_is_true_on_what_each_sample_has_and_none_where_all_are_of_one_size():
    mask = padding_mask([2, 3, 1], torch.device("cpu"))
    assert mask is not None and mask.tolist() == [
        [True, True, False],
        [True, True, True],
        [True, False, False],
    ]
    assert padding_mask([3, 3], torch.device("cpu")) is None
