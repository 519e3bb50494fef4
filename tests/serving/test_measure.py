"""`osprey.serving.measure` against a stand-in for vLLM that records what it is asked, and drafts on paper."""

import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osprey.eval import suites
from osprey.serving import measure
from osprey.serving.measure import main

# Each answer: 7 tokens from 2 drafts, of which 2 first and 1 second tokens were accepted: MAL 1 + 3 / 2. The target
# "two" has a second engine, which counts 2 drafts more with 1 first token accepted: MAL 1 + 4 / 4. The target "slow"
# holds each answer back for so long that requests which are sent together meet.
FAKE_VLLM = """
import json, pathlib, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments = sys.argv[1:]
record = open(pathlib.Path(__file__).with_name("record.jsonl"), "a", buffering=1)
print(json.dumps({"arguments": arguments}), file=record)
if "broken" in str(arguments):
    sys.exit("there is no such model")
speculates = "--speculative-config" in arguments
engines = [(2, 3, 2, 1), (2, 1, 1, 0)] if "two" in arguments else [(2, 3, 2, 1)]
names = (
    "vllm:spec_decode_num_drafts_total{%s}",
    "vllm:spec_decode_num_accepted_tokens_total{%s}",
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{%s,position="0"}',
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{%s,position="1"}',
)
answered = in_flight = 0
changed = threading.Condition()

class Handler(BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/health":
            return self.reply("")
        lines = ["# HELP x", 'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9']
        for engine, counts in enumerate(engines if speculates else []):
            labels = f'engine="{engine}",model_name="m"'
            lines += [f"{name % labels} {float(n * answered)}" for name, n in zip(names, counts)]
        self.reply("\\n".join(lines))

    def do_POST(self):
        global answered, in_flight
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with changed:
            in_flight += 1
            changed.notify_all()
            if "slow" in arguments:
                changed.wait_for(lambda: in_flight > 3, timeout=0.5)
            print(json.dumps({"path": self.path, "body": request, "in_flight": in_flight}), file=record)
            answered += 1
        text = request["messages"][0]["content"].upper() + ("!" if "draft_model" in str(arguments) else "")
        message = {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 7}}
        with changed:
            in_flight -= 1
        self.reply(json.dumps(message))

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


class Fake:
    """`options` are those that start it; `started` the command lines and `asked` the requests that it recorded."""

    def __init__(self, folder: Path):
        self.script = folder / "fake_vllm.py"
        self.script.write_text(FAKE_VLLM)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps({"turns": [f"prompt {i}", "and?"]}) + "\n" for i in range(5)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        serve = shlex.join([sys.executable, str(self.script), "{target}"])
        self.options = ["--prompts", str(self.prompts), "--serve", serve, "--port", str(self.port)]

    def recorded(self, key):
        file = self.script.with_name("record.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if key in row]

    @property
    def started(self):
        return [row["arguments"] for row in self.recorded("arguments")]

    @property
    def asked(self):
        return self.recorded("body")


@pytest.fixture
def fake(tmp_path):
    return Fake(tmp_path)


def test_figures(fake, tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--drafter", "d", "--draft-model", "m", "--concurrency", "1", "3", "--json", str(out)]
    assert main(["target", *fake.options, *options]) == 0
    figures = json.loads(out.read_text())
    assert list(figures) == ["none", "drafter", "draft model"]
    for name, records in figures.items():
        assert [record["concurrency"] for record in records] == [1, 3]
        for record in records:
            assert record["tokens"] == 35
            assert record["tokens_per_second"] == pytest.approx(35 / record["seconds"])
            assert record["mal"] == (None if name == "none" else 2.5)
            assert record["accepted_by_position"] == ([] if name == "none" else [1.0, 0.5])
            mark = "!" if name == "draft model" else ""
            assert record["texts"] == [f"PROMPT {i}{mark}" for i in range(5)]
    shown = capsys.readouterr().out
    assert "drafter, 3 at a time" in shown and "MAL 2.50, 5 of 5 texts" in shown
    assert "MAL 2.50, 0 of 5 texts" in shown  # the draft model's differ


def test_what_is_started_and_asked(fake):
    options = ["--drafter", "d", "--draft-model", "m", "--concurrency", "1", "3", "--max-tokens", "9"]
    assert main(["target", *fake.options, *options, "--num-speculative-tokens", "4"]) == 0
    plain = ["target", "--port", str(fake.port), "--no-enable-prefix-caching"]
    assert fake.started[0] == plain
    assert [command[:-1] for command in fake.started[1:]] == [[*plain, "--speculative-config"]] * 2
    assert [json.loads(command[-1]) for command in fake.started[1:]] == [
        {"method": "eagle3", "model": "d", "num_speculative_tokens": 4},
        {"method": "draft_model", "model": "m", "num_speculative_tokens": 4},
    ]
    assert len(fake.asked) == 3 * 13
    for engine in range(3):
        asked = fake.asked[13 * engine : 13 * (engine + 1)]
        levels = [asked[:3], asked[3:8], asked[8:]]  # the warm-up, one at a time, three at a time
        for level in levels:
            assert {row["path"] for row in level} == {"/v1/chat/completions"}
            asked_in_turn = sorted((row["body"] for row in level), key=lambda body: body["messages"][0]["content"])
            assert asked_in_turn == [
                {
                    "model": "target",
                    "messages": [{"role": "user", "content": f"prompt {i}"}],
                    "temperature": 0.0,
                    "max_tokens": 9,
                }
                for i in range(len(level))
            ]


def test_so_many_at_a_time(fake):
    assert main(["slow", *fake.options, "--concurrency", "1", "3"]) == 0
    in_flight = [row["in_flight"] for row in fake.asked]
    assert [max(level) for level in (in_flight[:3], in_flight[3:8], in_flight[8:])] == [3, 1, 3]


def test_several_engines_count_together(fake, tmp_path):
    out = tmp_path / "figures.json"
    assert main(["two", *fake.options, "--drafter", "d", "--concurrency", "2", "--json", str(out)]) == 0
    (record,) = json.loads(out.read_text())["drafter"]
    assert record["mal"] == 2.0 and record["accepted_by_position"] == [0.75, 0.25]


def test_an_occupied_port(fake):
    sentence = f"something answers at http://127.0.0.1:{fake.port} already: stop it, or give another --port"
    with socket.create_server(("127.0.0.1", fake.port)), pytest.raises(OSError, match=sentence):
        main(["target", *fake.options])
    assert fake.started == []


def test_what_was_measured_outlives_an_engine_that_does_not_start(fake, tmp_path):
    out = tmp_path / "figures.json"
    with pytest.raises(OSError, match="ended with 1; its last lines say why"):
        main(["target", *fake.options, "--drafter", "broken", "--concurrency", "2", "--json", str(out)])
    assert len(fake.started) == 2 and list(json.loads(out.read_text())) == ["none"]
    assert sorted(path.name for path in tmp_path.iterdir() if "figures" in path.name) == ["figures.json"]


def test_sigterm_ends_the_engine_too(fake):
    command = [sys.executable, "-m", "osprey.serving.measure", "slow", *fake.options, "--concurrency", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not fake.asked:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    assert not measure.is_taken(fake.port)


def test_prompts_are_taken_spread(fake):
    assert main(["target", *fake.options, "--limit", "2", "--concurrency", "1"]) == 0
    assert [row["body"]["messages"][0]["content"] for row in fake.asked[1:]] == ["prompt 1", "prompt 3"]
    for count in (1, 5, 50):
        for limit in (None, 1, 2, 4, 30, 50, 60):
            values = [str(i) for i in range(count)]
            assert measure.spread(values, limit) == suites.spread(values, limit)


def test_rows_with_a_prompt(fake):
    fake.prompts.write_text('{"turns": ["a\u2028b", "c"]}\n\n{"id": "2", "prompt": "d"}\n')
    assert measure.load_prompts(fake.prompts) == ["a\u2028b", "d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt"', "prompts.jsonl, line 2: not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', "prompts.jsonl, line 3: a row needs `turns`"),
        ('{"turns": []}', "prompts.jsonl, line 1: a row needs `turns`"),
        ('{"prompt": "a"}\n{"prompt": " "}', "prompts.jsonl, line 2: a row needs .* not a blank one"),
        ('["a"]', "prompts.jsonl, line 1: a row needs `turns`"),
        ("\n", "prompts.jsonl holds no prompts"),
    ],
)
def test_rows_without_a_prompt(fake, text, message):
    fake.prompts.write_text(text)
    with pytest.raises(ValueError, match=message):
        main(["target", *fake.options])
    assert fake.started == []


@pytest.mark.parametrize("flag", ["--limit", "--concurrency"])
def test_numbers_too_small(fake, flag, capsys):
    with pytest.raises(SystemExit):
        main(["target", *fake.options, flag, "0"])
    assert f"argument {flag}: 0 is too small" in capsys.readouterr().err
