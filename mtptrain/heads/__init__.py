"""All heads by name. To add one, see docs/add_a_head.md."""

from mtptrain.heads.base import Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.peagle import PeagleHead

HEADS: dict[str, type[Head]] = {
    "mtp": MtpHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "peagle": PeagleHead,
    "draft_model": DraftModelHead,
}
