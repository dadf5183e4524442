"""Does once, in the process from which programs are forked, what each of them would otherwise do as it starts."""

import torch
import torch._inductor.compile_fx

from mtptrain.training.flops import matmul_peak

# With one thread, torch starts no other thread here, which a forked process would lack.
threads = torch.get_num_threads()
torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    matmul_peak(torch.device("cpu"), dtype)
torch.set_num_threads(threads)
