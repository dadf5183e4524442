"""All heads by name. To add one, see docs/add_a_head.md."""

from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.hydra import HydraHead
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NativeMtpHead
from mtptrain.heads.peagle import PeagleHead

HEADS: dict[str, type[Head]] = {
    "mtp": MtpHead,
    "native_mtp": NativeMtpHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "peagle": PeagleHead,
    "medusa": MedusaHead,
    "hydra": HydraHead,
    "dflash": DflashHead,
    "dspark": DsparkHead,
    "dflash2": Dflash2Head,
    "draft_model": DraftModelHead,
}
