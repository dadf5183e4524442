"""Compiles what `train.compile` fuses for an H100, on a machine without a GPU.

A training step runs on fake CUDA tensors. Inductor writes Triton kernels for the forward and backward pass of each
fused function in the step. Triton's NVIDIA backend compiles them to machine code, which is never run.
"""

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics

from mtptrain.config import TrainConfig
from mtptrain.heads import HEADS
from tests.cuda import guard
from tests.cuda.fake_cuda import H100
from tests.cuda.steps import become_rank_0_of_8, rehearse
from tests.published_targets import PUBLISHED_TARGETS

BYTES = {"fp32": 4, "bf16": 2, "i64": 8, "i32": 4, "i1": 1, "u8": 1}


@dataclass
class Kernel:
    """A Triton kernel that Inductor wrote, with the architecture and size of its compiled form."""

    function: str
    """Name of the fused function."""
    is_backward: bool
    source: str
    bytes_per_element: int
    """Bytes read and written for each element of the rows that the kernel processes, without values that a whole row or
    column shares."""
    target: str = ""
    """The architecture that the kernel's PTX names."""
    cubin_bytes: int = 0


def bytes_per_element(source: str) -> int:
    """Counts the bytes of the loads and stores whose address depends on both a row and a position in the row, or was
    computed from a loaded value.

    A value that is loaded in two loops over a row counts twice. In a reduction, the names of row indices begin with `x`
    and those of positions with `r0_`. A pointwise kernel has one index.
    """
    signature = re.search(r"'signature': \{(.*?)\}", source)
    assert signature is not None
    dtypes = dict(re.findall(r"'(\w+)': '\*(\w+)'", signature[1]))
    is_reduction = "r0_index" in source
    flat = set(re.findall(r"(\w+) = xindex$", source, re.MULTILINE))
    num_bytes = 0
    for pointer, address in re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\), ", source):
        names = set(re.findall(r"[a-z]\w*", address))
        is_place = any(name.startswith("r0_") for name in names) and any(name.startswith("x") for name in names)
        if any(name.startswith("tmp") for name in names) or (is_place if is_reduction else bool(names & flat)):
            num_bytes += BYTES[dtypes[pointer]]
    return num_bytes


def pretend_an_h100() -> None:
    """Answers what torch, Inductor and Triton ask of a GPU while they compile for it."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    assert guard.LIBRARY is not None, guard.WHY_NOT
    guard.LIBRARY.fake_cuda_switch(True)
    cuda: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
    }
    interface: Any = device_interface.CudaInterface  # has copies of some of these
    for name, answer in cuda.items():
        setattr(torch.cuda, name, answer)
        setattr(interface, name, staticmethod(answer))
    interface.get_raw_stream = staticmethod(lambda device: 0)
    interface.is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_current_stream=lambda device: 0,
        map_python_to_cpp_type=lambda name: name,
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = triton_helpers.set_driver_to_cpu = lambda *args: None
    # It would make real tensors, and no function fused here is attention.
    fuse_attention._sfdp_init = lambda device=None: None
    inductor_config.compile_threads = 1
    inductor_config.force_disable_caches = True
    inductor_config.joint_graph_constant_folding = False  # would compute constants on the device


class Written(Exception):
    """Ends a compilation when its code is written, before anything would be loaded onto the device."""


class Writer:
    """A backend of torch.compile that has Inductor write its code, and then lets fake tensors go through the plain
    graph."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._written = ""
        self._torch_compile = torch.compile
        GraphLowering.compile_to_module = lambda graph: self._stop_with_code(graph)  # type: ignore[method-assign]

    def compile(self, function: Any = None, **settings: Any) -> Any:
        """Stands in for torch.compile. DeepSpeed's own functions are compiled as usual."""
        if function is None or not function.__module__.startswith("mtptrain."):
            return self._torch_compile(function, **settings)

        def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            with inductor_config.patch(settings["options"] or {}):
                compile_graph = partial(self._compile_graph, function.__name__)
                return compile_fx.compile_fx(module, inputs, inner_compile=compile_graph)

        return self._torch_compile(function, dynamic=settings["dynamic"], backend=backend)

    def _compile_graph(
        self, name: str, module: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any
    ) -> Callable[[list[torch.Tensor]], Any]:
        self._written = ""
        try:
            compile_fx.compile_fx_inner(copy.deepcopy(module), inputs, **options)
        except Exception:
            if not self._written:
                raise
        for source in re.findall(r"async_compile\.triton\('\w+', \'\'\'(.*?)\'\'\'", self._written, re.DOTALL):
            self.kernels.append(Kernel(name, bool(options.get("is_backward")), source, bytes_per_element(source)))

        def run(args: list[torch.Tensor]) -> Any:
            return module.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _stop_with_code(self, graph: GraphLowering) -> None:
        wrapper, _ = graph.codegen()
        self._written = wrapper.value
        raise Written


def build_machine_code(kernels: list[Kernel]) -> None:
    """Compiles each kernel in the first of the configurations that Inductor would time on the device."""
    import triton

    compile_kernel, built = triton.compile, []

    def keep(*args: Any, **options: Any) -> Any:
        built.append(compile_kernel(*args, **options))
        return built[-1]

    triton.compile = keep
    assert triton_heuristics.triton.compile is keep
    for kernel in kernels:
        name = re.search(r"^def (\w+)\(", kernel.source, re.MULTILINE)
        assert name is not None
        tuner = getattr(PyCodeCache.load(kernel.source), name[1])
        tuner._precompile_config(tuner.configs[0])
        kernel.cubin_bytes = len(built[-1].asm["cubin"])
        kernel.target = next(line for line in built[-1].asm["ptx"].splitlines() if line.startswith(".target"))


def compile_step(head: str, settings: dict[str, Any], loss: str, cache: Path) -> list[Kernel]:
    """Returns the kernels of a step of a head for an 8B Llama. Call this in a new process, which it changes for good.

    The first half of each document is a prompt, so that attention has two parts to merge.
    """
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/{head}", "TRITON_CACHE_DIR": f"{cache}/{head}/triton"}
    become_rank_0_of_8()
    pretend_an_h100()
    writer = Writer()
    torch.compile = writer.compile  # type: ignore[assignment]
    train = TrainConfig(compile=True, loss=loss)
    documents = [(2048, [(1024, 2048)])] * 4
    target = PUBLISHED_TARGETS["llama3_1_8b"].config()
    rehearse(HEADS[head].Config(ttt_steps=3, **settings), target, [documents], train, is_metered=False)
    build_machine_code(writer.kernels)
    return writer.kernels
