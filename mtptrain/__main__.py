"""Run one stage: `mtptrain STAGE recipe=NAME [setting=value ...]`, or `mtptrain STAGE my.yaml [setting=value ...]`.

`mtptrain run recipe=NAME` runs all that a recipe needs. `mtptrain compare` takes paths instead of settings. To use
several GPUs for one stage, start `mtptrain` with torchrun:

    torchrun --nproc-per-node 8 -m mtptrain train recipe=llama3_1_8b_mtp
"""

import os
import sys
from difflib import get_close_matches

from mtptrain.cli.stages import STAGES
from mtptrain.utils.startup import guarded_imports, prepare_process


def main() -> None:
    prepare_process()
    stage = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if stage in ("-h", "--help"):
        width = max(map(len, STAGES))
        lines = [f"  {name:<{width}}  {each.does}" for name, each in STAGES.items()]
        print("usage: mtptrain STAGE recipe=NAME|my.yaml [setting=value ...]", *lines, sep="\n")
        return
    with guarded_imports():  # after the help, which should not wait for Hydra
        from mtptrain.cli.program import run_stage
        from mtptrain.utils.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, EXIT_REFUSED, exit_with_line

    if stage not in STAGES:
        near = get_close_matches(stage, STAGES, n=1)
        advice = f"did you mean {near[0]}?" if near else "choose one of them"
        exit_with_line(f"error: stage: must be one of {', '.join(STAGES)}, but is {stage!r}; {advice}", EXIT_MISTAKE)
    del sys.argv[1]
    try:
        run_stage(stage)
    except KeyboardInterrupt:
        # between imports: during one, the process ends at once, and later the program handles it
        exit_with_line("stopped by Ctrl-C before anything started", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
