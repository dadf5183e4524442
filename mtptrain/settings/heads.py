"""Settings of all heads, and the facts about a head that settings are checked against.

No module here imports torch: the command line reads settings before it knows whether anything will run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mtptrain.settings.loss import LossPart
from mtptrain.utils.errors import UserError
from mtptrain.utils.setting_bounds import at_least, between, each_named

MAX_SIZE = 2**20
"""Upper bound of widths, such as the intermediate size. No published model comes near it."""
MAX_LAYERS = 256
"""Upper bound of the number of layers."""
MAX_DEPTHS = 64
"""Upper bound of `ttt_steps`. Published heads draft at most 16 tokens."""
MAX_KERNEL_SIZE, MAX_CANDIDATES = 16, 1024
"""Upper bounds of `conv_kernel_size` and `selector_top_k` of head `dflash2`."""


@dataclass
class HeadConfig:
    """Settings that all heads share. The class variables say what a kind of head can do."""

    implementation: ClassVar[str]
    """The head's class, as `MODULE:CLASS`. `mtptrain.heads.HEADS` imports it."""
    drafts_trees: ClassVar[bool] = False
    """Whether `draft_next` can continue several branches, given a `TreeSlots`."""
    is_bound_to_depths: ClassVar[bool] = False
    """Whether the head drafts at most T tokens, because it can draft only at depths that it was trained for."""
    drafts_whole_blocks: ClassVar[bool] = False
    """Whether the head drafts exactly T tokens, because the tokens of all depths see each other."""
    own_loss_part: ClassVar[LossPart | None] = None
    """The part of `train.loss` that alone trains a part of the head: `confidence`, if the head says how likely each
    draft is to be accepted, or `selector`, if it chooses each draft among few candidates."""
    starts_from_target: ClassVar[bool] = False
    """Whether `head.start_from_target` can copy one or more of the target's layers into the head."""

    name: str = ""
    """The kind of head, as in `head=NAME`."""
    ttt_steps: int = between(1, MAX_DEPTHS, default=4)
    """Number of trained depths T: in training, each draft position drafts this many tokens. `dflash`, `dspark`
    and `dflash2` draft exactly T tokens in serving too; `peagle`, `medusa` and `hydra` draft at most T."""
    init_from: str | None = None
    """The head to start from, as a directory or a hub name: a published head, a head of another run
    (`run_dir/train/best`) or a checkpoint's MTP layer; see `mtptrain.init_from.start`. null starts from random
    weights, or as `start_from_target` says."""
    ignored_keys: list[str] = field(default_factory=list, metadata=each_named())
    """Keys of a published head's config.json, as its refusal names them, that are passed over although mtptrain does
    not know them. List only keys of which you know that what is drafted does not depend on them."""
    start_from_target: bool = False
    """Start from a copy of the target's last layer, with an input projection that passes the target's states on to it.
    The loss falls faster at first. `draft_model` copies more (see its settings). Heads `dflash`, `dspark`, `dflash2`,
    `hydra`, `medusa` and `native_mtp` do not support this."""


@dataclass
class LayerConfig(HeadConfig):
    """Settings that all heads with decoder layers share, except `draft_model` and `native_mtp`."""

    num_attention_heads: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's number if hidden size / number is then 64 or 128; otherwise hidden size / 128, or
    hidden size / 64 if 128 does not divide the hidden size."""
    num_key_value_heads: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's number, or one per attention head if that number does not divide the attention heads."""
    intermediate_size: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's (the largest, if its layers differ), or 4 x hidden size if it has none."""
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    """RoPE of the head: `rope_type`, `rope_theta` and what the type needs, as in a config.json. By default it is the
    target's. Published heads may have been trained with another."""


@dataclass
class MtpConfig(LayerConfig):
    implementation = "mtptrain.heads.mtp:MtpHead"
    drafts_trees = True
    starts_from_target = True

    name: str = "mtp"
    attention_bias: bool = False
    """Whether queries, keys and values have biases, as in MiMo's MTP layer."""
    zero_first_embedding: bool = False
    """Read zeros in place of the embedding at position 0, as engines do in MiMo's MTP layer."""
    prenorm_states: bool = False
    """Read the target's last states before its final norm. vLLM passes these to a head for a MiMo target, and the
    states after the norm to a head for any other."""


