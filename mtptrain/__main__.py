"""Run one stage: `mtptrain STAGE recipe=NAME [setting=value ...]`.

`STAGES` names the program of each stage, which `python -m PROGRAM` runs too. `mtptrain compare` takes paths instead of
settings. To use several GPUs, start `mtptrain` with torchrun:

    torchrun --nproc-per-node 8 -m mtptrain train recipe=llama3_1_8b_mtp
"""

import runpy
import sys
from difflib import get_close_matches

from mtptrain.command_line.program import python_module
from mtptrain.utils.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, exit_with_line

STAGES = {
    "responses": ("data_prep.responses", "optional: let the target regenerate the responses in conversations"),
    "prompts": ("data_prep.prompts", "1. turn documents or conversations into token ids"),
    "draft-vocab": ("data_prep.draft_vocab", "optional: choose the tokens that the head can draft"),
    "hidden-states": ("data_prep.hidden_states", "2. run the target over the prompts and store its hidden states"),
    "train": ("mtptrain.train", "3. train the head"),
    "choose-head": ("eval.choose_head", "optional: choose among the heads that training kept"),
    "acceptance": ("eval.acceptance", "4. measure the acceptance of the head"),
    "compare": ("eval.compare", "compare measurements on one page; takes paths of report.json instead of settings"),
    "study": ("eval.study", "train and measure variants of a recipe"),
    "export": ("mtptrain.export", "5. write the head for a serving engine"),
    "serving-check": ("eval.serving_check", "serve the exported head and compare the engine's counters with ours"),
    "serving-bench": ("eval.serving_bench", "measure latency and tokens/s of an engine with and without the head"),
    "gpu-check": ("eval.gpu_check", "run the checks that need a machine with GPUs"),
}


def main() -> None:
    stage = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if stage in ("-h", "--help"):
        width = max(map(len, STAGES))
        lines = [f"  {name:<{width}}  {description}" for name, (_, description) in STAGES.items()]
        print("usage: mtptrain STAGE recipe=NAME [setting=value ...]", *lines, sep="\n")
        return
    if stage not in STAGES:
        near = get_close_matches(stage, STAGES, n=1)
        advice = f"did you mean {near[0]}?" if near else "choose one of them"
        exit_with_line(f"error: stage: must be one of {', '.join(STAGES)}, but is {stage!r}; {advice}", EXIT_MISTAKE)
    del sys.argv[1]
    try:
        runpy.run_module(python_module(STAGES[stage][0]), run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # raised during imports; the program itself handles later ones
        exit_with_line("stopped by Ctrl-C before anything started", EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
