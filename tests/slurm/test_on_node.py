"""The address and the interface that torchrun and gloo get on each node of a job."""

import os
import socket
from importlib import import_module
from typing import Any

import pytest

from tests.slurm.cluster import ROOT


def interfaces_of(on_node: Any, monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """Returns the interfaces for gloo and NCCL that torchrun would get. tests/slurm/test_pipeline.py runs it."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        del os.environ[name]
    for name, value in {"SLURM_NODEID": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda _program, command: None)
    on_node.main(["127.0.0.2", "127.0.0.3"], [])
    return [os.environ[name] for name in names]


def test_interfaces_that_the_user_has_chosen_are_kept_and_an_address_of_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "slurm")
    on_node = import_module("on_node")
    gloo, nccl = interfaces_of(on_node, monkeypatch, GLOO_SOCKET_IFNAME="bond0")
    assert gloo == "bond0" and nccl.startswith("=")
    message = f"the address 203.0.113.1, .* must belong to .* of {socket.gethostname()}, but .* set GLOO_SOCKET_IFNAME"
    with pytest.raises(RuntimeError, match=message):
        on_node.interface_with("203.0.113.1")
    monkeypatch.setattr(on_node, "interface_with", lambda address: pytest.fail("not needed"))
    chosen = interfaces_of(on_node, monkeypatch, GLOO_SOCKET_IFNAME="bond0", NCCL_SOCKET_IFNAME="ib")
    assert chosen == ["bond0", "ib"]