@dataclass
class NativeMtpConfig(HeadConfig):
    """All sizes are those of the target's last layer."""

    implementation = "mtptrain.heads.native_mtp:NativeMtpHead"
    drafts_trees = True

    name: str = "native_mtp"


@dataclass
class EagleConfig(LayerConfig):
    implementation = "mtptrain.heads.eagle:EagleHead"
    drafts_trees = True
    starts_from_target = True

    name: str = "eagle"
    head_dim: int | None = None
    """Size of an attention head; by default hidden size / number of attention heads."""


@dataclass
class Eagle3Config(LayerConfig):
    implementation = "mtptrain.heads.eagle3:Eagle3Head"
    drafts_trees = True
    starts_from_target = True

    name: str = "eagle3"
    head_dim: int | None = None
    """Size of an attention head; by default the hidden size / the number of attention heads."""
    capture_layers: list[int] | None = None
    """Residual streams to read: k is the stream after k decoder layers.

    The default for a target of n layers is that of the engines: 2, n // 2 and n - 3. If n is below 7, these are not
    different layers, and the default is 1, n // 2 and n - 1."""
    draft_vocab_size: int | None = between(1, MAX_SIZE, default=None)
    """Size D of the head's own vocabulary, for which it trains its own lm_head. `mtptrain draft-vocab` chooses the
    tokens. By default the head uses the target's vocabulary and frozen lm_head."""
    norm_before_fc: bool = True
    """Apply one norm to the concatenated streams before fc. OpenVINO lacks it."""
    fc_norm: bool = False
    """Apply a separate norm to each captured stream before fc."""
    norm_output: bool = True
    """Feed back the state after the final norm. llama.cpp and OpenVINO lack it."""
    norm_before_residual: bool = False
    """Start the residual stream from the normed hidden state. Only exports for vLLM and llama.cpp support this."""


@dataclass
class PeagleConfig(Eagle3Config):
    implementation = "mtptrain.heads.peagle:PeagleHead"
    drafts_trees = False
    is_bound_to_depths = True

    name: str = "peagle"
    norm_before_fc: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    """Token that stands for tokens not drafted yet. null takes the last id of the target's vocabulary, which most
    models leave unused, or if prompts have it one that they lack; after `init_from` a head of another run, its own."""


@dataclass
class MlpConfig(HeadConfig):
    """Settings of heads that have a separate MLP for each of the `ttt_steps` depths."""

    is_bound_to_depths = True

    num_layers: int = between(1, MAX_LAYERS, default=1)
    """Number of layers x + SiLU(W x) in the MLP of each depth."""


@dataclass
class MedusaConfig(MlpConfig):
    implementation = "mtptrain.heads.medusa:MedusaHead"

    name: str = "medusa"
    fc_bias: bool = False
    """Whether the layers have biases, as published heads may."""


@dataclass
class HydraConfig(MlpConfig):
    implementation = "mtptrain.heads.hydra:HydraHead"
    drafts_trees = True

    name: str = "hydra"


class CausalLayers(StrEnum):
    """Layers in which a token of a block sees only the tokens of its block up to itself."""

    none = "none"
    sliding = "sliding"
    """Those with a window. vLLM takes these if a config says nothing."""
    all = "all"


@dataclass
class DflashConfig(LayerConfig):
    implementation = "mtptrain.heads.dflash:DflashHead"
    is_bound_to_depths = True
    drafts_whole_blocks = True

    name: str = "dflash"
    num_layers: int = between(1, MAX_LAYERS, default=1)
    """Number of draft layers. Published heads have five."""
    head_dim: int | None = None
    """Size of an attention head; by default hidden size / number of attention heads."""
    capture_layers: list[int] | None = None
    """Residual streams to read: k is the stream after k decoder layers.

    The default for a target of n layers is that of published heads: five, spread evenly from 2 to n - 2. If n is
    below 8, it is that of `eagle3` for a shallow target."""
    draft_vocab_size: int | None = between(1, MAX_SIZE, default=None)
    """Size D of the head's own vocabulary, for which it trains its own lm_head; see head `eagle3`."""
    mask_token_id: int | None = None
    """Token that stands for tokens not drafted yet; see head `peagle`."""
    anchors_per_document: int | None = at_least(1, default=None)
    """Maximum number of draft positions per document that a training step uses, chosen at random in each epoch.
    The published number is 512. null uses all of them."""
    causal: CausalLayers = CausalLayers.none
    """Layers in which a token of a block sees only the tokens of its block up to itself."""
    sample_from_anchor: bool = False
    """The newest token drafts too: each token of a block predicts the token after its position. The block is then a
    token shorter."""
    sliding_window: int | None = at_least(2, default=None)
    """Window W of sliding layers: a token at position p sees those from p - W + 1 on. null: no layer slides."""
    layer_types: list[str] | None = None
    """`full_attention` or `sliding_attention` for each layer. null with a window: the last layer of several sees
    everything, all others slide."""


