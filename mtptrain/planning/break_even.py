"""Computes from the costs of rounds whether drafting can pay, and compares it with what trained heads usually reach.

A round with K drafts takes as long as `break_even_length` plain steps. Drafting is faster than plain decoding if a
round gives more tokens than that, and a round gives at most K + 1. `mtptrain serving-bench` with
`serving_bench.break_even=true` measures the costs with a head of random weights, which takes as long as a trained one,
and writes them to `run_dir/serving_bench/break_even/report.json`. The plan of a run and the benchmarks of a trained
head read them there.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtptrain.config import PipelineConfig
from mtptrain.engines.table import running_engine
from mtptrain.heads.files import START, TARGET_WEIGHTS
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_sealed

OWN_LOOP = "mtptrain"
"""Name of our own decoding loop, beside the names of engines."""
CHOICES = (1, 2, 3, 5)
"""Values of K that are measured by default."""
USUAL_RATES = {"eagle3": (0.69, 0.79), "mtp": (0.67, 0.79), "dflash": (0.70, 0.72)}
"""Lowest and highest share of drafts that trained heads have accepted, on chat (MT-Bench), greedy or at temperature 1.

A draft is accepted with this probability if all drafts before it were. The rates give the published acceptance lengths
within 3 %. `eagle3` with K = 3, 5, 7: 2.90, 3.52, 3.86 for Llama-3.1-8B, 2.96, 3.62, 3.98 for Llama-3.3-70B and
2.50, 2.83, 2.98 for Qwen3-30B-A3B (SpecBundle, served by SGLang). `mtp` with K = 7: 2.90 for DeepSeek-V3's own module
and 4.00 after fine-tuning (arXiv 2602.23881). `dflash` with K = 7: 3.11 for Qwen3-8B (DeepSpec) and 3.28 (a retrain).
Code and mathematics reach more: 3.3 to 5.2 with K = 5 on HumanEval.
"""
PROMPT_LOOKUP_LENGTHS = (1.5, 1.7)
"""Tokens per step of prompt lookup, which needs no training, on Spec-Bench."""
REMEASURE = "run mtptrain serving-bench with serving_bench.break_even=true again, or delete the file"


@dataclass(frozen=True)
class RoundCost:
    """The cost of a round with K drafts and of a plain step, in one engine at one batch size."""

    engine: str
    """`OWN_LOOP` or the name of an engine."""
    batch_size: int
    num_speculative_tokens: int
    plain_ms: float
    """Milliseconds of a step without drafts."""
    round_ms: float
    draft_ms: float | None
    """Part of a round that drafts; None for engines, which do not report it."""
    verify_ms: float | None
    """Part of a round in which the target reads K + 1 tokens; None for engines."""

    @property
    def break_even_length(self) -> float:
        """The acceptance length above which drafting is faster than plain decoding."""
        return self.round_ms / self.plain_ms

    @property
    def break_even_rate(self) -> float:
        """The acceptance rate, accepted / drafted, above which drafting is faster; above 1 if it never is."""
        return (self.break_even_length - 1) / self.num_speculative_tokens

    @property
    def can_pay(self) -> bool:
        """Whether a round in which all drafts are accepted is faster than plain decoding."""
        return self.break_even_length < self.num_speculative_tokens + 1

    def describe(self, head_name: str) -> dict[str, Any]:
        """Returns the figures for the report."""
        return {
            **asdict(self),
            "break_even_length": self.break_even_length,
            "break_even_rate": self.break_even_rate,
            "can_pay": self.can_pay,
            "usual_length": usual_length(head_name, self.num_speculative_tokens),
        }


def default_choices(head: HeadConfig) -> list[int]:
    """Returns the values of K to measure by default: those of `CHOICES` that a head can draft."""
    if head.drafts_whole_blocks:
        return [head.ttt_steps]
    return [num_drafts for num_drafts in CHOICES if num_drafts <= head.ttt_steps or not head.is_bound_to_depths]


def usual_length(head_name: str, num_speculative_tokens: int) -> tuple[float, float] | None:
    """Returns the lowest and highest acceptance length that such heads usually reach; None if we know of none.

    With a rate r, a round gives 1 + r + r^2 + ... + r^K tokens.
    """
    if head_name not in USUAL_RATES:
        return None
    low, high = (sum(rate**depth for depth in range(num_speculative_tokens + 1)) for rate in USUAL_RATES[head_name])
    return low, high


def best_choice(costs: Sequence[RoundCost], head_name: str) -> RoundCost:
    """Returns the K that is fastest at the middle of the usual lengths, or that needs the lowest acceptance rate."""

    def merit(cost: RoundCost) -> float:
        usual = usual_length(head_name, cost.num_speculative_tokens)
        return -cost.break_even_rate if usual is None else sum(usual) / 2 / cost.break_even_length

    return max(costs, key=merit)


def verdict(costs: Sequence[RoundCost], head_name: str) -> str:
    """Returns whether drafting pays, for the costs of all K in one engine and at one batch size."""
    paying = [cost for cost in costs if cost.can_pay]
    if not paying:
        nearest = min(costs, key=lambda cost: cost.break_even_rate)
        num_drafts = nearest.num_speculative_tokens
        return (
            f"no K can pay: a round with K = {num_drafts} costs {nearest.break_even_length:.2f} plain steps and gives "
            f"at most {num_drafts + 1} tokens"
        )
    best = best_choice(paying, head_name)
    pays = f"K = {best.num_speculative_tokens} pays above {best.break_even_length:.2f} tokens per round"
    usual = usual_length(head_name, best.num_speculative_tokens)
    if usual is None:
        return f"{pays}, that is, if more than {best.break_even_rate:.0%} of the drafts are accepted"
    low, high = usual
    reach = f"{head_name} heads usually reach {low:.1f} to {high:.1f}"
    if high <= best.break_even_length:
        return f"{pays}, but {reach}: drafting does not pay"
    speed = f"{low / best.break_even_length:.2f} to {high / best.break_even_length:.2f} times plain decoding"
    return f"{pays}; {reach}, {speed}"


def verdicts(costs: Sequence[RoundCost], head_name: str) -> list[str]:
    """Returns a verdict for each engine and batch size, in the order of `costs`."""
    groups: dict[tuple[str, int], list[RoundCost]] = {}
    for cost in costs:
        groups.setdefault((cost.engine, cost.batch_size), []).append(cost)
    return [f"{engine}, batch {size}: {verdict(group, head_name)}" for (engine, size), group in groups.items()]


def predicted_speed_up(
    costs: Sequence[RoundCost], engine: str, batch_size: int, num_speculative_tokens: int | None, length: float
) -> float | None:
    """Returns the speed-up that an acceptance length gives by these costs; None if they were not measured."""
    wanted = (engine, batch_size, num_speculative_tokens)
    for cost in costs:
        if (cost.engine, cost.batch_size, cost.num_speculative_tokens) == wanted:
            return length / cost.break_even_length
    return None


def break_even_dir(config: PipelineConfig) -> Path:
    """Returns the directory in which a run's measurement is looked for."""
    return config.stage_dir("serving_bench") / "break_even"


