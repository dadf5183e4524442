"""The address and the interface that torchrun and gloo get on each node of a job."""

import importlib.util
import os
import socket
import sys
from types import ModuleType

import psutil
import pytest

from tests.slurm.cluster import ROOT


@pytest.fixture
def on_node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_node", ROOT / "slurm/on_node.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def started(
    on_node: ModuleType, monkeypatch: pytest.MonkeyPatch, index: int, **variables: str
) -> tuple[list[str], list[str]]:
    """Returns the command that on_node.py would exec, and the interfaces for gloo and NCCL in its environment."""
    commands: list[list[str]] = []
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
        del os.environ[name]
    for name, value in {"SLURM_NODEID": str(index), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda _program, command: commands.append(command))
    on_node.main(["127.0.0.2", "127.0.0.3"], ["--nnodes", "2", "-m", "program"])
    return commands[0], [os.environ[name] for name in names]


def test_torchrun_gets_the_nodes_own_address_and_only_the_first_node_hosts_the_store(
    on_node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, addresses in interfaces if "127.0.0.1" in {own.address for own in addresses})
    for index in (0, 1):
        command, variables = started(on_node, monkeypatch, index)
        own = ["--local-addr", "127.0.0.1", "--rdzv-conf", f"is_host={int(index == 0)}"]
        assert command == [sys.executable, "-m", "torch.distributed.run", *own, "--nnodes", "2", "-m", "program"]
        assert variables == [loopback, f"={loopback}"]


def test_interfaces_that_the_user_has_chosen_are_kept_and_an_address_of_none_is_refused(
    on_node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (gloo, nccl) = started(on_node, monkeypatch, 0, GLOO_SOCKET_IFNAME="bond0")
    assert gloo == "bond0" and nccl.startswith("=")
    message = f"the address 203.0.113.1, .* must belong to .* of {socket.gethostname()}, but .* set GLOO_SOCKET_IFNAME"
    with pytest.raises(RuntimeError, match=message):
        on_node.interface_with("203.0.113.1")
    monkeypatch.setattr(on_node, "interface_with", lambda address: pytest.fail("not needed"))
    _, chosen = started(on_node, monkeypatch, 0, GLOO_SOCKET_IFNAME="bond0", NCCL_SOCKET_IFNAME="ib")
    assert chosen == ["bond0", "ib"]
