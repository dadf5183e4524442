"""Compares variants of a recipe: trains each with several seeds, and measures it on prompts of several lengths.

    mtptrain study recipe=quickstart study=norms
    mtptrain study recipe=quickstart study=long_context "study.seeds=[0]" study.num_prompts=20
    mtptrain study recipe=quickstart study=norms '+study.variants.slower=["train.lr=1e-3"]'

`recipes/study/` defines the variants, each a list of overrides. The stages run as separate programs in
`run_dir/study/<name>/`, with their output in `log.txt` files; finished stages are not run again. Prompts of all lengths
end at the same positions of held-out documents, so that only the length of the context differs. Writes `study.json` and
`study.svg`, and prints tables.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm
from transformers import PreTrainedConfig

from mtptrain.command_line.program import command, program, quoted, stage_command
from mtptrain.command_line.stages import STAGES
from mtptrain.config import RECIPES, PipelineConfig, PromptSource, load_config
from mtptrain.decoding.prompts import HeldOut, held_out_documents, held_out_prompts
from mtptrain.heads import HEADS
from mtptrain.run_dir import claim_stage_dir, write_provenance
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import resolve_target
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256, read_json, write_json

from .drawing import drawing
from .report_page import write_run_page
from .study_figures import RunResult, draw, print_tables, result_of

STUDY_SETTINGS = ("study", "run_dir", "seed", "plan")
"""Top-level settings whose overrides are not passed on to the variants."""
BEFORE_TRAINING = ("prompts", "hidden-states", "draft-vocab")
OWN_ACCEPTANCE = ("num_speculative_tokens", "rebuild_cache", "baselines", "temperatures")
"""Settings of `acceptance` that may differ between variants."""
HEAD_ONLY = ("acceptance.baselines=[]", "acceptance.temperatures=[]", "acceptance.draft_model=null")
"""Measure no other drafters, unless the study or a variant asks for some."""


@program
def main(cfg: DictConfig) -> None:
    study = Study(load_config(cfg), HydraConfig.get().overrides.task)
    study.check()
    claim_stage_dir(study.directory, study.config)
    prompts_file = study.prompts_file()
    runs = [(seed, variant) for seed in study.settings.seeds for variant in study.variants]
    measured: dict[str, dict[int, RunResult | None]] = {variant: {} for variant in study.variants}
    for seed, variant in (bar := tqdm(runs, desc=study.settings.name, unit="run")):
        bar.set_postfix_str(f"{variant}, seed {seed}")
        measured[variant][seed] = study.measure(variant, seed, prompts_file)
    write_provenance(study.directory, study.config)
    print_tables(study.settings.name, study.settings.prompt_tokens, measured)
    write_json(
        study.directory / "study.json", {"command": command(), "study": asdict(study.settings), "measured": measured}
    )
    with drawing(study.directory / "study.svg", study.directory / "study.json"):
        draw(study.settings.prompt_tokens, measured, study.directory / "study.svg")
    write_run_page(study.config)


class Study:
    """Runs the stages of every variant and seed."""

    def __init__(self, config: PipelineConfig, overrides: Sequence[str]) -> None:
        self.settings = config.study
        given = [override for override in overrides if name_of(override).split(".")[0] not in STUDY_SETTINGS]
        self.common = [*config.study.common, *given]
        self.config = load_config(compose("pipeline", [*config.study.common, *overrides]))
        self.variants = {
            name: load_config(compose("pipeline", [*self.common, *own, f"run_dir={quoted(config.run_dir)}"]))
            for name, own in config.study.variants.items()
        }
        self.directory = config.stage_dir("study") / config.study.name

    def check(self) -> None:
        """Raises UserError if no study was chosen, or if the chosen study cannot run."""
        settings, answers = self.settings, self.config.acceptance
        if not settings.variants or not settings.seeds or not settings.prompt_tokens:
            names = sorted(path.stem for path in (Path(RECIPES) / "study").glob("*.yaml"))
            raise UserError(
                f"study: must have variants, seeds and prompt_tokens, but has {len(settings.variants)}, "
                f"{len(settings.seeds)} and {len(settings.prompt_tokens)} of them; choose one of recipes/study "
                f"({', '.join(names)}), for example study={names[0]}, and leave none of the three empty"
            )
        for name, variant in self.variants.items():
            if not re.fullmatch(r"[\w-]+", name) or name in ("data", "held_out"):
                raise UserError(
                    "study.variants: names must consist of letters, digits, - and _, and must not be data or "
                    f"held_out, but one is {name!r}; rename it"
                )
            if variant.target != self.config.target or variant.prompts.source is PromptSource.responses:
                raise UserError(
                    f"study.variants.{name}: must have the study's target and take its prompts from files or "
                    f"conversations, but has target {variant.target.path} and "
                    f"prompts.source={variant.prompts.source}; make another target a separate study, and "
                    "set prompts.source=text_files or prompts.source=conversations"
                )
            source = self.config.prompts
            lengths_of = {
                "max_document_tokens": source.max_document_tokens,
                "max_train_tokens": source.max_train_tokens,
            }
            if asdict(variant.prompts) | lengths_of != asdict(source):
                raise UserError(
                    f"study.variants.{name}: must have the study's `prompts` settings, except max_document_tokens "
                    "and max_train_tokens, but some differ; make it a separate study"
                )
            own = {field: getattr(variant.acceptance, field) for field in OWN_ACCEPTANCE}
            if asdict(variant.acceptance) != asdict(answers) | own:
                raise UserError(
                    f"study.variants.{name}: must have the study's `acceptance` settings, except "
                    f"{', '.join(OWN_ACCEPTANCE)}, but some differ; set them for all variants"
                )
        if len(set(settings.seeds)) < len(settings.seeds) or min(settings.seeds) < 0:
            raise UserError(f"study.seeds: must be distinct and at least 0, but are {settings.seeds}; correct them")
        if not re.fullmatch(r"[\w-]+", settings.name):
            raise UserError(f"study.name: must have only letters, digits, - and _, but is {settings.name!r}; rename it")
        if self.config.seed != 0:
            raise UserError(f"seed: must be left out, but is {self.config.seed}; set study.seeds")
        context_tokens, lengths = target_config_of(self.config).max_position_embeddings, settings.prompt_tokens
        if (
            len(set(lengths)) < len(lengths)
            or min(lengths) < 4
            or max(lengths) + answers.max_new_tokens > context_tokens
        ):
            raise UserError(
                f"study.prompt_tokens: must be distinct, at least 4, and leave room for {answers.max_new_tokens} new "
                f"tokens in the target's context of {context_tokens}, but are {lengths}; correct them"
            )

    def prompts_file(self) -> Path:
        """Writes prompts of every length to a file, and returns its path.

        Prompts of all lengths end at the same positions of held-out documents.
        """
        lengths, directory, answers = self.settings.prompt_tokens, self.directory / "held_out", self.config.acceptance
        longest = [*self.common, f"prompts.max_document_tokens={max(lengths)}"]
        self._run(
            directory,
            longest,
            ["prompts"],
            {"prompts": {**asdict(self.config.prompts), "windows": max(lengths)}},
        )
        chooses = any(variant.train.validation_prompts for variant in self.variants.values())
        documents = held_out_documents(directory / "prompts", HeldOut.reporting if chooses else HeldOut.all)
        prompts = held_out_prompts(
            documents,
            len(documents),
            max(lengths),
            answers.max_new_tokens,
            target_config_of(self.config).max_position_embeddings,
        )
        prompts = {document: tokens for document, tokens in prompts.items() if len(tokens) >= max(lengths)}
        if len(prompts) < self.settings.num_prompts:
            remedy = "lower study.prompt_tokens or raise prompts.validation_fraction, and set another study.name"
            if prompts:
                remedy = f"lower it; or {remedy}"
            raise UserError(
                f"study.num_prompts: must be at most {len(prompts)}, the number of prompts of {max(lengths)} tokens "
                f"in held-out documents, but is {self.settings.num_prompts}; {remedy}"
            )
        lines = (
            {"id": f"{document} {length}", "category": str(length), "input_ids": prompts[document][-length:]}
            for document in list(prompts)[: self.settings.num_prompts]
            for length in lengths
        )
        path = directory / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path.rename(directory / f"prompts_{file_sha256(path)[:8]}.jsonl")

    def measure(self, variant: str, seed: int, prompts_file: Path) -> RunResult | None:
        """Train a variant and measure it on the prompts. Returns None if training diverged.

        Variants that differ only in how they are measured share one trained head.
        """
        config, data = self.variants[variant], self._data(variant)
        directory = self.directory / self._trained_as(variant) / f"seed_{seed}"
        directory.mkdir(parents=True, exist_ok=True)
        for stage in (name.replace("-", "_") for name in BEFORE_TRAINING):
            if (directory / stage).is_symlink():
                (directory / stage).unlink()
            if (data / stage).exists():
                (directory / stage).symlink_to((data / stage).resolve())
        overrides = [*self.common, *self.settings.variants[variant], f"seed={seed}"]
        trained = {"seed": seed, **training_settings(config)}
        if not self._run(directory, overrides, ["train"], trained, record="trained.json"):
            return None
        output_dir = self.directory / variant / f"seed_{seed}" / f"acceptance_{prompts_file.stem}"
        prompts = [f"acceptance.prompts_file={quoted(prompts_file)}", f"acceptance.output_dir={quoted(output_dir)}"]
        record = f"measured_{variant}_{prompts_file.stem}.json"
        self._run(
            directory,
            [*HEAD_ONLY, *overrides, *prompts],
            ["acceptance"],
            {"settings": asdict(config.acceptance)},
            record,
        )
        return result_of(output_dir, self.settings.prompt_tokens)

    def _trained_as(self, variant: str) -> str:
        """Returns the first variant that is trained with the same settings."""
        own = training_settings(self.variants[variant])
        return next(name for name, config in self.variants.items() if training_settings(config) == own)

    def _data(self, variant: str) -> Path:
        """Run the stages before training, and return their folder. Variants that need the same data share it."""
        needs = {name: needed_data(config) for name, config in self.variants.items()}
        first = next(name for name in needs if needs[name] == needs[variant])
        directory, stages = self.directory / "data" / first, list(BEFORE_TRAINING)
        if needs[variant]["draft_vocab_size"] is None:
            stages.remove("draft-vocab")
        self._run(directory, [*self.common, *self.settings.variants[first]], stages, needs[variant])
        return directory

    def _run(
        self,
        directory: Path,
        overrides: Sequence[str],
        stages: Sequence[str],
        settings: Mapping[str, Any],
        record: str = "made.json",
    ) -> bool:
        """Run stages with `directory` as their run_dir, unless they have already run there.

        Returns:
            False if training diverged, otherwise True.

        Raises:
            UserError: the stages have already run there with other settings, or one failed.
        """
        path, wanted = directory / record, json.loads(json.dumps(settings))
        state = "begun"
        if path.exists():
            recorded = read_json(path, f"delete {directory} and run the study again", ["settings", "state"])
            different = [name for name in wanted if recorded["settings"].get(name) != wanted[name]]
            if different:
                raise UserError(
                    f"{path}: {different[0]} must be {wanted[different[0]]}, but was "
                    f"{recorded['settings'].get(different[0])}; delete {directory}, or set another study.name"
                )
            state = recorded["state"]
        if state == "begun":
            directory.mkdir(parents=True, exist_ok=True)
            write_json(path, {"state": state, "settings": wanted})
            outcomes = [
                run_stage(
                    stage,
                    [*overrides, f"run_dir={quoted(directory)}"],
                    self.settings.num_ranks,
                    directory / "log.txt",
                )
                for stage in stages
            ]
            state = "done" if all(outcomes) else "diverged"
            write_json(path, {"state": state, "settings": wanted})
        return bool(state == "done")


def name_of(override: str) -> str:
    """Returns the name of the setting that an override sets."""
    return override.lstrip("+~").split("=")[0]


def target_config_of(config: PipelineConfig) -> PreTrainedConfig:
    return read_target_config(resolve_target(config.target.path, config.target.revision))


def needed_data(config: PipelineConfig) -> dict[str, Any]:
    """Returns the settings that the stages before training depend on."""
    return {
        "prompts": asdict(config.prompts),
        "hidden_states": asdict(config.hidden_states),
        "capture_layers": list(HEADS[config.head.name].layers_to_capture(config.head, target_config_of(config))),
        "draft_vocab_size": getattr(config.head, "draft_vocab_size", None),
    }


def training_settings(config: PipelineConfig) -> dict[str, Any]:
    """Returns the settings that a trained head depends on, except the seed."""
    return {
        "data": needed_data(config),
        "head": asdict(config.head),
        "train": asdict(config.train),
        "deepspeed": config.deepspeed,
    }


def run_stage(stage: str, overrides: Sequence[str], num_ranks: int, log: Path) -> bool:
    """Run a stage. Returns False if it is `train` and training diverged.

    Raises:
        UserError: the program failed in another way. The message contains the last error in its log.
    """
    command_line = stage_command(stage, overrides, num_ranks if STAGES[stage].runner == "ranks" else 1)
    with log.open("a") as file:
        before = log.stat().st_size
        ended = subprocess.run(command_line, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode == 0:
        return True
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"[Ee]rror: ", line) and "ChildFailedError" not in line] or [
        "it printed no error"
    ]
    if stage == "train" and "must be finite" in errors[-1]:
        return False
    raise UserError(
        f"mtptrain {stage}: must exit with status 0, but exited with {ended.returncode}: {errors[-1]}; see {log}"
    )


if __name__ == "__main__":
    main()
