"""Variants of a recipe beside each other: each trained over several seeds, and measured on prompts of several lengths.

    python -m eval.study recipe=quickstart study=norms
    python -m eval.study recipe=quickstart study=long_context "study.seeds=[0]" study.num_prompts=20
    python -m eval.study recipe=quickstart study=norms '+study.variants.more=[train.lr=1e-3]'

`recipes/study/` has the variants, each a list of overrides. The stages run as programs of their own in `run_dir/study/<name>/`, where
`log.txt` beside each has what they print; what is finished there is not run again. Prompts of all lengths end at the same places of
held-out documents, so that their answers differ by the context alone. Writes `study.json` and `study.svg`, and prints tables.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtptrain.acceptance import held_out_documents, held_out_prompts, summarise
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.run_dir import write_json, write_provenance
from mtptrain.speculate import Generation
from mtptrain.target import read_target_config, resolve_target

Figures = dict[str, Any]
"""Of one training run: `acceptance` by tokens of the prompt, `without_loops` likewise, and `acceptance_rate_at` of all."""
OF_THE_DATA = ("prompts", "hidden_states", "head", "head.capture_layers")
"""Overrides, or what their names begin with, that stages 1 and 2 depend on."""


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    check(config)
    study = Study(config, HydraConfig.get().overrides.task)
    prompts_file = study.prompts_file()
    runs = [(seed, variant) for seed in config.study.seeds for variant in config.study.variants]
    measured: dict[str, dict[int, Figures | None]] = {variant: {} for variant in config.study.variants}
    for seed, variant in (bar := tqdm(runs, desc=config.study.name, unit="run")):
        bar.set_postfix_str(f"{variant}, seed {seed}")
        measured[variant][seed] = study.measure(variant, seed, prompts_file)
    write_provenance(study.directory, config)
    write_json(study.directory / "study.json", {"study": asdict(config.study), "measured": measured})
    print_tables(config, measured)
    draw(config, measured, study.directory / "study.svg")
    print(f"plot: {study.directory / 'study.svg'}")


def check(config: PipelineConfig) -> None:
    """Raises ValueError where no study was chosen, or its prompts do not fit the target."""
    settings = config.study
    if not settings.variants or not settings.seeds or not settings.prompt_tokens:
        names = ", ".join(sorted(path.stem for path in (Path(RECIPES) / "study").glob("*.yaml")))
        raise ValueError(
            f"study: must have variants, seeds and prompt_tokens, but has {len(settings.variants)}, {len(settings.seeds)} and "
            f"{len(settings.prompt_tokens)}; choose one of recipes/study ({names}), for example study={names.split(', ')[0]}"
        )
    context_tokens = read_target_config(resolve_target(config.target.path, config.target.revision)).max_position_embeddings
    longest = max(settings.prompt_tokens) + config.acceptance.max_new_tokens
    if min(settings.prompt_tokens) < 2 or longest > context_tokens:
        raise ValueError(
            f"study.prompt_tokens: must be at least 2 and fit the target's context of {context_tokens} with "
            f"{config.acceptance.max_new_tokens} new ones, but are {settings.prompt_tokens}; correct them"
        )


class Study:
    """Runs the stages of every variant and seed."""

    def __init__(self, config: PipelineConfig, overrides: Sequence[str]) -> None:
        self.config = config
        self.settings = config.study
        self.directory = config.stage_dir("study") / config.study.name
        given = [override for override in overrides if name_of(override).split(".")[0] not in ("study", "run_dir", "seed")]
        self.common = [*config.study.common, *given]

    def prompts_file(self) -> Path:
        """The last tokens before the same places of held-out documents, as many as each length says."""
        lengths, directory = self.settings.prompt_tokens, self.directory / "held_out"
        overrides = [*self.common, f"prompts.max_document_tokens={max(lengths)}"]
        self._once(directory, overrides, ["data_prep.prompts"])
        documents, answers = held_out_documents(directory / "prompts"), self.config.acceptance
        whole = held_out_prompts(
            documents, self.settings.num_prompts, max(lengths), answers.max_new_tokens, max(lengths) + answers.max_new_tokens
        )
        lines = (
            {"id": f"{place} {length}", "category": str(length), "input_ids": tokens[-length:]}
            for place, tokens in whole.items()
            for length in lengths
        )
        path = directory / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def measure(self, variant: str, seed: int, prompts_file: Path) -> Figures | None:
        """Train and measure; None where the training diverged."""
        own = self.settings.variants[variant]
        data, directory = self._data(variant), self.directory / variant / f"seed_{seed}"
        directory.mkdir(parents=True, exist_ok=True)
        for stage in ("prompts", "hidden_states"):
            (directory / stage).unlink(missing_ok=True)
            (directory / stage).symlink_to((data / stage).resolve())
        overrides = [*self.common, *own, f"seed={seed}", f"acceptance.prompts_file={prompts_file}", "acceptance.beside=[]"]
        try:
            self._once(directory, overrides, ["mtptrain.train", "eval.acceptance"])
        except RuntimeError as error:
            if "must be finite" in str(error):
                return None
            raise
        return figures_of(directory / "acceptance" / "generations.jsonl", self.settings.prompt_tokens)

    def _data(self, variant: str) -> Path:
        """Stages 1 and 2, once for all variants that share what they depend on."""
        of_variant = {name: [each for each in own if is_of_the_data(each)] for name, own in self.settings.variants.items()}
        first = next(name for name, own in of_variant.items() if own == of_variant[variant])
        directory = self.directory / "data" / first
        self._once(directory, [*self.common, *of_variant[variant]], ["data_prep.prompts", "data_prep.hidden_states"])
        return directory

    def _once(self, directory: Path, overrides: Sequence[str], programs: Sequence[str]) -> None:
        """Run programs with `directory` as their run_dir, unless they have run there.

        Raises:
            ValueError: they have, with other settings.
            RuntimeError: one failed.
        """
        record = directory / "study_run.json"
        if record.exists():
            if (found := json.loads(record.read_text())) != list(overrides):
                raise ValueError(
                    f"{directory}: must have been run with {overrides}, but was with {found}; remove the folder, or set study.name"
                )
            return
        directory.mkdir(parents=True, exist_ok=True)
        for program in programs:
            run_program(program, [*overrides, f"run_dir={directory}"], self.settings.num_ranks, directory / "log.txt")
        write_json(record, list(overrides))


def name_of(override: str) -> str:
    """What an override sets."""
    return override.lstrip("+~").split("=")[0]


def is_of_the_data(override: str) -> bool:
    return name_of(override) in OF_THE_DATA or name_of(override).startswith(("prompts.", "hidden_states."))


def run_program(program: str, overrides: Sequence[str], num_ranks: int, log: Path) -> None:
    """Raises RuntimeError, with the last line of its log, where the program fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    is_of_ranks = num_ranks > 1 and program != "data_prep.prompts"
    with log.open("a") as file:
        command = [sys.executable, *(launcher if is_of_ranks else []), "-m", program, *overrides]
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error: " in line] or ["see the log"]
        raise RuntimeError(f"{program}: must end well, but ended with {ended.returncode}: {lines[-1]}; see {log}")


