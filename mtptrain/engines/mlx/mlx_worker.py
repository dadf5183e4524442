"""Decodes prompts inside the Python of mlx-lm and mlx-vlm, for `engine.py`.

    python mlx_worker.py decode job.json result.json
    python mlx_worker.py load job.json result.json

`decode` answers so that rounds can be compared, `load` as the two packages do by themselves. This file imports nothing
from mtptrain, whose dependencies are not installed there.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_config, load_model, load_tokenizer
from mlx_vlm.generate.ar import generate_step as generate_with_head
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import load_model as load_for_head
from mlx_vlm.utils import resolve_eos_token_ids
from transformers import AutoTokenizer

PROGRESS = "mlx_worker:"
Sampling = dict[str, Any]
"""Temperature, top_p and top_k; those that are left out are the package's own."""


def in_dtype(model: Any, dtype: str) -> Any:
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token came, in seconds."""
    steps: list[int] = field(default_factory=list)
    """Number of tokens of each step."""
    accepted: list[int] = field(default_factory=list)
    """Number of accepted drafts in each round, up to the end of the answer."""
    drafted: list[int] | None = None
    """Number of drafts in each round; None if the package does not say."""

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.times.append(time.perf_counter())


class WithDraftModel:
    """A target in mlx-lm, with a draft model if K is above 0."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.num_drafts, target = job["num_speculative_tokens"], Path(job["target"])
        self.target = in_dtype(load_model(target)[0], job["dtype"])
        self.draft = in_dtype(load_model(Path(job["head"]))[0], job["dtype"]) if self.num_drafts else None
        self.tokenizer = load_tokenizer(target, eos_token_ids=load_config(target).get("eos_token_id"))
        self.ends = sorted(self.tokenizer.eos_token_ids)

    def compared(self, prompt: list[int], limit: int, ends: list[int], sampling: Sampling) -> Answer:
        """Returns an answer whose first token the target writes itself, as in other engines and in mtptrain.

        mlx-lm's own first round drafts that token.
        """
        first, _ = next(self.written(prompt, 1, sampling, 0))
        if first in ends or limit == 1:
            return Answer([first])
        rest = self.answer([*prompt, first], limit - 1, ends, sampling)
        return Answer([first, *rest.tokens], accepted=rest.accepted)

    def answer(self, prompt: list[int], limit: int, ends: list[int], sampling: Sampling) -> Answer:
        answer, size = Answer(), 0
        for token, is_draft in self.written(prompt, limit, sampling, self.num_drafts):
            answer.add(token)
            size += 1
            is_last = token in ends or len(answer.tokens) == limit
            if is_last or not is_draft:
                answer.steps.append(size)
                answer.accepted.append(size - (not is_draft))
                size = 0
            if is_last:
                break
        return answer

    def written(self, prompt: list[int], limit: int, sampling: Sampling, num_drafts: int) -> Iterator[tuple[int, bool]]:
        ids, settings = mx.array(prompt), {"max_tokens": limit}
        if sampling:
            settings["sampler"] = make_sampler(sampling["temperature"], sampling["top_p"], top_k=sampling["top_k"])
        if not num_drafts:
            yield from ((int(token), False) for token, _ in generate_step(ids, self.target, **settings))
            return
        settings["num_draft_tokens"] = num_drafts
        for token, _, is_draft in speculative_generate_step(ids, self.target, self.draft, **settings):
            yield int(token), bool(is_draft)

    def chat_ids(self, chat: dict[str, Any]) -> list[int] | None:
        settings = {"add_generation_prompt": True, **chat["chat_template_kwargs"]}
        return list(self.tokenizer.apply_chat_template(chat["messages"], **settings))


