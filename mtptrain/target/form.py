"""Finds out how a model is built by running its code once without weights, instead of keeping a list of families.

A model of any size is built on the meta device, where tensors have shapes and no values. Its decoder layers pass their
input on, except the last one, which returns random states; only the final norm and a small lm_head have values. So one
forward, which takes milliseconds, shows where the parts of the model are, how logits follow from the last residual
stream, and which mask each layer asks transformers for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import AttentionMaskInterface, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from mtptrain.target.causal_attention import MaskOf
from mtptrain.target.hub import DOWNLOAD_AGAIN
from mtptrain.utils.errors import UserError, error_summary, refusing

PROBE = "mtptrain_probe"
"""The name under which `_note_mask` is registered with transformers."""
TOLERANCE = 2e-6
"""Largest difference between what a model and its form compute in fp32, in shares of the largest value."""
ROWS, VOCAB = 16, 64
"""Number of tokens and of logits in the probe."""


@dataclass(frozen=True)
class TargetForm:
    """Where the parts of a language model are, and how its logits follow from its last residual stream."""

    decoder: str
    """Name of the module that runs the embeddings, layers and final norm, such as `model`."""
    layers: str
    """Name of the list of decoder layers inside the model, such as `model.layers`."""
    norm: str
    """Name of the final norm, whose input is the last residual stream."""
    embed_tokens: str
    lm_head: str
    masks: tuple[MaskOf | None, ...]
    """The mask of each layer; None for a layer without attention."""
    keeps_states: bool
    """Whether some layers keep a state instead of keys and values, or beside them."""
    rotary_dim: int | None
    """Number of dimensions of a query that are rotated in layers with full attention; None without rotary embedding."""
    norm_module: nn.Module
    """The family's own final norm, whose weight and bias stand for any."""
    norm_eps: float
    norm_offset: float
    """Added to the norm's weight: 1 in families that store weight - 1."""
    has_norm_bias: bool = False
    has_lm_head_bias: bool = False
    state_scale: float = 1.0
    """Factor of the post-norm states before lm_head."""
    logit_scale: float = 1.0
    """Factor of lm_head's output."""
    soft_cap: float | None = None
    """Cap c of the logits, which become c * tanh(logits / c)."""

    def part_names(self, is_tied: bool) -> dict[str, str]:
        """Returns the names of the tensors that logits need, by their fields in `FrozenParts`."""
        lm_head, biases = self.embed_tokens if is_tied else self.lm_head, {}
        if self.has_norm_bias:
            biases["norm_bias"] = f"{self.norm}.bias"
        if self.has_lm_head_bias:
            biases["lm_head_bias"] = f"{self.lm_head}.bias"
        parts = {"embed_tokens": self.embed_tokens, "norm_weight": self.norm, "lm_head": lm_head}
        return {part: f"{module}.weight" for part, module in parts.items()} | biases

    def normed(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the post-norm states of streams [..., H], with the same rounding as the model's own norm."""
        parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        normed: torch.Tensor = functional_call(self.norm_module, parameters, (states.to(weight.dtype),))
        return normed

    def scaled_states(self, states: torch.Tensor) -> torch.Tensor:
        """Returns what lm_head reads, from post-norm states."""
        return states if self.state_scale == 1 else states * self.state_scale

    def scaled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the model's logits, from the output of lm_head."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


_FOUND: dict[tuple[type, str], TargetForm] = {}


def find_form(config: PreTrainedConfig) -> TargetForm:
    key = type(config), config.to_json_string()
    if key not in _FOUND:
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            _FOUND[key] = _Probe(config).form()
    return _FOUND[key]


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model of a config in fp32, without memory for its weights."""
    own = deepcopy(config)  # transformers writes into it
    path = Path(config.name_or_path or "") / "config.json"
    with refusing(f"{path}: must describe a model that transformers can build", DOWNLOAD_AGAIN), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, trust_remote_code=False, dtype=torch.float32)
    return model.eval()


class _Probe:
    """A model without weights, whose decoder layers are replaced, and what is seen in its forward."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self.family = config, config.model_type
        self.model = build_on_meta(config)
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        self.decoder, self.layers = self._find_layers()
        self.lm_head = self._real_lm_head()
        self.masks: list[MaskOf | None] = [None] * len(self.layers)
        # Small rows tell one epsilon of a norm from another.
        self.stream = self._random(1, ROWS, int(config.hidden_size)) * torch.logspace(-3, 1, ROWS)[:, None]
        self.norm: nn.Module | None = None
        self.post_norm = self.last_hidden_state = self.stream

    def form(self) -> TargetForm:
        logits = self._run()
        assert self.norm is not None
        if not torch.equal(self.last_hidden_state, self.post_norm):
            raise self._refusal("lm_head must read what the final norm returns", "it reads something else")
        names = {id(module): name for name, module in self.model.named_modules()}
        form = TargetForm(
            decoder=names[id(self.decoder)],
            layers=names[id(self.layers)],
            norm=names[id(self.norm)],
            embed_tokens=names[id(self.model.get_input_embeddings())],
            lm_head=names[id(self.lm_head)],
            masks=tuple(self.masks),
            keeps_states=any(
                isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=self.config).layers
            ),
            rotary_dim=self._rotary_dim(),
            norm_module=self.norm,
            norm_eps=next((x for x in _numbers(vars(self.norm)) if x <= 0.01), 1e-6),
            norm_offset=self._norm_offset(self.norm),
            has_norm_bias=getattr(self.norm, "bias", None) is not None,
            has_lm_head_bias=self.lm_head.bias is not None,
        )
        return self._fit_logits(form, logits)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device="cpu")

    def _refusal(self, must: str, found: str) -> UserError:
        found = f"in the family {self.family!r} {found}, so mtptrain cannot run it"
        return UserError(f"target.path: {must}, but {found}; choose another target")

    def _find_layers(self) -> tuple[nn.Module, nn.ModuleList]:
        for module in self.model.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == self.config.num_hidden_layers:
                    return module, child
        raise self._refusal("num_hidden_layers must be the length of a list of decoder layers", "there is no such list")

    def _real_lm_head(self) -> nn.Linear:
        lm_head = self.model.get_output_embeddings()
        if not isinstance(lm_head, nn.Linear):
            raise self._refusal("logits must come from a linear layer", f"they come from {type(lm_head).__name__}")
        lm_head.weight = nn.Parameter(self._random(VOCAB, lm_head.in_features) / lm_head.in_features**0.5)
        if lm_head.bias is not None:
            lm_head.bias = nn.Parameter(self._random(VOCAB))
        return lm_head

    def _run(self) -> torch.Tensor:
        """Returns the logits [ROWS, VOCAB] of the random states."""
        hooks = [self.decoder.register_forward_hook(self._keep_output)]
        for module in self.decoder.children():
            hooks.append(module.register_forward_pre_hook(self._make_real))
            hooks.append(module.register_forward_hook(self._keep_norm))
        self.model.config._attn_implementation = PROBE  # `set_attn_implementation` would look for such a function
        ids = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
        problem: Exception | None = None
        for returns_tuple in (False, True):  # decoder layers return their states, or a tuple that begins with them
            for index, layer in enumerate(self.layers):
                layer.forward = self._replacement(index, returns_tuple)
            try:
                # With a cache, transformers does not look for packed documents, which would need values.
                cache = Cache(layer_class_to_replicate=DynamicLayer)
                logits: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, use_cache=False).logits
            except Exception as error:  # the model's code may raise anything
                problem = problem or error
            else:
                if self.norm is not None and not logits.is_meta:
                    for hook in hooks:
                        hook.remove()
                    return logits[0]
        raise self._refusal(
            "a model must run with random states after its last layer, by which mtptrain finds its parts",
            "that fails" if problem is None else f"transformers reports {error_summary(problem)}",
        ) from problem

    def _replacement(self, index: int, returns_tuple: bool) -> Callable[..., Any]:
        """Returns the forward of a decoder layer that passes its input on; the last layer returns random states."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            given = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, MaskOf)]
            self.masks[index] = MaskOf(given[0].window, given[0].chunk) if given else None
            out = self.stream if index == len(self.layers) - 1 else states
            return (out, None) if returns_tuple else out

        return forward

    def _make_real(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Give values to a module that reads the random states."""
        if args and args[0] is self.stream:
            module.to_empty(device="cpu")
            for parameter in module.parameters():
                parameter.uniform_(0.5, 1.5, generator=self.generator)

    def _keep_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and args[0] is self.stream and isinstance(output, torch.Tensor):
            self.norm, self.post_norm = module, output

    def _keep_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.last_hidden_state = output.last_hidden_state

    def _rotary_dim(self) -> int | None:
        for module in self.decoder.modules():
            for name in ("full_attention_inv_freq", "inv_freq"):
                frequencies = getattr(module, name, None)
                if isinstance(frequencies, torch.Tensor):
                    return 2 * frequencies.shape[-1]
        return None

    def _norm_offset(self, norm: nn.Module) -> float:
        weight: Any = getattr(norm, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.shape != self.stream.shape[-1:]:
            found = f"{type(norm).__name__} has none"
            raise self._refusal("the final norm must have a weight for each channel", found)
        sizes = []
        for value in (0.0, 1.0):
            parameters = {name: torch.full_like(x, value * (name == "weight")) for name, x in norm.named_parameters()}
            sizes.append(float(functional_call(norm, parameters, (self.stream,)).norm()))
        return round(sizes[0] / (sizes[1] - sizes[0]), 3)

    def _fit_logits(self, form: TargetForm, logits: torch.Tensor) -> TargetForm:
        """Returns the form with the factors before and after lm_head, and the soft cap."""
        states, bias, numbers = self.post_norm[0], self.lm_head.bias, sorted(set(_numbers(self.config.to_dict())))
        raw = F.linear(states, self.lm_head.weight)
        # A bias tells a factor before lm_head from one after it.
        terms = [raw] if bias is None else [raw, bias.expand_as(raw)]
        columns = torch.stack(terms, -1).flatten(0, 1).double()
        candidates = []
        for cap in (None, *(number for number in numbers if number > logits.abs().max())):
            uncapped = logits.double() if cap is None else torch.atanh(logits.double() / cap) * cap
            fitted = torch.linalg.lstsq(columns, uncapped.reshape(-1, 1)).solution[:, 0].tolist()
            after = _exact(fitted[-1], numbers)
            before = 1.0 if bias is None else _exact(fitted[0] / fitted[1], numbers)
            candidates.append(replace(form, soft_cap=cap, logit_scale=after, state_scale=before))

        def computed(each: TargetForm) -> torch.Tensor:
            return each.scaled_logits(F.linear(each.scaled_states(states), self.lm_head.weight, bias))

        # A cap far above the logits changes less than rounding does, so one is looked for only if none fits.
        found = _nearest(candidates[:1], computed, logits) or _nearest(candidates[1:], computed, logits)
        if found is None:
            raise self._refusal("logits must follow from lm_head by factors and a soft cap", "they do not")
        return found


def _nearest(
    candidates: Iterable[TargetForm], compute: Callable[[TargetForm], torch.Tensor], wanted: torch.Tensor
) -> TargetForm | None:
    """Returns the candidate that computes what is wanted to within `TOLERANCE`, or None; the first one of equals."""
    best, least = None, TOLERANCE
    for each in candidates:
        error = float((compute(each) - wanted).abs().max() / wanted.abs().max())
        if error < least:
            best, least = each, error
    return best


def _numbers(settings: Mapping[str, Any]) -> Iterator[float]:
    """Yields the positive numbers of a config and of its sections."""
    for value in settings.values():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
            yield float(value)


def _exact(fitted: float, numbers: Iterable[float]) -> float:
    """Returns the number of the config, or its inverse, that a fitted factor stands for; the fitted one if none is."""
    for number in (1.0, *numbers):
        for exact in (number, 1 / number):
            if abs(fitted / exact - 1) < TOLERANCE:
                return exact
    return fitted


class _Noted(MaskOf):
    """Stands for a mask. Some models cut theirs."""

    def __getitem__(self, index: object) -> "_Noted":
        return self


def _note_mask(mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **kwargs: Any) -> MaskOf:
    """Returns which mask a model asks transformers for, in place of the mask."""
    if local_size is None:
        return _Noted()
    query = torch.tensor(local_size, device="cpu")  # the first position that does not see position 0
    try:
        sees_last = bool(mask_function(0, 0, query, query - 1))
    except NotImplementedError:  # a chunk also depends on the padding before a text, which has no value here
        sees_last = False
    return _Noted(window=local_size) if sees_last else _Noted(chunk=local_size)


AttentionMaskInterface.register(PROBE, _note_mask)
