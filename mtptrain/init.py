"""Writes a YAML file with the settings of a run: `mtptrain init TARGET [DATA ...]`.

It asks nothing: the recipe, the head and the engine are those that fit the target and this machine, and what may be
worth a change is a comment. `mtptrain plan my.yaml` and `mtptrain run my.yaml` then take the file.
"""

import argparse
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from mtptrain.config import RECIPES
from mtptrain.engines.table import ADVISED, engine_of, heads_served, running_engine
from mtptrain.settings.evaluation import ServingConfig, ServingEngine
from mtptrain.settings.hardware import this_machine
from mtptrain.target.families import read_target_config
from mtptrain.target.gguf import is_gguf
from mtptrain.target.hub import config_dir
from mtptrain.utils.errors import UserError, errors_as_lines

DATA_FILES = (".jsonl", ".json", ".parquet", ".gz")
HEADS = ("mtp", "eagle3")
"""The heads to start with, the first that an engine serves with the target."""
KNOWN = {
    ("llama", 576, 30, 49_152): "smollm2_135m",
    ("llama", 2048, 16, 128_256): "llama3_2_1b",
    ("llama", 4096, 32, 128_256): "llama3_1_8b",
    ("llama", 8192, 80, 128_256): "llama3_3_70b",
    ("qwen3", 4096, 36, 151_936): "qwen3_8b",
    ("qwen3", 5120, 64, 151_936): "qwen3_32b",
    ("qwen3_moe", 2048, 48, 151_936): "qwen3_30b_a3b",
    ("deepseek_v2", 2048, 27, 102_400): "deepseek_v2_lite",
    ("gemma3_text", 640, 18, 262_144): "gemma3_270m",
}
"""Targets of recipes by family, hidden size, layers and tokens, which those trained further from them share."""
TEXT = """\
# Settings of a run, nested as in recipes/; those that are left out are the recipe's.
#   mtptrain plan {file}    # disk, memory, time; runs nothing
#   mtptrain run {file}     # everything up to the export; finished stages are passed over
# `mtptrain STAGE --help` says what each setting means. NAME=VALUE after the file wins.
recipe: {recipe} # {known}
hardware: auto # {hardware}: {reason}
run_dir: runs/{name}

target:
  path: {target} # {family}, hidden size {width}

prompts:
  source: {source} # {meaning}
  paths: {paths} # {data}

head:
  # {engine} serves {served}
  name: {head}{needed}
  # start_from_target: true # learns faster at first

train:
  # lr: {lr:.1e} # what the 3e-4 of recipe mtp for a width of 4096 comes to at this width
  # epochs: 2 # three and more for a few thousand questions

export:
  engine: {engine} # engines found here: {found}
"""
SOURCES = {
    "responses": "the target answers these questions; `conversations` keeps given answers",
    "text_files": "every token of these files is learned",
}


@errors_as_lines()
def main() -> None:
    parser = argparse.ArgumentParser(prog="mtptrain init", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="a model's directory, GGUF file or name on the hub, or `demo`")
    parser.add_argument("data", metavar="DATA", nargs="*", help="files of conversations, names on the hub, or folders")
    parser.add_argument("--out", type=Path, default=Path("my.yaml"), help="the file to write (default: my.yaml)")
    args = parser.parse_args()
    if args.out.exists() or args.out.suffix not in (".yaml", ".yml"):
        found = "exists" if args.out.exists() else "has another name"
        raise UserError(f"--out: must be a new file NAME.yaml, but {args.out} {found}; choose another with --out")
    text, missing = settings_for(args.target, args.data, args.out)
    with args.out.open("x") as file:
        file.write(text)
    print(f"{args.out}: read it, then `mtptrain plan {args.out}` and `mtptrain run {args.out}`{missing}")


def settings_for(path: str, data: list[str], file: Path) -> tuple[str, str]:
    """Returns the text of the file for a target, and a line that says how to install the engine if it is missing."""
    for each in data:
        if Path(each).suffix in DATA_FILES and not Path(each).is_file():
            raise UserError(f"DATA: must be a file, a folder or a name on the hub, but {each} is no file; correct it")
    config = read_target_config(config_dir(path, setting="TARGET"))
    missing = missing_engines()
    found = [str(each) for each in ServingEngine if each not in missing]
    engine, head, served = engine_and_head(config, found, is_gguf(path))
    machine = this_machine()
    paths = data or sorted(str(each) for each in Path().glob("*.jsonl"))
    source = "text_files" if paths and all(Path(each).is_dir() for each in paths) else "responses"
    sizes = config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size
    recipe = f"{KNOWN.get(sizes)}_{head}"
    is_known = Path(RECIPES, f"recipe/{recipe}.yaml").is_file()
    name = re.sub(r"[^\w.-]", "_", Path(path).stem if is_gguf(path) else Path(path).name)
    text = TEXT.format(
        file=file,
        recipe=recipe if is_known else "mtp",
        known="made for a target of these sizes" if is_known else "for any target",
        hardware=machine.hardware,
        reason=machine.reason,
        name=f"{name}_{head}",
        target=json.dumps(path),
        family=config.model_type,
        width=config.hidden_size,
        source=source,
        meaning=SOURCES[source],
        paths=json.dumps(paths),
        data="as given" if data else "found here" if paths else "your questions, such as chats.jsonl; none found here",
        head=head,
        engine=engine,
        served=", ".join(sorted(served)),
        needed="".join(f"\n  {name}: false # as {engine} needs" for name in served[head]),
        lr=3e-4 * 4096 / config.hidden_size,
        found=", ".join(found) or "none",
    )
    line = f"\nA run needs no engine. To serve its head by {engine}: {missing[engine]}" if engine in missing else ""
    return text, line


def missing_engines() -> dict[str, str]:
    """Returns why engines are not found on this machine and how to install them, by name."""
    missing = {}
    for each in ServingEngine:
        try:
            with warnings.catch_warnings(action="ignore"):
                running_engine(each).find_program(ServingConfig())
        except UserError as error:
            missing[str(each)] = str(error)
    return missing


def engine_and_head(
    target: PreTrainedConfig, found: Sequence[str], is_gguf: bool
) -> tuple[str, str, dict[str, list[str]]]:
    """Returns an engine and a head that it serves with the target, and all `heads_served`.

    Engines that this machine has come first, and with a GGUF file those of them that read it.
    """
    keys = [*found, *(str(each) for each in ADVISED if each not in found)]
    for key in sorted(keys, key=lambda key: (key not in found, is_gguf and not engine_of(key).reads_gguf)):
        served = heads_served(key, target)
        for head in HEADS:
            if head in served:
                return key, head, served
    raise UserError(
        f"TARGET: must be a model that an engine serves with a head, but {target.model_type} is none; choose another"
    )
