"""Every head by its name: one head is one file and one line."""

from mtptrain.heads.mtp import MtpHead

HEADS = {"mtp": MtpHead}
