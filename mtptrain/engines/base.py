"""The interface of an engine, which each implements in a file or folder of its own. `table.ENGINES` names them all."""

import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal, is_mimo
from mtptrain.engines.process import find_python, made_python, printed_by, run_worker, warn_of_version
from mtptrain.engines.requests import (
    EngineCounts,
    EngineRun,
    Load,
    LoadResult,
    Questions,
    Requests,
    Speeds,
    accepted_within,
    load_result,
)
from mtptrain.engines.server import EngineServer
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import FILE, LENGTHS, GenerationDefaults, as_ids, as_words
from mtptrain.utils.errors import UserError

GENERATION_SETTINGS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("eos_token_ids", "tokenizer_eos_token_id", "max_new_tokens", "max_length", "min_new_tokens"),
    *("min_length", "num_beams"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "no_repeat_ngram_size", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""Settings of a target's generation_config.json, and the end of its tokenizer, which that file need not name."""


class Applied(StrEnum):
    """Whether an engine applies a setting to a request that leaves it out."""

    yes = "yes"
    if_silent = "if the file names none"
    without_drafts = "without drafts"
    refused = "refused with drafts"
    always_refused = "refused"


NOTES = {
    Applied.without_drafts: "{engine} does not apply {names}.",
    Applied.always_refused: "{engine} fails until {names} is removed from the file.",
    Applied.yes: "{engine} applies {names} to each request that leaves it out{share}.",
    Applied.refused: "With drafts it refuses sampled requests that leave out {names}.",
}
"""What the README of an export says of settings. With drafts, a setting without an entry is not applied either."""


@dataclass(frozen=True)
class ServedTarget:
    """A target that an engine serves, and how."""

    program: Path
    """The result of the engine's `find_program`."""
    target: TargetFiles
    serving: ServingConfig
    dtype: str
    """`acceptance.dtype`, or `responses.dtype`."""
    context_tokens: int
    """Number of tokens of the longest prompt, its answer and spare drafts."""
    concurrency: int
    """Maximum number of requests in flight."""


@dataclass(frozen=True, kw_only=True)
class Served(ServedTarget):
    """A target and an exported head that an engine serves, and how."""

    head_dir: Path
    """The export."""
    facts: dict[str, Any]
    """Contents of the export's `serving.json`."""
    log_dir: Path
    server_args: Sequence[str] = ()
    """`serving_bench.server_args`."""

    def log_path(self, num_drafts: int) -> Path:
        """Returns the file for what a server prints that drafts K = `num_drafts` tokens."""
        return self.log_dir / f"server_K{num_drafts}.log"


class Engine(ABC):
    """An engine that heads are exported for."""

    name: str
    """The name that users know."""
    version: str
    """The version that exports are written for."""
    formats: ClassVar[Mapping[str, type[Format]]]
    """How each head that the engine serves is exported, by the head's name."""
    has_server = True
    """Whether the engine is a server with a chat template."""
    applies: Mapping[str, Applied] = MappingProxyType({})
    """Which settings, of `GENERATION_SETTINGS` and more, the engine applies to a request that leaves them out; others
    it never does."""
    defaults: Mapping[str, float]
    """How the engine samples if neither the request nor generation_config.json says so. Temperature 0 is greedy."""
    sampling: Mapping[str, Any] = MappingProxyType({})
    """Arguments of our sampler with which it samples as the engine does, where that is not as vLLM."""
    sampled_drafts: Mapping[str, str] = MappingProxyType({})
    """The option with which the engine samples the drafts of a head, by the head's name; of others it never does."""
    has_our_penalties = False
    """Whether the engine's penalties are those of our sampler, so that its answers with them must equal ours."""
    without_them = "set them in each request"
    """How an engine is told not to apply them."""
    reads_gguf = False
    """Whether the engine serves a target as a GGUF file."""
    takes_dtype = False
    """Whether its server takes `--dtype`, without which it computes in that of config.json, and never in float32."""
    own_renderers: Mapping[str, str] = MappingProxyType({})
    """Patterns of architectures and families of whose chats it makes prompts by a program of its own, and what that is.
    """
    reads_architectures = False
    """Whether it chooses its class of a target by `architectures` of config.json, where transformers reads model_type.
    """
    package = ""
    """The module by which Python imports the engine; empty if it has the engine's name in `export.engine`."""

    def found(self, key: str) -> tuple[str, str] | None:
        """Returns the engine's version and where it is; None if it is not found. `key` is its `export.engine`.

        It is sought in the environment that `make` installs for it, and in this one, but not imported.
        """
        module = self.package or str(key)
        find = f"from importlib.metadata import *; print(version(packages_distributions()[{module!r}][0]))"
        for python in (made_python(str(key)), Path(sys.executable)):
            if python.is_file() and (version := printed_by(python, find)) is not None:
                return version, str(python)
        return None

    @abstractmethod
    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        """Yields what the engine does not serve of a target and a head that it has a format of."""

    def mode_advice(self, target: TargetFiles) -> str:
        """Returns what a README says of the chat template's arguments that a head was trained with."""
        if self.has_server:
            return f'Send them with each request, as `"chat_template_kwargs": {target.template_kwargs_json}`'
        return "Pass them to `apply_chat_template`"

    def read_by(self, target: TargetFiles) -> GenerationDefaults:
        """Returns what the target's files set that the engine reads."""
        return target.generation

    def ends_of(self, target: TargetFiles) -> list[int]:
        """Returns the tokens at which the engine ends an answer, as the target's files say."""
        own, of_tokenizer = target.own_generation.eos_token_ids, as_ids(target.tokenizer.eos_token_id)
        read = {"eos_token_ids": own, "tokenizer_eos_token_id": of_tokenizer}
        found = [token for name, tokens in read.items() if self.applies.get(name) is Applied.yes for token in tokens]
        is_silent = not found and self.applies.get("tokenizer_eos_token_id") is Applied.if_silent
        return of_tokenizer if is_silent else found

    def changes(self, generation: GenerationDefaults) -> dict[str, Any]:
        """Returns the settings that are not neutral, and those that are but replace what the engine has by itself."""
        is_read = generation.samples or "do_sample" not in self.applies
        given = {name: getattr(generation, name) for name in self.defaults if is_read}
        others = {name: value for name, value in given.items() if value not in (None, self.defaults[name])}
        return generation.changes | others

    def added_to(self, generation: GenerationDefaults) -> dict[str, Any]:
        """Returns the settings that the engine adds, with drafts, to a request that leaves all of them out, by name."""
        changes = self.changes(generation).items()
        return {name: value for name, value in changes if self.applies.get(name) is Applied.yes}

    def refused_for(self, generation: GenerationDefaults) -> list[str]:
        """Returns the settings for which the engine refuses sampled requests, with drafts, that leave them out."""
        return [name for name in generation.changes if self.applies.get(name) is Applied.refused]

    def compare(self, directory: Path, form: Format, target: TargetFiles, serving: ServingConfig) -> None:  # noqa: B027
        """Raises UserError if the engine, where it is installed, computes otherwise with an export than we do."""

    def why_it_fails(self, target: TargetFiles) -> str:
        """Returns why the head does not serve requests that leave out what the target's files set; "" if it does."""
        return ""

    def notes(self, target: TargetFiles) -> list[str]:
        """Returns what the engine makes of the target's files, unlike neutral requests here."""
        settings = self.defaults_note(self.read_by(target))
        if error := self.why_it_fails(target):
            settings = (
                f"{self.name} {self.version} does not serve the head to requests that leave out what the target's "
                f"{target.own_generation.source} sets: {error}; mend or remove the setting."
            )
        return [note for note in (settings, self.ends_note(target), *self.config_notes(target)) if note]

    def config_notes(self, target: TargetFiles) -> Iterator[str]:
        """Yields what the engine makes of keys of config.json by rules of its own."""
        engine, config, (named, own) = f"{self.name} {self.version}", target.config, target.classes
        if self.reads_architectures and own and named not in own and not is_mimo(config):
            yield (
                f"{engine} takes the class of a target from `architectures` of config.json, which names "
                f"{named or 'none'}, but transformers from its model_type, here {' or '.join(own)}: correct that key."
            )
        for pattern, how in self.own_renderers.items():
            if re.search(pattern, f"{named} {config.model_type}"):
                yield f"{engine} makes prompts of chats with this target by {how}."
        if (context := getattr(config, key := self.context_key(config))) < config.max_position_embeddings:
            yield (
                f"{engine} takes {context:,} tokens at most, by {key} of the target's config.json, not "
                f"max_position_embeddings={config.max_position_embeddings:,}: remove that key to serve longer contexts."
            )

    def context_key(self, config: PreTrainedConfig) -> str:
        """Returns the key of config.json that limits prompt and answer together."""
        return "max_position_embeddings"

    def defaults_note(self, generation: GenerationDefaults) -> str:
        """Returns what a request that leaves settings out gets from the target's files; "" if nothing."""
        sets = self.changes(generation)
        if generation.samples and self.applies.get("do_sample") is Applied.yes:
            sets = {"do_sample": True, **sets}
        how = {name: self.applies.get(name, Applied.without_drafts) for name in sets}
        named = {each: ", ".join(name for name in sets if how[name] is each) for each in NOTES}
        engine = f"{self.name} {self.version}"
        changes_tokens = any(how[name] is Applied.yes for name in sets.keys() - {*LENGTHS})
        share = ", and then accepts another share of the drafts than with neutral requests" * changes_tokens
        sentences = [f"The target's {generation.source} sets {as_words(sets)}."] * bool(sets)
        sentences += [
            NOTES[each].format(engine=engine, names=names, share=share) for each, names in named.items() if names
        ]
        if named[Applied.yes] or named[Applied.refused]:
            sentences.append(f"To switch that off, {self.without_them}.")
        if self.defaults.get("temperature") and "do_sample" not in self.applies and generation.temperature is None:
            sentences.append(f"{engine} samples a request without a temperature, at {self.defaults['temperature']}.")
        return " ".join(sentences)

    def ends_note(self, target: TargetFiles) -> str:
        """Returns at which tokens the engine and we end answers otherwise, as the target's files say; "" at none."""
        ours, theirs = target.generation.eos_token_ids, self.ends_of(target) if self.applies else ()
        engine, tokenizer, size, notes = f"{self.name} {self.version}", target.tokenizer, target.config.vocab_size, []
        texts = {token: tokenizer.decode([token]) for token in (*ours, *theirs)}
        names = [
            ", ".join(f"{each} ({texts[each] or 'no text'})" for each in some if each not in others and each < size)
            for some, others in ((ours, theirs), (theirs, ours))
        ]
        if (end := tokenizer.eos_token_id) is not None and end >= size:
            notes.append(f"No answer ends at {end}, the end of the tokenizer: the target has {size:,} tokens.")
        if not ours:
            notes.append(
                f"Answers never end here and in vLLM: {FILE} and the tokenizer name no end, and that of config.json "
                f"counts only without {FILE}."
            )
        if self.applies and names[0]:
            stop = "" if "(no text)" in names[0] else ": send it as a stop"
            notes.append(f"Answers end at {names[0]} here and in vLLM, but {engine} writes past it{stop}.")
        if names[1]:
            notes.append(f"{engine} ends answers at {names[1]} too, after which they go on here and in vLLM.")
        mend = (
            f"To mend it, let the tokenizer, config.json and {FILE} name the same ends, and convert the target again."
        )
        return " ".join([*notes, mend] if notes else [])

    def note_for_this_machine(self) -> str:
        """Returns what the command of a README needs on this machine beside the engine; "" for nothing."""
        return ""

    def check_directory(self, directory: Path, form: Format, setting: str = "export.output_dir") -> None:  # noqa: B027
        """Raises UserError if the engine would take an export in this folder for something else; most take any."""


class RunningEngine(Engine):
    """An engine that mtptrain starts or asks."""

    requests_in_flight = 1
    """Number of requests that a check keeps in flight if no setting names another."""
    one_at_a_time: Sequence[str] = ()
    """The heads with which it decodes one request at a time."""
    server: type[EngineServer] | None = None
    """The client of a running server; None if the engine has no server."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Variables that a server starts with unless users have set them."""
    advice: str
    """The advice if the engine's counters differ from ours by more than rounding."""
    why_no_drafts = ""
    """Why the engine may draft nothing without saying so, for the end of a message."""
    how_to_see_rounds = ""
    """How a server is made to report the drafts accepted in each round, for the end of a message."""

    @abstractmethod
    def find_program(self, serving: ServingConfig) -> Path:
        """Returns the engine's program, or a Python that has the engine, and warns of a version that was not tested."""

    def why_not_sampled(self) -> str:
        """Returns why the engine's answers with drafts are not to be sampled on this machine; "" if they may be."""
        return ""

    def check_target(self, target: TargetFiles) -> None:
        """Raises UserError if a file of the target is missing that the engine needs."""

    def check_bench(self, head_name: str, concurrency: int, temperature: float) -> None:
        """Raises UserError if the engine cannot run a benchmark with a head and this many requests in flight."""
        if concurrency > 1 and head_name in self.one_at_a_time:
            raise UserError(
                f"serving_bench.concurrency: must be [1] with head {head_name} in {self.name}, which decodes one "
                f"request at a time with it, but goes up to {concurrency}; set serving_bench.concurrency=[1]"
            )

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        """Returns entries of a report: what chose the type of the weights. `dtype` is None if that setting did not."""
        return {"dtype": dtype}

    def may_round(self, served: Served) -> bool:
        """Returns whether the engine rounds weights, whatever `acceptance.dtype` is."""
        return False

    def why_not_answers(self, target: TargetFiles, sampling: Mapping[str, Any]) -> str:
        """Returns why the engine's answers without drafts are not those of the target as it is sampled; "" if they are.

        Rounding apart: an engine adds numbers in another order, and in fp32 that seldom changes a token.
        """
        return ""

    def answering_command(self, served: ServedTarget, model: str) -> list[Path | str]:
        """Returns the command, without host and port, of a server of the target alone, which it calls `model`."""
        raise NotImplementedError

    @abstractmethod
    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        """Start the engine with K = `num_drafts`, and return its answers to token ids and its counters.

        An engine without a server is asked in the neutral manner alone.
        """

    def counted(self, generations: Sequence[Generation], num_drafts: int, asked: Questions) -> tuple[EngineCounts, str]:
        """Returns what the engine counts for our answers, and a sentence on its rules if they changed the counts."""
        return EngineCounts.of(generations), ""

    @abstractmethod
    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        """Run loads one after another with K = `num_drafts`; 0 decodes without drafts. Returns version and results.

        The engine may keep files for a benchmark's next K in `scratch_dir`.
        """

    def settings_for(self, speeds: Speeds, served: Served, path: Path) -> tuple[dict[str, Any], str] | None:
        """Returns the contents of a file with the fastest K at each batch size and its command, if there is one."""
        return None


class WorkerEngine(RunningEngine):
    """An engine that a worker asks in the engine's own Python, whose servers take no token ids or report no rounds."""

    advice = "export the head again"
    worker: Path
    """The worker's file, in a folder that is named as the engine in `export.engine`."""
    packages: Mapping[str, str]
    """The packages that the worker needs, and the versions that exports are written for."""
    rule: str
    """How the engine counts, as a report says it."""
    num_last = 0
    """Number of tokens at the end of an answer that never count as accepted drafts."""

    @property
    def find(self) -> str:
        """Code that prints the versions of the packages, and fails without them."""
        return f"from importlib.metadata import version; print(*map(version, {[*self.packages]}))"

    def find_program(self, serving: ServingConfig) -> Path:
        packages = " ".join(f"{name}=={version}" for name, version in self.packages.items())
        python, version = find_python(serving.program, self.worker.parent.name, self.name, packages, self.find)
        if version != (tested := " ".join(self.packages.values())):
            warn_of_version(" ".join(self.packages), tested, version, f"serving.program={python}")
        return python

    def job(self, served: Served, num_drafts: int, scratch_dir: Path) -> dict[str, Any]:
        """Returns what all jobs of the worker have. It may keep files in `scratch_dir`."""
        return {
            "target": str(served.target.directory),
            "head": str(served.head_dir),
            "method": served.facts.get("method"),
            "dtype": served.dtype,
            "num_speculative_tokens": num_drafts,
        }

    def work(self, served: Served, mode: str, job: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """Returns the packages' versions, and the worker's results for a job."""
        results = run_worker(served.program, self.worker, mode, job, self.name)
        return printed_by(served.program, self.find) or "", results

    def decode(self, served: Served, job: Mapping[str, Any], asked: Sequence[Questions]) -> list[EngineRun]:
        version, results = self.work(served, "decode", {**job, "asked": [each._asdict() for each in asked]})
        counts = [EngineCounts.of_rounds(each["accepted"], job["num_speculative_tokens"]) for each in results]
        return [
            EngineRun(version, each["tokens"], count, each["accepted"], each.get("chat_ids"))
            for each, count in zip(results, counts, strict=True)
        ]

    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        with tempfile.TemporaryDirectory(prefix="mtptrain-worker-") as directory:
            return self.decode(served, self.job(served, num_drafts, Path(directory)), asked)

    def counted(self, generations: Sequence[Generation], num_drafts: int, asked: Questions) -> tuple[EngineCounts, str]:
        return EngineCounts.of_rounds(accepted_within(generations, self.num_last), num_drafts), self.rule

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        job = self.job(served, num_drafts, scratch_dir)
        job |= {"requests": asdict(requests), "loads": [asdict(load) for load in loads]}
        version, results = self.work(served, "load", job)
        return version, [load_result(each, num_drafts) for each in results]
