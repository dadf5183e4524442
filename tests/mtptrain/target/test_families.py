"""Tests what is read from the configs of a target."""

import json
from pathlib import Path

import pytest

from mtptrain.target.families import (
    eos_token_ids,
    read_generation_config,
    read_target_config,
)
from tests.conftest import make_target


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 5, (3, 4)),
        ({"eos_token_id": 0}, 5, (0,)),
        ({"eos_token_id": []}, 5, (5,)),
        ({"temperature": 0.7}, [5, 6], (5, 6)),
        (None, 0, (0,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object] | None, config: object, expected: tuple[int, ...]
) -> None:
    make_target(tmp_path, eos_token_id=config)
    path = tmp_path / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert eos_token_ids(read_target_config(tmp_path), read_generation_config(tmp_path)) == expected
