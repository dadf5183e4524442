"""Tests the page of a measurement: the order of its parts, its verdict, plots and example answers."""

import json
import re
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eval.examples import examples, pieces
from eval.measurement import DecodedPrompt, Measured
from eval.report_page import render_page, verdict
from mtptrain.decoding.acceptance import has_loop
from mtptrain.decoding.speculate import Generation
from tests.conftest import make_tokenizer
from tests.eval.test_compare import write_report


def measured(answers: dict[str, Generation]) -> Measured:
    decoded = {(name, 1): DecodedPrompt(each, 4, None, name) for name, each in answers.items()}
    return Measured(decoded, {"all": 1.0}, 1.0, 0, None)


def answer(text: str, *accepted: int) -> Generation:
    tokens = make_tokenizer()(text)["input_ids"]
    assert len(tokens) == 1 + sum(accepted) + len(accepted) and not has_loop(tokens)
    at = [sum(count > depth for count in accepted) for depth in range(3)]
    return Generation(tokens, len(accepted), 0, 3 * len(accepted), at, list(accepted))


def byte_pieces() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are words with their space in front, or single bytes."""
    words = ["\u2581Hi", "\u2581there", "!"]
    vocab = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_keep_the_spaces_between_them_and_characters_whose_bytes_lie_in_several() -> None:
    snow = [3 + byte for byte in "\u2603".encode()]  # three bytes
    generation = Generation([0, 1, *snow, 2], 3, 0, 9, [2, 1, 0], [1, 1, 0])
    shown = [("Hi", False), (" there", True), ("\u2603!", False)]
    assert pieces(generation, byte_pieces()) == shown


HOSTILE = "<script>$x_$ &"


def test_examples_are_whole_answers_whose_accepted_drafts_are_marked() -> None:
    """The answer `mid` ends within the accepted drafts of its last round."""
    mid = answer("abcdefgh", 1, 1, 2)
    answers = {"low": answer("abcd", 0, 0, 0), "mid": replace(mid, tokens=mid.tokens[:6])}
    answers["high"] = answer(HOSTILE, 3, 3, 3, 0)
    prompts = {name: make_tokenizer()(f"to {name}: ")["input_ids"] for name in answers}
    shown = examples(measured(answers), prompts, make_tokenizer())
    assert [each["id"] for each in shown] == ["low", "mid", "high"]
    assert shown[1]["prompt"] == "to mid: "
    assert shown[1]["pieces"] == [("a", False), ("b", True), ("c", False), ("d", True), ("e", False), ("f", True)]
    assert "".join(text for text, _ in shown[2]["pieces"]) == HOSTILE


def test_the_result_comes_first_and_the_settings_last_and_text_is_escaped(tmp_path: Path) -> None:
    answers = {"high": answer(HOSTILE, 3, 3, 3, 0)}
    report = json.loads(write_report(tmp_path / "report.json", [8, 6]).read_text())
    report["by_prompt_tokens"].pop("256")
    report["baselines"]["prompt_lookup"]["by_prompt_tokens"].pop("256")
    report["examples"] = examples(measured(answers), {"high": [60, 98, 62]}, make_tokenizer())
    report["held_out"] = {name: [0.25, 0.5] for name in ("kl_at", "top1_accuracy_at", "overlap_at")}
    report["held_out"]["num_drafts_at"] = [1234, 5]
    page = render_page({"run": report})
    assert re.search(r"<td>0</td>(<td>0\.250</td>){3}\s*<td>1,234</td>", page)
    places = [page.index(text) for text in ('class="length"', "Each step of the target", "<table>", "<svg", "<mark>")]
    assert places == sorted(places) and places[-1] < page.index("Settings and command")
    assert "<script>" not in page and "&lt;" in page and "<b>" not in page
    assert "Acceptance length by prompt length" not in page, "a plot with one point must be left out"
    assert 'name="viewport"' in page


def figures(per_step: float, interval: list[float] | None, per_s: float = 1.0, run: str = "run") -> dict[str, object]:
    is_plain = per_step == 1.0
    return {
        **{"run": run, "drafter": "none" if is_plain else "head", "drafted": 0 if is_plain else 9},
        **{"tokens_per_step": per_step, "tokens_per_s": per_s},
        "intervals": None if interval is None else {"tokens_per_step": interval},
    }


def test_the_verdict_names_the_best_drafter_and_whether_it_is_certain() -> None:
    high, plain = [2.4, 2.6], figures(1.0, [1.0, 1.0], 4.0)
    for low, certainty in (([1.9, 2.1], "; their 95 % intervals do not overlap."), ([1.9, 2.5], " overlap.")):
        drafters = {"a": figures(2.0, low), "b": figures(2.5, high, 6.0), "no drafts": plain}
        first, speed = verdict(drafters, has_speed=True)
        assert first.startswith("Each step of the target gives 2.50 tokens with b and 2.00 with a, the next best")
        assert first.endswith(certainty)
        assert speed == "With b, decoding was 1.50 times as fast as without drafts in this measurement."
    others = {"other: no drafts": figures(1.0, [1.0, 1.0], 3.0, run="other")}
    assert verdict({**others, **drafters}, has_speed=True)[1] == speed, "plain decoding must be that of the same run"
    assert verdict({"a": figures(2.0, None)}, has_speed=True) == ["Each step of the target gives 2.00 tokens with a."]
