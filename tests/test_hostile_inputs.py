"""Programs refuse hostile input in one line, before they write anything: damaged targets, data, servers and settings.

A case damages a copy of a working target or its data, or only overrides settings. Progress bars aside, stderr must then
be one line that begins with `error: ` and names what must hold.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.files import file_sha256, save_tensors
from tests.conftest import GENERATION_TEMPLATE, TINY_SETTINGS, run_program, write_text_files
from tests.data_prep.speaking import fake_server

NESTED, GARBAGE, DIGITS = b"[" * 100_000, b"{\xff\xfe}", b'{"a": ' + b"1" * 5000 + b"}"
PROGRESS = re.compile(r"\s*|.*(\d%\|.*|\[\d\d:\d\d.*\])(\x1b\[A)?")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
QUESTION = b'{"id": "a", "text": "hi"}'
PROMPTS, STATES, ACCEPTANCE, RESPONSES, TRAIN = (
    "data_prep.prompts",
    "data_prep.hidden_states",
    "eval.acceptance",
    "data_prep.responses",
    "mtptrain.train",
)


@dataclass(frozen=True)
class Place:
    """A working target, data and run directory of one test, which a case may damage."""

    directory: Path

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def data(self) -> Path:
        return self.directory / "data"


Damage = Callable[[Place], list[str]]
"""Damages something and returns the overrides that use it."""


@pytest.fixture
def place(tmp_path: Path, tiny_target: Path) -> Place:
    shutil.copytree(tiny_target, tmp_path / "target")
    (tmp_path / "data").mkdir()
    return Place(tmp_path)


def errors(stderr: str) -> list[str]:
    """Returns the lines of stderr that are not progress bars."""
    return [line for line in re.split(r"[\r\n]+", stderr) if not PROGRESS.fullmatch(line)]


def refused(place: Place, program: str, overrides: list[str], message: str, code: int = 1) -> None:
    """Run a program; check its exit code, its one line, and that it has written nothing."""
    ran = run_program(
        program, *TINY_SETTINGS, f"target.path={place.target}", f"run_dir={place.directory}/run", *overrides
    )
    lines = errors(ran.stderr)
    assert ran.returncode == code, ran.stderr[-3000:]
    assert len(lines) == 1 and "Traceback" not in ran.stderr, ran.stderr[-3000:]
    assert re.match(rf"error: {message}", lines[0]), lines[0]
    written = [path for path in (place.directory / "run").rglob("*") if path.is_file() and "wandb" not in path.parts]
    assert written == []


def text_files(place: Place) -> list[str]:
    return [f"prompts.paths=[{write_text_files(place.data / 'files')}]"]


def in_target(name: str, content: bytes) -> Damage:
    """Replaces a file of the target."""

    def damage(place: Place) -> list[str]:
        (place.target / name).write_bytes(content)
        return text_files(place)

    return damage


def in_config(**settings: object) -> Damage:
    """Changes settings of the target's config.json; `...` removes one."""

    def damage(place: Place) -> list[str]:
        path = place.target / "config.json"
        content = {**json.loads(path.read_text()), **settings}
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
        return text_files(place)

    return damage


def in_weights(change: Callable[[bytes], bytes]) -> Damage:
    def damage(place: Place) -> list[str]:
        path = place.target / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        return []

    return damage


def integer_weights(place: Place) -> list[str]:
    weights = load_file(place.target / "model.safetensors")
    save_tensors(place.target / "model.safetensors", {name: tensor.to(torch.int8) for name, tensor in weights.items()})
    return []


def template(text: str) -> Damage:
    def damage(place: Place) -> list[str]:
        (place.target / "chat_template.jinja").write_text(text)
        return conversations(json.dumps(CHAT).encode())(place)

    return damage


def conversations(*lines: bytes, name: str = "chats.jsonl") -> Damage:
    def damage(place: Place) -> list[str]:
        (place.data / name).write_bytes(b"\n".join(lines) + b"\n")
        return ["prompts.source=conversations", f"prompts.paths=[{place.data / name}]"]

    return damage