def figures_of(generations: Path, prompt_tokens: Sequence[int]) -> Figures:
    """From the counts of every answer."""
    lines = [json.loads(line) for line in generations.read_text().splitlines()]
    names = ("tokens", "rounds", "empty_rounds", "drafted", "accepted_at")
    answers = [(line["id"].split()[1], line["has_loop"], Generation(**{name: line[name] for name in names})) for line in lines]

    def lengths(with_loops: bool) -> dict[str, float]:
        of_length = {
            str(tokens): [each for length, loops, each in answers if length == str(tokens) and (with_loops or not loops)]
            for tokens in prompt_tokens
        }
        return {tokens: summarise(part).acceptance_length for tokens, part in of_length.items()}

    return {
        "acceptance": lengths(with_loops=True),
        "without_loops": lengths(with_loops=False),
        "acceptance_rate_at": summarise([each for *_, each in answers]).acceptance_rate_at,
    }


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


Measured = Mapping[str, Mapping[int, Figures | None]]


def converged(measured: Measured) -> Iterator[tuple[str, list[Figures]]]:
    for variant, runs in measured.items():
        yield variant, [run for run in runs.values() if run is not None]


def num_depths(measured: Measured) -> int:
    return max((len(run["acceptance_rate_at"]) for _, runs in converged(measured) for run in runs), default=0)


def print_tables(config: PipelineConfig, measured: Measured) -> None:
    console = Console()
    console.width = max(console.width, 100)
    tokens = list(map(str, config.study.prompt_tokens))
    for key, title in (("acceptance", "acceptance length"), ("without_loops", "acceptance length without loops")):
        table = Table("prompts of", *(f"{each} tokens" for each in tokens), "seeds", title=f"{config.study.name}: {title}")
        for variant, runs in converged(measured):
            cells = ["{:.3f} ± {:.3f}".format(*spread([run[key][each] for run in runs])) if runs else "diverged" for each in tokens]
            table.add_row(variant, *cells, f"{len(runs)} of {len(measured[variant])}")
        console.print(table)
    depths = range(num_depths(measured))
    table = Table("accepted", *(f"at {depth}" for depth in depths), title=f"{config.study.name}: by position")
    for variant, runs in converged(measured):
        rates = [[run["acceptance_rate_at"][depth] for run in runs] for depth in depths]
        table.add_row(variant, *("{:.3f} ± {:.3f}".format(*spread(rate)) if rate else "diverged" for rate in rates))
    console.print(table)


def draw(config: PipelineConfig, measured: Measured, path: Path) -> None:
    """Acceptance length against tokens of the prompt, and acceptance by position; bars are standard deviations over seeds."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_tokens, by_position = figure.subplots(1, 2)
    tokens, depths = config.study.prompt_tokens, range(num_depths(measured))
    for variant, runs in converged(measured):
        if runs:
            lengths = [spread([run["acceptance"][str(each)] for run in runs]) for each in tokens]
            rates = [spread([run["acceptance_rate_at"][depth] for run in runs]) for depth in depths]
            for axes, places, points in ((by_tokens, tokens, lengths), (by_position, depths, rates)):
                means, deviations = zip(*points, strict=True)
                axes.errorbar(list(places), means, yerr=deviations, marker="o", capsize=3, label=variant)
    by_tokens.set_xscale("log", base=2)
    by_tokens.set_xticks(tokens, list(map(str, tokens)))
    by_tokens.set(xlabel="tokens of the prompt", ylabel="acceptance length")
    by_position.set_xticks(depths)
    by_position.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, None))
    by_tokens.legend(fontsize=8)
    figure.savefig(path, format="svg")


if __name__ == "__main__":
    main()