@dataclass
class DsparkConfig(DflashConfig):
    implementation = "mtptrain.heads.dspark:DsparkHead"
    own_loss_part = LossPart.confidence

    name: str = "dspark"
    sample_from_anchor: bool = True
    """The newest token drafts too, as in published heads; see head `dflash`."""
    markov_rank: int = between(1, MAX_SIZE, default=256)
    """Rank of the correction by the token before. Published heads have 256."""


@dataclass
class Dflash2Config(DflashConfig):
    implementation = "mtptrain.heads.dflash2:Dflash2Head"
    own_loss_part = LossPart.selector

    name: str = "dflash2"
    conv_kernel_size: int = between(1, MAX_KERNEL_SIZE, default=2)
    """Tokens that a convolution adds: a token of a block and those before it."""
    conv_group_size: int = between(1, MAX_SIZE, default=16)
    """Channels that share the kernel's changes. It must divide the target's hidden size."""
    selector_rank: int = between(1, MAX_SIZE, default=256)
    """Rank r of the selector's scores. Published heads have 256."""
    selector_top_k: int = between(1, MAX_CANDIDATES, default=16)
    """Tokens that a draft chooses among. Published heads have 16."""


@dataclass
class DraftModelConfig(HeadConfig):
    """Settings of the model. Sizes are for random weights only; with `init_from`, that model or head has them.

    Here `init_from` is a language model (a directory or a hub name), or a head of another run.
    """

    implementation = "mtptrain.heads.draft_model:DraftModelHead"
    starts_from_target = True

    name: str = "draft_model"
    ttt_steps: int = between(1, MAX_DEPTHS, default=1)
    """Number of depths in the loss. Later depths compute the same as depth 0 of later tokens, so 1 suffices for any
    number of drafts."""
    hidden_size: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's size, here and for the sizes below unless noted."""
    num_hidden_layers: int | None = between(1, MAX_LAYERS, default=None)
    """null takes one layer."""
    num_attention_heads: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's number."""
    num_key_value_heads: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's number."""
    intermediate_size: int | None = between(1, MAX_SIZE, default=None)
    """null takes the target's size."""
    tie_word_embeddings: bool | None = None
    """Whether the output layer is the embedding table; null takes the target's setting."""
    start_from_target: bool = False
    """A model of the target's hidden size starts from a copy of the target's embeddings, first layers, final norm
    and lm_head; its other sizes must be the target's too, except the number of layers."""


HEAD_CONFIGS: dict[str, type[HeadConfig]] = {
    config.name: config
    for config in (
        MtpConfig,
        NativeMtpConfig,
        EagleConfig,
        Eagle3Config,
        PeagleConfig,
        MedusaConfig,
        HydraConfig,
        DflashConfig,
        DsparkConfig,
        Dflash2Config,
        DraftModelConfig,
    )
}
"""The settings of all heads by name. To add a head, see docs/add_a_head.md."""


ConfigT = TypeVar("ConfigT", bound=HeadConfig)


def config_of(kind: type[ConfigT], stored: Mapping[str, Any], path: Path) -> ConfigT:
    """Returns the settings of a head that `save_head` stored in the file `path`; settings added since have defaults."""
    unknown = sorted(stored.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise UserError(
            f"{path}: must hold only settings of head {kind().name} that this version of mtptrain has, but has "
            f"{unknown[0]}={stored[unknown[0]]}; use the version that trained the head, or train again"
        )
    return kind(**stored)


def mask_token_id(token_id: int | None, vocab_size: int) -> int:
    """Returns the id of the mask token: the last of the target's vocabulary if none is set and no prompt is known."""
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise UserError(
            f"head.mask_token_id: must be within 0..{vocab_size - 1}, the target's vocabulary, but is {token_id}; "
            "set the id of a token that texts do not contain"
        )
    return vocab_size - 1 if token_id is None else token_id