def parquet(rows: int, flipped: bool) -> Damage:
    def damage(place: Place) -> list[str]:
        path = place.data / "chats.parquet"
        schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
        pq.write_table(pa.Table.from_pylist([CHAT] * rows, schema=schema), path)
        content = bytearray(path.read_bytes())
        if flipped:
            content[-6] ^= 0xFF  # in the footer's length
        path.write_bytes(content)
        return ["prompts.source=conversations", f"prompts.paths=[{path}]"]

    return damage


def settings(*overrides: str) -> Damage:
    return lambda place: [*text_files(place), *overrides]


def prompts_file(content: bytes) -> Damage:
    """Prompts for `eval.acceptance`, with a random head."""

    def damage(place: Place) -> list[str]:
        (place.data / "prompts.jsonl").write_bytes(content + b"\n")
        return [f"acceptance.prompts_file={place.data}/prompts.jsonl", *random_head(place)]

    return damage


def random_head(place: Place) -> list[str]:
    config = MtpHead.Config()
    state = build_head(config, read_target_config(place.target)).state_dict()
    save_head(place.data / "head", state, config, {TARGET_WEIGHTS: weights_fingerprint(place.target)})
    return [f"head.init_from={place.data}/head"]


def unanswered(place: Place) -> list[str]:
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    return conversations(*(json.dumps(row).encode() for row in rows))(place)


def output_file(place: Place) -> list[str]:
    (place.data / "file").write_text("a file")
    return [*prompts_file(QUESTION)(place), f"acceptance.output_dir={place.data}/file"]


CASES: dict[str, tuple[str, Damage, str]] = {
    # Targets
    "config garbage": (PROMPTS, in_target("config.json", GARBAGE), r"\S+/config\.json: must be UTF-8, but is not"),
    "config nested": (PROMPTS, in_target("config.json", NESTED), r"\S+/config\.json: must be JSON, but is nested too"),
    "config digits": (
        PROMPTS,
        in_target("config.json", DIGITS),
        r"\S+/config\.json: must be JSON, but is not \(Exceeds",
    ),
    "no model_type": (PROMPTS, in_config(model_type=...), r"\S+/config\.json: model_type must be one of llama, .*None"),
    "negative size": (
        PROMPTS,
        in_config(hidden_size=-64),
        r"\S+/config\.json: hidden_size must be at least 1, but",
    ),
    "uneven heads": (
        PROMPTS,
        in_config(num_key_value_heads=3),
        r"\S+/config\.json: num_attention_heads must be a multiple of num_key_value_heads",
    ),
    "tokenizer garbage": (PROMPTS, in_target("tokenizer.json", GARBAGE), r"\S+/tokenizer\.json: must be UTF-8, but is"),
    "tokenizer unreadable": (
        PROMPTS,
        in_target("tokenizer.json", b"{}"),
        r"\S+/target: the tokenizer must be readable",
    ),
}
TEMPLATES = {
    "TypeError": "{{ 'a' + 1 }}",
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "OverflowError": "{{ 'a' * 9999999999999999999999 }}",
    "MemoryError": "{{ 'a' * 4611686018427387904 }}",
}
for kind, text in TEMPLATES.items():
    CASES[kind] = (PROMPTS, template(text), rf"target\.path: the chat template of \S+/target must .* reports: {kind}")
