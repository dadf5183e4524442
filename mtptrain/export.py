"""Stage 5: writes the head to a directory that a serving engine can load.

Reads `run_dir/train/best/` (`last/` if no head was measured, or the head of `head.init_from` if nothing was trained),
the target's embeddings, final norm and lm_head, and the `report.json` of `mtptrain acceptance` if it exists. Writes
`run_dir/export/<engine>/`: weights, `config.json`, a README with the launch command and the measured acceptance, and
`serving.json` for programs.

    mtptrain export recipe=quickstart export.engine=vllm
    mtptrain export recipe=quickstart export.hub=USER/NAME  # also uploads it
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCardData
from transformers import PreTrainedTokenizerBase

from mtptrain.config import Baseline, PipelineConfig, PromptSource
from mtptrain.decoding.export_proof import prove_equal_proposals
from mtptrain.engines.base import Engine
from mtptrain.engines.exports import README, SERVING, export_dir
from mtptrain.engines.format import Format
from mtptrain.engines.table import engine_of, format_for
from mtptrain.engines.verdict import why_not_better
from mtptrain.heads.base import Head, Tensors
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, first_misfit
from mtptrain.init_from.start import trained_or_initial_head
from mtptrain.run_dir import Run
from mtptrain.settings.evaluation import ExportDtype
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.generation import as_words
from mtptrain.target.hub import DEMO
from mtptrain.target.served_chats import chats_elsewhere
from mtptrain.target.served_tokens import texts_elsewhere
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.figures import shown
from mtptrain.utils.files import read_json, read_sealed, write_sealed, write_text
from mtptrain.utils.masking import hide_home

IMAGE_NOTE = (
    "The target also reads images. The head was trained and measured on text alone, so prompts with images may have "
    "fewer drafts accepted."
)
MEASURE_AGAIN = "run mtptrain acceptance again"
HOME_NOTE = "\nIn these paths, `~` is the home directory of whoever wrote the export: write it out in full.\n"


def main(config: PipelineConfig) -> None:
    export(Run(config))


def export(run: Run) -> None:
    """Export the head of a run, and put the export in place once it proposes the same tokens as the head."""
    config = run.config
    stage_dir = export_dir(config)
    stage_dir.check_replaceable()
    output_dir = stage_dir.path
    form = format_for(config.export.engine, run.head, run.target.config, run.target.gguf)
    engine = engine_of(config.export.engine)
    engine.check_directory(output_dir, form)
    if config.export.hub is not None:
        engine.check_directory(Path("/", download_dir(config.export.hub)), form, "export.hub")
    dtype, chosen = None, config.export.dtype
    if chosen is not ExportDtype.auto:
        dtype = torch.float32 if chosen is ExportDtype.q8_0 else getattr(torch, chosen)
    trained = trained_or_initial_head(run.stage_dir("train"), run.head, run.target, dtype, torch.device("cpu"))
    if chosen is ExportDtype.q8_0:
        form.is_quantised = True
        trained.head.load_state_dict(form.rounded(trained.head.state_dict()))
    if config.export.only_if_better and (why := why_not_better(compared(run, trained.sha256))):
        print(f"not exported: {why}; export.only_if_better=false exports it nevertheless")
        return
    path = config.acceptance_dir / "report.json"
    report = read_sealed(path, MEASURE_AGAIN) if path.is_file() else {}
    if report.get("head_sha256") != trained.sha256 or report["acceptance_length"] is None:
        report = {}

    # Write beside the final directory, so that an unfinished or unverified export never gets the final name.
    with stage_dir.replaced(config) as directory:
        write_head(directory, form, trained.head.state_dict())
        form.add_target(directory, run.target.directory)
        check_tensors(directory, form)
        parts = load_frozen_parts(run.target.directory).to(torch.device("cpu"), torch.float32)
        num_proposed = prove_equal_proposals(parts, trained.head, reload_head(directory, form))
        engine.compare(directory, form, run.target, config.serving)
        facts = read_json(head_json) if (head_json := trained.directory / "head.json").is_file() else {}
        write_text(directory / README, readme(run, form, report, output_dir, facts.get("data", {})))
        hide_homes(directory)
        written = {
            "engine": config.export.engine,
            "architecture": form.architecture,
            "method": form.method,
            "speculative_settings": form.speculative_settings,
            "holds_target": form.holds_target,
            "head_sha256": trained.sha256,
            TARGET_WEIGHTS: run.target.weights_sha256,
        }
        own = ["config.json"] if form.has_config_json else []
        write_sealed(directory / SERVING, written, [*own, form.weights_name])
    print(f"the reloaded head proposes the same {num_proposed:,} tokens")
    print(f"written to {output_dir}; its README.md says how to serve it")
    if config.export.hub is not None:
        print(f"uploaded to {upload(output_dir, config.export.hub)}")


def download_dir(hub: str) -> Path:
    """Returns the folder into which the README of a published export says to download it."""
    return Path(hub.rpartition("/")[2])


def upload(directory: Path, hub: str) -> str:
    """Upload an export, and return its address. The hub keeps files that it has already, so a second try goes on."""
    with refusing(
        f"export.hub: the hub must take {hub}, which a token with the right to write there needs",
        f"log in with `hf auth login` or correct the name; the export is kept in {directory}, and the same command "
        "goes on with the upload",
        "the hub",
    ):
        api = HfApi()
        api.create_repo(hub, exist_ok=True)
        api.upload_folder(repo_id=hub, folder_path=directory, commit_message="Upload a draft head by mtptrain")
        return f"{api.endpoint}/{hub}"


def model_card(config: PipelineConfig, target: TargetFiles) -> str:
    """Returns the lines before the README of a published export, by which the hub files it."""
    base_model = None if target.path == DEMO or Path(target.path).exists() else target.path
    tags = ["speculative-decoding", "draft-model", config.head.name, str(config.export.engine)]
    card = ModelCardData(base_model=base_model, library_name="mtptrain", pipeline_tag="text-generation", tags=tags)
    return f"---\n{card.to_yaml()}\n---"


def write_head(directory: Path, form: Format, state: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    form.write(directory, {name: tensor.contiguous() for name, tensor in form.tensors(state).items()})


def check_tensors(directory: Path, form: Format) -> None:
    """Raises UserError for a wrong name or shape: engines silently keep random values for a missing tensor."""
    with torch.device("meta"):
        state = build_head(form.head, form.target).state_dict()
    if misfit := first_misfit(form.tensors(state), form.read(directory)):
        name, expected, found = misfit
        raise UserError(
            f"export: {form.weights_name}: {name} must be {expected}, but is {found}; the engine would serve random "
            "weights; the export was not put in place; report this with the run's stage.json"
        )


def reload_head(directory: Path, form: Format) -> Head:
    """Returns the head that the weights in the directory give after conversion back to our format."""
    head = build_head(form.head, form.target)
    head.load_state_dict(form.state(form.read(directory)))
    return head.eval()


def measured_acceptance(report: Mapping[str, Any], option: str | None) -> str:
    """Returns what the README says about the head's acceptance. The engine samples its drafts with the option."""
    if not report:
        return "Not measured: run `mtptrain acceptance` and export again."
    how = f"add {option}" if option else "the engine does not do that, and will accept another share"
    rates = ", ".join(f"{rate:.3f}" for rate in report["acceptance_rate_at"])
    served = ""
    for name, settings in report.get("as_served", {}).items():
        length = shown(report["baselines"][name]["acceptance_length"])
        served += f" Requests that leave settings out ({as_words(settings)}): {length}."
    return (
        f"Acceptance length {report['acceptance_length']:.3f} (bonus token included), rate by position {rates}: K = "
        f"{report['num_speculative_tokens']}, temperature {report['temperature']:g}, {report['prompts']} prompts, "
        f"{report['dtype']}.{served}" + (f" Its drafts were sampled: {how}." if report.get("sample_drafts") else "")
    )


