#!/usr/bin/env bash
# Speculators' loss mask has the line break after an answer's end of turn, and the texts of the role `developer`.
#
# Versions: speculators 0.9.0, torch 2.13.0, transformers 5.19.0, Python 3.11; a ChatML template, as Qwen's.
# Expected: supervised are the tokens that the target generates: each answer up to and with its end of turn. A message of the
#   role `developer`, which several published templates know, is context, as one of `system` is.
# Behaviour: the mask is 1 from where the rendered history with the opening of an answer ends, to the end of the render. ChatML
#   writes a line break after <|im_end|>; no server ever asks for it, because the answer has ended, yet it is trained, drawn
#   into accuracies and counted for the draft vocabulary: one token for each answer. A role that is none of user, assistant,
#   system and tool is taken for a model's name and becomes an assistant's answer, with a warning: its text, which the
#   target never wrote, is trained on, rendered between the assistant's tags.
# Seen: two rows. "[Be brief.<|im_end|>\n]" of the developer's message, and "[Hello.<|im_end|>\n]" of the answer, supervised parts in
#   brackets.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet speculators==0.9.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio # unused here, and may be built for another torch
cat > "$folder/masks.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from datasets import Dataset
from speculators.data_generation.preprocessing import build_speculator_training_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ends = ["<|im_start|>", "<|im_end|>"]
bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
base = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(bytes_)}, merges=[]))
base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
base.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, additional_special_tokens=ends, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Render(BaseHTTPRequestHandler):
    """Answers as vLLM's /v1/chat/completions/render does: the ids of the rendered messages."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=body["add_generation_prompt"], tokenize=False
        )
        answer = json.dumps({"token_ids": tokenizer(text)["input_ids"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Render)
threading.Thread(target=server.serve_forever, daemon=True).start()
chat = [("user", "Hi."), ("developer", "Be brief."), ("user", "Hi?"), ("assistant", "Hello.")]
rows = build_speculator_training_dataset(
    Dataset.from_list([{"conversations": [{"role": role, "content": text} for role, text in chat]}]),
    tokenizer,
    num_proc=1,
    render_endpoint=f"http://127.0.0.1:{server.server_port}",
)
for row in rows:
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    start = mask.index(1)
    supervised = [token for token, is_supervised in zip(ids, mask, strict=True) if is_supervised]
    opening = repr(tokenizer.decode(ids[:start])[-22:])
    print("SEEN", opening, repr(tokenizer.decode(supervised)))
PYTHON
"$folder/venv/bin/python" "$folder/masks.py" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN '<|im_start|>assistant\n' 'Be brief.<|im_end|>\n'
SEEN '<|im_start|>assistant\n' 'Hello.<|im_end|>\n'
SEEN
