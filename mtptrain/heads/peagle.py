"""Head `peagle`: an EAGLE-3 head that drafts all K tokens in one forward.

Depth 0 works as in head `eagle3`. Every later depth reads a learned state and the embedding of a mask token instead of
the state and the token of the previous depth, so no depth waits for another. P-EAGLE: Parallel-Drafting EAGLE with
Scalable Training (arXiv 2602.01469).
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.settings.heads import PeagleConfig, mask_token_id


class PeagleHead(Eagle3Head):
    """P-EAGLE head, which vLLM serves with `parallel_drafting`."""

    Config = PeagleConfig

    def __init__(self, config: PeagleConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        self.mask_token_id = mask_token_id(config.mask_token_id, target_config.vocab_size)
        self.mask_hidden = nn.Parameter(torch.randn(len(self.capture_layers), target_config.hidden_size))
