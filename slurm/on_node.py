"""Starts torchrun on one node of a job, with the address and the network interface at which other nodes reach it.

torchrun and gloo look up the node's own host name, which on many machines resolves to a loopback address (127.0.1.1 on
Debian) that no other node can reach. This program instead asks the kernel which address it uses to reach another node
of the job. It does not change GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME if they are set. It uses no Slurm command,
because it may run inside a container.

    srun python slurm/on_node.py ADDRESS,ADDRESS[,...] TORCHRUN_ARGUMENTS

The addresses are those of all nodes, in the order of SLURM_NODEID.
"""

import os
import socket
import sys

import psutil


def own_address(addresses: list[str], index: int) -> str:
    """Returns the address from which this node, the one of this index, reaches another one of a job's `addresses`."""
    peer = addresses[1 if index == 0 else 0]
    family, kind, protocol, _, peer_address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(peer_address)  # a datagram socket: this chooses a route and sends nothing
        return str(asking.getsockname()[0])


def interface_with(address: str) -> str:
    """Returns the name of the network interface that has this address."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    raise RuntimeError(
        f"the address {address}, from which this node reaches the others, must belong to a network interface of "
        f"{socket.gethostname()}, but its interfaces are {', '.join(psutil.net_if_addrs())}; set GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME"
    )


def main(addresses: list[str], arguments: list[str]) -> None:
    index = int(os.environ["SLURM_NODEID"])
    address = own_address(addresses, index)
    if not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= os.environ.keys():
        interface = interface_with(address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # "=" matches only this name, not every name that begins with it.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    # To find out whether this node hosts the rendezvous store, torchrun would compare the first node's address with
    # this node's host name, which may resolve to a loopback address. `is_host` tells it instead.
    own = ["--local-addr", address, "--rdzv-conf", f"is_host={int(index == 0)}"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *own, *arguments])


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
