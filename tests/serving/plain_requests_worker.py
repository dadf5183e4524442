"""Answers requests that leave all settings out, inside an engine's own Python.

    python plain_requests_worker.py vllm|openvino job.json result.json

A job is a list of pipelines: a target with or without drafts. For each case, the target's generation_config.json is
written anew. The result has the answers of each pipeline by case, or the text of the engine's error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ask = Callable[[list[list[int]], int | None], list[list[int]]]
"""Answers prompts. With None, a request leaves its maximum number of tokens out too."""
ENGINES = Path(__file__).parents[2] / "mtptrain/engines"


def start_vllm(target: str, head: dict[str, Any] | None) -> Callable[[], Ask]:
    """Returns a function that reads the file as vLLM's server does when it starts. Ends are read here."""
    sys.path[0] = str(ENGINES / "vllm")
    from vllm_worker import LLM, SamplingParams  # type: ignore[import-not-found]

    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "dtype": "float32"}
    llm = LLM(model=target, speculative_config=head, **settings)

    def ask(prompts: list[list[int]], limit: int | None) -> list[list[int]]:
        request = {} if limit is None else {"max_tokens": limit}
        sampling = SamplingParams.from_optional(**llm.model_config.get_diff_sampling_param() | request)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return lambda: ask


def start_openvino(target: str, head: str | None) -> Callable[[], Ask]:
    sys.path[0] = str(ENGINES / "openvino")
    from openvino_worker import EXACT, np, openvino, openvino_genai, scheduler, threads  # type: ignore

    settings = EXACT | threads()

    def read() -> Ask:
        drafts = {} if head is None else {"draft_model": openvino_genai.draft_model(head, "CPU", **settings)}
        pipeline = openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler(), **settings, **drafts)

        def ask(prompts: list[list[int]], limit: int | None) -> list[list[int]]:
            request = {} if limit is None else {"max_new_tokens": limit}
            answers = [pipeline.generate(openvino.Tensor(np.array([prompt])), **request) for prompt in prompts]
            return [[int(token) for token in answer.tokens[0]] for answer in answers]

        return ask

    return read


def answers_of(pipeline: dict[str, Any], start: Callable[..., Callable[[], Ask]]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    read = None
    for name, (settings, limit) in pipeline["cases"].items():
        (Path(pipeline["target"]) / "generation_config.json").write_text(json.dumps(settings))
        read = read or start(pipeline["target"], pipeline["head"])
        try:
            answers[name] = read()(pipeline["prompts"], limit)
        except Exception as error:  # an engine may refuse what the file says
            answers[name] = str(error)
    return answers


if __name__ == "__main__":
    start = {"vllm": start_vllm, "openvino": start_openvino}[sys.argv[1]]
    job = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps([answers_of(each, start) for each in job]))
