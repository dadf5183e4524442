import numpy as np
import pytest

from data_prep.assistant_masks import Encoding
from data_prep.prompt_windows import check_vocabulary, cut


def encoding_of(num_tokens: int) -> Encoding:
    return Encoding(np.arange(num_tokens, dtype=np.int32), (np.arange(num_tokens) % 3 == 0).astype(np.uint8))


@pytest.mark.parametrize(("num_tokens", "lengths"), [(1, [1]), (9, [9]), (10, [10]), (11, [10, 1]), (30, [10, 10, 10])])
def test_windows_join_to_the_document(num_tokens: int, lengths: list[int]) -> None:
    encoding = encoding_of(num_tokens)
    windows = cut(encoding, 10)
    assert [len(window.input_ids) for window in windows] == lengths
    assert np.array_equal(np.concatenate([window.input_ids for window in windows]), encoding.input_ids)
    assert np.array_equal(np.concatenate([window.loss_mask for window in windows]), encoding.loss_mask)


def test_the_highest_token_id_must_be_below_the_vocabulary() -> None:
    check_vocabulary(encoding_of(8), 8, "a.py")
    with pytest.raises(
        ValueError, match=r"below the model's vocab_size 7, but a\.py has 7; the tokenizer, or the data of prompts.so"
    ):
        check_vocabulary(encoding_of(8), 7, "a.py")
