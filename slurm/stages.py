"""The folder of a run, then the stages that its settings ask for, in order: each with its module, and what runs it:
`ranks`, one `process`, or one process that asks a `server`.

Checks the settings on the way, so that a wrong one is found before anything is queued.

    python slurm/stages.py recipe=llama3_1_8b_mtp train.lr=1e-4
"""

import sys

from hydra import compose, initialize_config_dir

from mtptrain.config import RECIPES, PipelineConfig, PromptSource, load_config


def stages(config: PipelineConfig) -> list[tuple[str, str, str]]:
    found = [("prompts", "data_prep.prompts", "process")]
    if config.prompts.source is PromptSource.responses:
        found.insert(0, ("responses", "data_prep.responses", "server" if config.responses.url else "ranks"))
    if getattr(config.head, "draft_vocab_size", None) is not None and config.head.init_from is None:
        found.append(("draft_vocab", "data_prep.draft_vocab", "process"))
    found += [("hidden_states", "data_prep.hidden_states", "ranks"), ("train", "mtptrain.train", "ranks")]
    if config.train.validation_prompts == 0 and config.train.validate_every > 0:
        found.append(("choose_head", "eval.choose_head", "ranks"))
    return [
        *found,
        ("acceptance", "eval.acceptance", "ranks"),
        ("export", "mtptrain.export", "process"),
    ]


if __name__ == "__main__":
    with initialize_config_dir(RECIPES, version_base="1.3"):
        settings = load_config(compose("pipeline", sys.argv[1:]))
    if settings.plan:
        raise ValueError(
            "plan: must be false for jobs, but is true; run python -m data_prep.hidden_states with the same settings"
        )
    print(settings.run_dir, *(" ".join(stage) for stage in stages(settings)), sep="\n")
