"""`osprey.serving.measure` against a stand-in for vLLM that counts what it is asked, and drafts on paper."""

import json
import socket
import sys

import pytest

from osprey.serving.measure import main

# Each answer: 7 tokens from 2 drafts, of which 2 first and 1 second tokens were accepted: MAL 1 + 3 / 2.
FAKE_VLLM = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments = sys.argv[1:]
if "broken" in arguments:
    sys.exit("there is no such model")
speculates = "--speculative-config" in arguments
answered = 0
lock = threading.Lock()

class Handler(BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/health":
            return self.reply("")
        labels = 'engine="0",model_name="m"'
        counts = {
            "vllm:spec_decode_num_drafts_total{%s}": 2,
            "vllm:spec_decode_num_drafts_created{%s}": 1.7e9,
            "vllm:spec_decode_num_accepted_tokens_total{%s}": 3,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{%s,position="0"}': 2,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{%s,position="1"}': 1,
        }
        lines = [f"{name % labels} {float(n * answered)}" for name, n in counts.items()] if speculates else []
        self.reply("\\n".join(["# HELP x", *lines]))

    def do_POST(self):
        global answered
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            answered += 1
        text = request["messages"][0]["content"].upper() + ("!" if "draft_model" in str(arguments) else "")
        message = {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 7}}
        self.reply(json.dumps(message))

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    (tmp_path / "fake_vllm.py").write_text(FAKE_VLLM)
    rows = [{"turns": [f"prompt {i}"]} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"{sys.executable} {tmp_path / 'fake_vllm.py'} {{target}}"
    return ["--prompts", str(tmp_path / "prompts.jsonl"), "--serve", serve, "--port", str(port)]


def test_figures(fake, tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--drafter", "d", "--draft-model", "m", "--concurrency", "1", "3", "--json", str(out)]
    assert main(["target", *fake, *options]) == 0
    figures = json.loads(out.read_text())
    assert list(figures) == ["none", "drafter", "draft model"]
    for name, records in figures.items():
        assert [record["concurrency"] for record in records] == [1, 3]
        for record in records:
            assert record["tokens"] == 35
            assert record["mal"] == (None if name == "none" else 2.5)
            assert record["accepted_by_position"] == ([] if name == "none" else [1.0, 0.5])
            assert record["texts"][0] == ("PROMPT 0!" if name == "draft model" else "PROMPT 0")
    shown = capsys.readouterr().out
    assert "drafter, 3 at a time" in shown and "MAL 2.50, 5 of 5 texts" in shown
    assert "MAL 2.50, 0 of 5 texts" in shown  # the draft model's differ


def test_a_server_that_does_not_start(fake):
    with pytest.raises(OSError, match="ended with 1; its last lines say why"):
        main(["broken", *fake])
