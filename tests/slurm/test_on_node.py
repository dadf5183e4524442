"""The address and the interface that torchrun and gloo get on each node of a job."""

import importlib.util
import os
import socket
from types import ModuleType

import pytest

from tests.slurm.cluster import ROOT


@pytest.fixture
def on_node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_node", ROOT / "slurm/on_node.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interfaces_of(on_node: ModuleType, monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """Returns the interfaces for gloo and NCCL that torchrun would get. tests/slurm/test_pipeline.py runs it."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
        del os.environ[name]
    for name, value in {"SLURM_NODEID": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda _program, command: None)
    on_node.main(["127.0.0.2", "127.0.0.3"], [])
    return [os.environ[name] for name in names]


def test_interfaces_that_the_user_has_chosen_are_kept_and_an_address_of_none_is_refused(
    on_node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo, nccl = interfaces_of(on_node, monkeypatch, GLOO_SOCKET_IFNAME="bond0")
    assert gloo == "bond0" and nccl.startswith("=")
    message = f"the address 203.0.113.1, .* must belong to .* of {socket.gethostname()}, but .* set GLOO_SOCKET_IFNAME"
    with pytest.raises(RuntimeError, match=message):
        on_node.interface_with("203.0.113.1")
    monkeypatch.setattr(on_node, "interface_with", lambda address: pytest.fail("not needed"))
    chosen = interfaces_of(on_node, monkeypatch, GLOO_SOCKET_IFNAME="bond0", NCCL_SOCKET_IFNAME="ib")
    assert chosen == ["bond0", "ib"]
