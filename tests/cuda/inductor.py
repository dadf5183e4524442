"""Compiles what `train.compile` fuses for an H100, on a machine without a GPU.

A training step runs on fake CUDA tensors. Inductor writes Triton kernels for the forward and backward pass of each
fused function in the step. Triton's NVIDIA backend compiles them to machine code, which is never run. This is a program
of its own because it changes torch and Triton for good:

    python -m tests.cuda.inductor mtp null kl    # a head, its draft vocabulary, a loss; prints kernels as JSON
"""

from tests.cuda import guard  # isort: skip  (must come before torch)

import copy
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
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
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from mtptrain.config import LossPart
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens, Packing, map_tensors
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.losses import LossSettings, draft_losses
from mtptrain.utils import compile as fusing
from tests.cuda import fake_cuda
from tests.cuda.kernels import HIDDEN_SIZE, NUM_DEPTHS, VOCAB_SIZE, Kernel, bytes_per_element

H100 = SimpleNamespace(
    **vars(fake_cuda.H100),
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    gcnArchName="",
)
TARGET = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
LENGTHS, SPANS = [2048] * 4, [(document, 1024, 1023) for document in range(4)]
"""Documents whose second half is trained on. The first half is a prompt, so that attention has two parts to merge."""


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
        GraphLowering.compile_to_module = lambda graph: self._stop_with_code(graph)  # type: ignore[method-assign]

    def compile(
        self, function: Callable[..., Any], dynamic: bool, options: dict[str, Any] | None
    ) -> Callable[..., Any]:
        """Stands in for torch.compile."""

        def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            with inductor_config.patch(options or {}):
                return compile_fx.compile_fx(
                    module, inputs, inner_compile=partial(self._compile_graph, function.__name__)
                )

        return TORCH_COMPILE(function, dynamic=dynamic, backend=backend)

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


def fake_head(name: str, draft_vocab_size: int | None) -> Head:
    """Builds a head for TARGET with fake bf16 weights on the pretended GPU."""
    settings = {"draft_vocab_size": draft_vocab_size, "fc_norm": True} if name == "eagle3" else {}
    head = build_head(HEADS[name].Config(ttt_steps=NUM_DEPTHS, **settings), TARGET)
    fake_cuda.place(head, "cuda")
    return head


def step(head: Head, kind: LossPart) -> None:
    """Runs the forward pass, loss and backward pass of a training step in bf16."""

    def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    packing = map_tensors(Packing.of_spans(LENGTHS, SPANS, head.shared_window), lambda x: fake(*x.shape, dtype=x.dtype))
    num_tokens, num_drafts, hidden_size = sum(LENGTHS), sum(count for _, _, count in SPANS), TARGET.hidden_size
    table = fake(TARGET.vocab_size, hidden_size)
    parts = FrozenParts(table, fake(hidden_size), table, find_form(TARGET))
    ids = fake(num_tokens, dtype=torch.long)
    streams = (len(head.capture_layers), hidden_size) if head.capture_layers else (hidden_size,)
    sums = draft_losses(
        head(PackedTokens(fake(num_tokens, *streams), ids, ids, packing), parts, NUM_DEPTHS),
        head.output_weight(parts),
        fake(num_drafts, hidden_size),
        parts.logits,
        fake(NUM_DEPTHS, num_drafts, dtype=torch.bool),
        fake(NUM_DEPTHS, dtype=torch.float32),
        LossSettings({kind: 1.0}),
        head.draft_token_ids,
    )
    sums.loss.backward()
    assert all(weight.grad is not None for weight in head.parameters())


TORCH_COMPILE = torch.compile


def main(head_name: str, draft_vocab_size: int | None, kind: LossPart) -> None:
    pretend_an_h100()
    writer = Writer()
    torch.compile = writer.compile  # type: ignore[assignment]
    fusing.set_compilation(True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        step(fake_head(head_name, draft_vocab_size), kind)
    build_machine_code(writer.kernels)
    print(json.dumps([asdict(kernel) for kernel in writer.kernels]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), LossPart(sys.argv[3]))
