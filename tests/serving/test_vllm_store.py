"""Tests that vLLM's store has the layout and states of transformers' store."""

from pathlib import Path

import torch

from mtptrain.hidden_states.store import HiddenStore, find_damage
from tests.conftest import TINY_SETTINGS, make_target, succeed, write_text_files


def test_layout_and_states_are_those_of_the_other_backend(tmp_path: Path, vllm_python: str) -> None:
    target_dir = make_target(tmp_path / "target", num_attention_heads=2, num_key_value_heads=2)
    files, run_dir = write_text_files(tmp_path / "files"), tmp_path / "run"
    overrides = [*TINY_SETTINGS, f"target.path={target_dir}", f"prompts.paths=[{files}]", f"run_dir={run_dir}"]
    overrides += ["head=eagle3", "head.capture_layers=[0,1]", "hidden_states.batch_tokens=512"]
    overrides.append(f"serving.program={vllm_python}")
    succeed("prompts", *overrides)
    stores, sizes = [], []
    for backend in ("transformers", "vllm"):
        result = succeed("hidden-states", *overrides, f"hidden_states.backend={backend}")
        assert "computed now" in result.stdout
        directory = (run_dir / "hidden_states").rename(run_dir / backend)
        sizes.append({path.name: path.stat().st_size for path in directory.glob("shard_*")})
        stores.append(HiddenStore.open(directory))
    assert sizes[0] == sizes[1] and len(sizes[0]) > 3
    assert not any(find_damage(store, show_progress=False) for store in stores)
    assert [store.manifest.identity.backend for store in stores] == ["transformers", "vllm"]
    for index in range(stores[0].num_documents):
        one, other = (store.document(index) for store in stores)
        assert one.document_id == other.document_id
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.loss_mask, other.loss_mask)
        for name in ("hidden_states", "aux_hidden_states"):  # computed in float32, so only bf16 rounding differs
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2**-7, atol=2**-7)