def subject(config: PipelineConfig, target: TargetFiles) -> dict[str, Any]:
    """Returns what a measurement is about, as JSON stores it: the weights, the head's settings, and the dtypes.

    Settings for the head's initial weights are left out, because they do not change its cost.
    """
    head = {name: value for name, value in asdict(config.head).items() if name not in START}
    facts: dict[str, Any] = {TARGET_WEIGHTS: target.weights_sha256, "head": head, "dtype": str(config.acceptance.dtype)}
    served = running_engine(config.serving.engine).served_types(target, config.serving, str(config.export.dtype))
    return json.loads(json.dumps(facts if served is None else facts | {"served": served}))


def read_costs(config: PipelineConfig, target: TargetFiles) -> list[RoundCost]:
    """Returns the run's measured costs, or none if they are missing or of another target, head or dtype.

    Costs of a target whose weights are not on this machine are not used either, since the weights cannot be compared.

    Raises:
        UserError: the file is damaged.
    """
    path = break_even_dir(config) / "report.json"
    if not path.is_file() or not any(target.directory.glob("*.safetensors")):
        return []
    report, wanted = read_sealed(path, REMEASURE, ["subject", "rows"]), subject(config, target)
    if report["subject"] != wanted:
        return []
    try:
        return [RoundCost(**{name: row[name] for name in RoundCost.__dataclass_fields__}) for row in report["rows"]]
    except (LookupError, TypeError) as error:
        raise UserError(
            f"{path}: must have all figures of every row, but some are missing ({error!r}); {REMEASURE}"
        ) from error