def compared(run: Run, head_sha256: str) -> dict[str, Any]:
    """Returns the report in which a head is measured beside the one that it started from."""
    path = run.config.acceptance_dir / "report.json"
    report: dict[str, Any] = read_sealed(path, MEASURE_AGAIN) if path.is_file() else {}
    if report.get("head_sha256") != head_sha256 or Baseline.initial not in report.get("baselines", {}):
        raise UserError(
            f"{path}: must have this head and the one of head.init_from (export.only_if_better=true), but has not; "
            f"{MEASURE_AGAIN}"
        )
    return report


def readme(run: Run, form: Format, report: Mapping[str, Any], output_dir: Path, data: Mapping[str, Any]) -> str:
    config, engine, is_chat = run.config, engine_of(run.config.export.engine), run.config.prompts.source.is_chat
    served = form.target_name(run.target.name_for_engines)
    hub = config.export.hub
    place = output_dir.resolve() if hub is None else download_dir(hub)
    download = "" if hub is None else f"hf download {hub} --local-dir {place}\n"
    launch = form.launch(served, place, config.acceptance.num_speculative_tokens)
    launch += f" --dtype {report['dtype']}" if report and engine.takes_dtype else ""
    parts = [
        *([] if hub is None else [model_card(config, run.target)]),
        f"# Draft head for `{config.target.path}`",
        f"Head `{config.head.name}` for {config.export.engine} {engine.version}, as "
        f"`{form.architecture}`. Other versions may read it differently.",
        f"```\n{download}{launch}\n```",
        *filter(None, [engine.note_for_this_machine()]),
        measured_acceptance(report, engine.sampled_drafts.get(config.head.name)),
        *([data_note(data, run.target.tokenizer)] if data else []),
        *engine.notes(run.target),
        *form.notes(),
        *([mode_note(run.target, engine)] if is_chat else []),
        *(chats_elsewhere(run.target) if is_chat else texts_elsewhere((), run.target)),
        *([IMAGE_NOTE] if run.target.has_image_encoder else []),
    ]
    return "\n\n".join(parts) + "\n"


def data_note(data: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    note = (
        f"Trained on {data['documents']:,} documents ({data['source']}) with {data['tokens']:,} tokens, of which "
        f"{data['supervised_tokens']:,} are supervised. The longest has {data['longest_document_tokens']:,} tokens; in "
        "longer contexts fewer drafts may be accepted."
    )
    if PromptSource(data["source"]).is_chat:
        ends = (f"`{tokenizer.decode([int(each)])}` ({each})" for each in data["answers_end_with"])
        note += f" Most answers end with {' or '.join(ends)}, where a server must stop."
    if data["sampling"]:
        note += f" The target wrote the answers, sampled with {as_words(data['sampling'])}."
    return note


def mode_note(target: TargetFiles, engine: Engine) -> str:
    if not target.template_kwargs:
        return "Trained on chats in the mode that the target's chat template has by default."
    return (
        f"Trained on chats with the chat template's arguments `{target.template_kwargs_json}`. In another mode, the "
        f"target writes other text and accepts fewer drafts. {engine.mode_advice(target)}."
    )


def hide_homes(directory: Path) -> None:
    """Write `~` in place of the user's home in every text that names paths, since an export may be published."""
    optional = ("config.json", "tokenizer_config.json", "generation_config.json")
    for name in (README, *(each for each in optional if (directory / each).is_file())):
        text = (directory / name).read_text(encoding="utf-8")
        hidden = hide_home(text)
        if hidden != text:
            write_text(directory / name, hidden + (HOME_NOTE if name == README else ""))