CASES |= {
    # Data
    "data nested": (PROMPTS, conversations(NESTED), r"\S+/chats\.jsonl:1: must be JSON, but is nested too deep"),
    "data digits": (PROMPTS, conversations(DIGITS), r"\S+/chats\.jsonl:1: must be JSON, .*Exceeds the limit"),
    "parquet flipped": (PROMPTS, parquet(9, True), r"\S+/chats\.parquet: must be"),
    "parquet without rows": (PROMPTS, parquet(0, False), r"\S+/chats\.parquet: must be a parquet file with rows"),
    "no answers": (
        PROMPTS,
        unanswered,
        r"prompts\.paths: conversations must have an assistant turn to learn from",
    ),
    # Settings
    "seed too large": (PROMPTS, settings("seed=99999999999999999999"), "seed: must "),
    "unknown head.name": (PROMPTS, settings("head.name=foo"), r"head\.name: must be one of mtp, .*, but is 'foo'"),
    "batch too large": (
        PROMPTS,
        settings("train.batch_tokens=99999999999999999999"),
        r"train\.batch_tokens: must be below 2\*\*63, but is 9",
    ),
    "seed negative": (PROMPTS, settings("seed=-1"), "seed: must "),
    "empty run_dir": (PROMPTS, settings("run_dir="), "run_dir: must "),
    "drafts beyond the context": (
        ACCEPTANCE,
        lambda place: [*prompts_file(QUESTION)(place), "acceptance.num_speculative_tokens=5000"],
        r"acceptance\.num_speculative_tokens: must be at most \d+, .* context of 512 tokens, but is 5000",
    ),
    "output_dir is a file": (ACCEPTANCE, output_file, r"acceptance\.output_dir: must name a directory, but is"),
    "prompts not UTF-8": (ACCEPTANCE, prompts_file(GARBAGE), r"\S+prompts\.jsonl.*UTF-8"),
    "prompt without tokens": (
        ACCEPTANCE,
        prompts_file(b'{"id": "a", "input_ids": []}'),
        r"\S+prompts\.jsonl: id a: must hold at least one token, but is empty",
    ),
    "prompt too long": (
        ACCEPTANCE,
        prompts_file(b'{"id": "b", "input_ids": [%s1]}' % (b"1, " * 600)),
        r"\S+prompts\.jsonl: id b: prompt and answer must fit",
    ),
    "prompts nested": (ACCEPTANCE, prompts_file(NESTED), r"\S+prompts\.jsonl.*nested too deep"),
    "prompts surrogate": (ACCEPTANCE, prompts_file(rb'{"id": "a", "text": "\ud800"}'), r"\S+prompts\.jsonl.*surrogate"),
    "category surrogate": (
        ACCEPTANCE,
        prompts_file(rb'{"id": "a", "text": "hi", "category": "\ud800"}'),
        r"\S+prompts\.jsonl.*surrogate",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_refused_in_one_line_and_nothing_is_written(place: Place, case: str) -> None:
    program, damage, message = CASES[case]
    refused(place, program, damage(place), message)


INCOMPLETE = r"\S+/model\.safetensors: must be a complete safetensors file"


def flipped_after_download(place: Place) -> list[str]:
    path = place.target / "model.safetensors"
    metadata = place.target / ".cache/huggingface/download/model.safetensors.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"{'a' * 40}\n{file_sha256(path)}\n0\n")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    return ["target.verify=true"]


WEIGHTS: dict[str, tuple[Damage, str]] = {
    "empty": (in_weights(lambda content: b""), INCOMPLETE),
    "garbage": (
        in_weights(lambda content: GARBAGE * 99),
        INCOMPLETE,
    ),
    "truncated": (in_weights(lambda content: content[:-99]), INCOMPLETE),
    "header length": (
        in_weights(lambda content: content[:6] + b"\x7f" + content[7:]),
        INCOMPLETE,
    ),
    "flipped byte": (flipped_after_download, r"\S+/model\.safetensors: must have the hub's sha256"),
    "integers": (integer_weights, r"target\.path: model\.embed_tokens must be unquantised"),
    "index garbage": (in_target("model.safetensors.index.json", GARBAGE), r"\S+index\.json: must be UTF-8"),
    "index outside": (
        in_target("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/a.safetensors"}}'),
        r"\S+index\.json: must name files in its own directory",
    ),
    "vocabulary": (
        in_config(vocab_size=1000),
        r"\S+: model\.embed_tokens\.weight must have the shape",
    ),
    "unknown quantisation": (
        in_config(quantization_config={"quant_method": "nope"}),
        r"target\.path: transformers must be able to run .*/config\.json describes, but reports .*nope",
    ),
    "fewer layers": (in_config(num_hidden_layers=1), r"\S+/target: the weights must have num_hidden_layers=1"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_damaged_weights_are_refused_before_anything_is_extracted(
    place: Place, tiny_run: tuple[Path, tuple[str, ...]], case: str
) -> None:
    """Prompts were made with the whole target, so only its weights are wrong."""
    shutil.copytree(tiny_run[0] / "prompts", place.directory / "prompts")
    damage, message = WEIGHTS[case]
    overrides = [*damage(place), f"run_dir={place.directory}/other"]
    shutil.copytree(place.directory / "prompts", place.directory / "other/prompts")
    before = sorted((place.directory / "other").rglob("*"))
    refused(place, STATES, overrides, message)
    assert [path for path in sorted((place.directory / "other").rglob("*")) if path not in before] == []


def test_a_draft_vocabulary_that_is_missing_is_told_before_the_store_is_read(
    place: Place, tiny_run: tuple[Path, tuple[str, ...]]
) -> None:
    shutil.copytree(tiny_run[0] / "prompts", place.directory / "other/prompts")
    overrides = ["head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=64"]
    refused(
        place, TRAIN, [*overrides, f"run_dir={place.directory}/other"], r"\S*draft_vocab\S*: .*data_prep\.draft_vocab"
    )
    assert not (place.directory / "other/train").exists()


@pytest.fixture
def hostile_server() -> Iterator[Any]:
    with fake_server() as server:
        yield server


def without_end() -> Iterator[bytes]:
    while True:
        yield b" "
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "reason"),
    [([NESTED], "JSON"), ([DIGITS], "JSON"), (None, "timed out")],
    ids=["nested", "digits", "endless"],
)
def test_a_servers_hostile_answer_fails_its_conversation_by_name(
    place: Place, hostile_server: Any, body: list[bytes] | None, reason: str
) -> None:
    hostile_server.behave = lambda request: (200, without_end() if body is None else iter(body))
    (place.data / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    overrides = ["prompts.source=responses", f"prompts.paths=[{place.data}/chats.jsonl]", "responses.dtype=float32"]
    more = [
        f"responses.url={hostile_server.url}",
        "responses.max_retries=0",
        "responses.max_new_tokens=16",
        "responses.timeout_s=2",
    ]
    ran = run_program(RESPONSES, *overrides, *more, f"target.path={place.target}", f"run_dir={place.directory}/run")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    (line,) = errors(ran.stderr)
    assert re.match(r"error: \S+/responses: at least one conversation must get a response, but none did", line)
    (failure,) = (place.directory / "run/responses/failures.jsonl").read_text().splitlines()
    assert reason in failure


@pytest.mark.parametrize("row", [{"category": "$x_$ \\frac"}, {"category": "<script>"}])
def test_a_category_of_any_text_is_measured_and_a_damaged_report_replaced(place: Place, row: dict[str, str]) -> None:
    (place.directory / "run/acceptance").mkdir(parents=True)
    (place.directory / "run/acceptance/report.json").write_bytes(NESTED)
    content = json.dumps({"id": "a", "text": "hi", **row}).encode()
    overrides = [*prompts_file(content)(place), "acceptance.top_p=1e-9", "acceptance.temperature=1.0"]
    ran = run_program(
        ACCEPTANCE, *TINY_SETTINGS, f"target.path={place.target}", f"run_dir={place.directory}/run", *overrides
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    report = json.loads((place.directory / "run/acceptance/report.json").read_text())
    assert report["prompts"] == 1 and (place.directory / "run/acceptance/report.html").is_file()


def test_a_chat_template_that_never_ends_is_stopped(place: Place) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + GENERATION_TEMPLATE
    refused(place, PROMPTS, template(loop)(place), r"the chat template of \S+/target must render a conversation within")
