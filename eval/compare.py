"""Compares reports of `mtptrain acceptance` in a table and on a page with plots.

    mtptrain compare runs/a runs/b --out compare.html

Takes directories of runs or of `acceptance.output_dir`, and paths of `report.json`. The reports must have the same
prompts, target and settings of decoding (`MUST_BE_EQUAL`). Tokens/s are shown only if `acceptance.batch_size`,
`acceptance.batch_tokens`, the number of ranks and the device are the same too. `prompts_sha256` covers only the user's
turns of a conversation: the prompts of later turns also contain the target's own answers, which may differ from run to
run at a temperature above 0 or in bf16.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtptrain.cli import tables
from mtptrain.stage_dir import require
from mtptrain.utils.errors import UserError, errors_as_lines
from mtptrain.utils.files import read_sealed, refuse_overwriting, write_text

from .report_page import TITLE, cell_columns, drafters_of, has_comparable_speeds, render_page, table_row

MUST_BE_EQUAL = {
    "prompts_sha256": "prompts: its acceptance.prompts_file, or its prompts and settings of acceptance",
    "target_weights_sha256": "target",
    **dict.fromkeys(
        ("num_speculative_tokens", "temperature", "top_p", "top_k", "sample_drafts", "max_new_tokens", "dtype"),
        "setting",
    ),
}
"""The entries that two reports must have in common, each with its cause."""
TRAINED = {"trained on": ("train_tokens", ","), "seed": ("train_seed", "d")}
"""Columns that say how a head was trained, where a report has them, and their format."""


@errors_as_lines()
def main() -> None:
    parser = argparse.ArgumentParser(prog="mtptrain compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "reports", type=Path, nargs="+", help="a run's directory, an acceptance.output_dir, or a report.json"
    )
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page to write")
    args = parser.parse_args()
    if args.out.suffix == ".json":
        raise UserError(f"--out: must be an HTML file, but is {args.out}; choose another name")
    refuse_overwriting(args.out, "--out", (TITLE,))
    reports = read_reports(args.reports)
    print_table(reports)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, render_page(reports))
    print(f"plots: {args.out}")


def read_reports(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Reads the reports by the paths that were given."""
    reports: dict[str, dict[str, Any]] = {}
    files: set[Path] = set()
    for place in paths:
        path = place
        if place.is_dir():
            in_output_dir = place / "report.json"
            in_run_dir = place / "acceptance/report.json"
            path = in_output_dir if in_output_dir.is_file() else require(in_run_dir, "mtptrain acceptance")
        required = ("baselines", "speed", "intervals", *MUST_BE_EQUAL)
        report = read_sealed(path, "run mtptrain acceptance again, and name its report.json", required)
        if path.resolve() in files:
            raise UserError(f"{path}: each report must be given once, but this one is given twice; remove one")
        files.add(path.resolve())
        reports[str(place)] = report
    (first_path, first), *others = reports.items()
    for other_path, report in others:
        for name in MUST_BE_EQUAL:
            if report[name] != first[name]:
                raise UserError(
                    f"{other_path}: {name} must be {first[name]!r} as in {first_path}, but is {report[name]!r}; "
                    f"measure one of them again with the other's {MUST_BE_EQUAL[name]}"
                )
    return reports


def print_table(reports: Mapping[str, Mapping[str, Any]]) -> None:
    drafters, has_speed = drafters_of(reports), has_comparable_speeds(reports)
    num_depths = max(len(each["acceptance_rate_at"]) for each in drafters.values())
    rows = []
    for name, each in drafters.items():
        row = table_row(each, num_depths, has_speed)
        trained = ("" if each.get(key) is None else f"{each[key]:{form}}" for key, form in TRAINED.values())
        rows.append([name, row["length"], row["interval"], *row["cells"], *trained])
    columns = ("", "length", "95 %", *cell_columns(num_depths), *TRAINED)
    tables.print_table("Acceptance", columns, rows, markup=False, emoji=False)


if __name__ == "__main__":
    main()