class WithHead:
    """A target in mlx-vlm, with a head that reads captured layers if K is above 0."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.target, self.kind = in_dtype(load_for_head(Path(job["target"])), job["dtype"]), job["method"]
        self.num_drafts = job["num_speculative_tokens"]
        self.draft: Any = None
        if self.num_drafts:
            self.draft = in_dtype(load_drafter(job["head"], self.kind)[0], job["dtype"])
        tokenizer = AutoTokenizer.from_pretrained(job["target"])
        self.ends = resolve_eos_token_ids(getattr(self.target.config, "eos_token_id", None), tokenizer)

    def compared(self, prompt: list[int], limit: int, ends: list[int], sampling: Sampling) -> Answer:
        """Returns an answer with K drafts in every round.

        By itself, mlx-vlm shortens the blocks of `dflash` after rounds that accept little, and before the limit, where
        fewer masks give other drafts.
        """
        self.draft.prefer_requested_block_size = True
        return self.answer(prompt, limit, ends, sampling, self.num_drafts if self.kind == "dflash" else 0)

    def answer(self, prompt: list[int], limit: int, ends: list[int], sampling: Sampling, spare: int = 0) -> Answer:
        """Returns an answer of at most `limit` tokens, of which mlx-vlm is asked for some more."""
        # Prefilling in chunks would give the head only the last token of the prompt, with the states of all tokens.
        settings = {"max_tokens": limit + spare, "prefill_step_size": None, **sampling}
        if self.draft is not None:
            self.draft.accept_lens, self.draft.draft_lens = [], []
            settings |= {"draft_model": self.draft, "draft_kind": self.kind, "draft_block_size": self.num_drafts + 1}
        answer = Answer()
        for token, _ in generate_with_head(mx.array([prompt]), self.target, None, None, **settings):
            answer.add(int(token))
            if answer.tokens[-1] in ends or len(answer.tokens) == limit:
                break
        if self.draft is None:
            return Answer(answer.tokens, answer.times, [1] * len(answer.tokens))
        answer.drafted, answer.steps, left = list(map(int, self.draft.draft_lens)), [1], len(answer.tokens) - 1
        for accepted in map(int, self.draft.accept_lens):
            answer.accepted.append(min(accepted, left))
            answer.steps.append(min(accepted + 1, left))
            left -= answer.steps[-1]
        return answer

    def chat_ids(self, chat: dict[str, Any]) -> list[int] | None:
        return None  # mlx-vlm's programs write chats in a way of each model


def decode(model: WithDraftModel | WithHead, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the answers to questions, of which those of a plain user set nothing."""
    results = []
    for asked in job["asked"]:
        sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0} if asked["manner"] != "nothing" else {}
        ends = asked["stop_token_ids"] if asked["manner"] == "neutral" else model.ends
        answers = [model.compared(prompt, asked["max_new_tokens"], ends, sampling) for prompt in asked["prompts"]]
        of_all = {name: [getattr(answer, name) for answer in answers] for name in ("tokens", "accepted", "drafted")}
        results.append({"chat_ids": model.chat_ids(asked["chat"]) if asked["chat"] else None, **of_all})
    return results


def run_load(model: WithDraftModel | WithHead, load: dict[str, Any], requests: dict[str, Any]) -> dict[str, Any]:
    """Answers one request at a time, and returns the times and tokens of the steps of each."""
    prompts, steps_s, answers = requests["prompts"], [], []
    sampling = {name: requests[name] for name in ("temperature", "top_p", "top_k")}
    ends, begin = [] if requests["ignore_eos"] else model.ends, time.perf_counter()
    for index in range(load["num_requests"]):
        mx.random.seed(requests["seed"] + index)
        start = time.perf_counter()
        answers.append(model.answer(prompts[index % len(prompts)], requests["max_new_tokens"], ends, sampling))
        times = answers[-1].times
        steps_s.append([times[end - 1] - start for end in accumulate(answers[-1].steps)])
    duration_s = time.perf_counter() - begin
    print(f"{PROGRESS} {load['name']}: {len(answers)} requests, {duration_s:.1f} s", flush=True)
    accepted = [answer.accepted for answer in answers]
    tokens_of_steps = [answer.steps for answer in answers]
    return {"duration_s": duration_s, "steps_s": steps_s, "tokens_of_steps": tokens_of_steps, "accepted": accepted}


if __name__ == "__main__":
    kind, job_path, result_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    model = (WithDraftModel if job["method"] == "draft_model" else WithHead)(job)
    results = (
        [run_load(model, load, job["requests"]) for load in job["loads"]] if kind == "load" else decode(model, job)
    )
    versions = " ".join(version(name) for name in ("mlx", "mlx-lm", "mlx-vlm"))
    Path(result_path).write_text(json.dumps({"version": versions, "results": results}))
