"""Decodes prompts inside the Python of mlx-lm and mlx-vlm, for `engine.py`.

    python mlx_worker.py decode job.json result.json
    python mlx_worker.py load job.json result.json
    python mlx_worker.py logits job.json result.json

`decode` answers so that rounds can be compared, `load` as the two packages do by themselves, and `logits` reads one
prompt. This file imports nothing from mtptrain, whose dependencies are not installed there.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
    steps_s: list[float] = field(default_factory=list)
    """Seconds from the request to each step that gave tokens."""
    accepted: list[int] = field(default_factory=list)
    """Number of accepted drafts in each round, up to the end of the answer."""


def answer_of(written: Iterable[tuple[int, bool]], limit: int, ends: Sequence[int]) -> Answer:
    """Returns an answer of tokens, with whether each was drafted. One that was not ends its round."""
    answer, size, start = Answer(), 0, time.perf_counter()
    for token, is_draft in written:
        answer.tokens.append(token)
        size += 1
        is_last = token in ends or len(answer.tokens) == limit
        if is_last or not is_draft:
            answer.steps_s.append(time.perf_counter() - start)
            answer.accepted.append(size - (not is_draft))
            size = 0
        if is_last:
            break
    return answer


class WithDraftModel:
    """A target in mlx-lm, with a draft model if K is above 0."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.num_drafts, target = job["num_speculative_tokens"], Path(job["target"])
        self.target = in_dtype(load_model(target)[0], job["dtype"])
        self.draft = in_dtype(load_model(Path(job["head"]))[0], job["dtype"]) if self.num_drafts else None
        self.tokenizer = load_tokenizer(target, eos_token_ids=load_config(target).get("eos_token_id"))
        self.ends = sorted(self.tokenizer.eos_token_ids)

    def compared(self, prompt: list[int], limit: int, ends: Sequence[int], sampling: Sampling) -> Answer:
        """Returns an answer whose first token the target writes itself. mlx-lm's own first round drafts it."""
        [first] = answer_of(self.written(prompt, 1, sampling, 0), 1, ends).tokens
        if first in ends or limit == 1:
            return Answer([first])
        rest = self.answer([*prompt, first], limit - 1, ends, sampling)
        return Answer([first, *rest.tokens], accepted=rest.accepted)

    def answer(self, prompt: list[int], limit: int, ends: Sequence[int], sampling: Sampling) -> Answer:
        return answer_of(self.written(prompt, limit, sampling, self.num_drafts), limit, ends)

    def written(self, prompt: list[int], limit: int, sampling: Sampling, num_drafts: int) -> Iterator[tuple[int, bool]]:
        ids, settings = mx.array(prompt), {"max_tokens": limit}
        if sampling:
            settings["sampler"] = make_sampler(sampling["temperature"], sampling["top_p"], top_k=sampling["top_k"])
        steps = generate_step(ids, self.target, **settings)
        if num_drafts:
            settings["num_draft_tokens"] = num_drafts
            steps = speculative_generate_step(ids, self.target, self.draft, **settings)
        for token, _, *is_draft in steps:
            yield int(token), any(is_draft)

    def chat_ids(self, chat: dict[str, Any]) -> list[int] | None:
        settings = {"add_generation_prompt": True, **chat["chat_template_kwargs"]}
        return list(self.tokenizer.apply_chat_template(chat["messages"], **settings))


class WithHead:
    """A target in mlx-vlm, with a head that reads captured layers if K is above 0."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.target, self.spare = in_dtype(load_for_head(Path(job["target"])), job["dtype"]), 0
        self.draft: Any = None
        self.settings: Sampling = {"prefill_step_size": None}
        """Prefilling in chunks would give the head only the last token of the prompt, with the states of all tokens."""
        if num_drafts := job["num_speculative_tokens"]:
            self.draft = in_dtype(load_drafter(job["head"], job["method"])[0], job["dtype"])
            self.settings |= {
                "draft_model": self.draft,
                "draft_kind": job["method"],
                "draft_block_size": num_drafts + 1,
            }
        tokenizer = AutoTokenizer.from_pretrained(job["target"])
        self.ends = resolve_eos_token_ids(getattr(self.target.config, "eos_token_id", None), tokenizer)

    def compared(self, prompt: list[int], limit: int, ends: Sequence[int], sampling: Sampling) -> Answer:
        """Returns an answer with K drafts in every round.

        By itself, mlx-vlm shortens the blocks of `dflash` after rounds that accept little, and before the limit, where
        fewer masks give other drafts.
        """
        self.draft.prefer_requested_block_size = True
        self.spare = self.settings["draft_block_size"] if self.settings["draft_kind"] == "dflash" else 0
        return self.answer(prompt, limit, ends, sampling)

    def answer(self, prompt: list[int], limit: int, ends: Sequence[int], sampling: Sampling) -> Answer:
        answer = answer_of(self.written(prompt, limit, sampling), limit, ends)
        del answer.accepted[0]  # of the first token, which the target writes
        return answer

    def written(self, prompt: list[int], limit: int, sampling: Sampling) -> Iterator[tuple[int, bool]]:
        settings, left = {"max_tokens": limit + self.spare, **sampling, **self.settings}, 1
        for token, _ in generate_with_head(mx.array([prompt]), self.target, None, None, **settings):
            if not left:
                left = 1 if self.draft is None else int(self.draft.accept_lens[-1]) + 1
            left -= 1
            yield int(token), left > 0

    def chat_ids(self, chat: dict[str, Any]) -> list[int] | None:
        return None  # mlx-vlm's programs write chats in a way of each model


def decode(model: WithDraftModel | WithHead, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers to questions. Those of a plain user set nothing."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0} if asked["manner"] != "nothing" else {}
    ends = asked["stop_token_ids"] if asked["manner"] == "neutral" else model.ends
    answers = [model.compared(prompt, asked["max_new_tokens"], ends, sampling) for prompt in asked["prompts"]]
    of_all = {name: [getattr(answer, name) for answer in answers] for name in ("tokens", "accepted")}
    return {"chat_ids": model.chat_ids(asked["chat"]) if asked["chat"] else None, **of_all}


def run_load(model: WithDraftModel | WithHead, load: dict[str, Any], requests: dict[str, Any]) -> dict[str, Any]:
    """Answers one request at a time."""
    prompts, answers = requests["prompts"], []
    sampling = {name: requests[name] for name in ("temperature", "top_p", "top_k")}
    ends, begin = [] if requests["ignore_eos"] else model.ends, time.perf_counter()
    for index in range(load["num_requests"]):
        mx.random.seed(requests["seed"] + index)
        answers.append(model.answer(prompts[index % len(prompts)], requests["max_new_tokens"], ends, sampling))
    duration_s = time.perf_counter() - begin
    print(f"{PROGRESS} {load['name']}: {len(answers)} requests, {duration_s:.1f} s", flush=True)
    of_all = {name: [getattr(answer, name) for answer in answers] for name in ("steps_s", "accepted")}
    return {"duration_s": duration_s, "num_tokens": [len(answer.tokens) for answer in answers], **of_all}


def run_logits(job: dict[str, Any]) -> Any:
    """Returns logits of the prompt's own tokens at its last positions, in fp32 on the CPU."""
    mx.set_default_device(mx.cpu)
    ids, changes = mx.array(job["ids"]), job["changes"]
    model = in_dtype(load_model(Path(job["model"]), strict=not changes, model_config=changes)[0], "float32")
    return model(ids[None])[0, -16:][:, ids].tolist()


if __name__ == "__main__":
    mode, job_path, result_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    if mode == "logits":
        results = run_logits(job)
    else:
        model = (WithDraftModel if job["method"] == "draft_model" else WithHead)(job)
        loads, asked = job.get("loads", []), job.get("asked", [])
        results = [run_load(model, load, job["requests"]) for load in loads] + [decode(model, each) for each in asked]
    Path(result_path).write_text(json.dumps(results))
