"""The command itself: help, verbs, and one line for every refusal."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import types

import pytest
from no_package import NO_EXTRAS

from osprey.cli import main as command
from osprey.train.endings import reader_has_gone

select_poll = select.poll


@pytest.fixture
def verb(monkeypatch):
    """Puts a fake `osprey prune` in place."""

    def put(function):
        module = types.ModuleType("osprey.cli.prune")
        module.main = function
        monkeypatch.setitem(sys.modules, "osprey.cli.prune", module)

    return put


def test_help_names_every_verb(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in command.VERBS)


def test_help_imports_nothing_heavy():
    code = "import sys; from osprey.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_version(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("osprey ")


@pytest.mark.parametrize(
    ("wrong", "hint"), [("prine", "did you mean 'prune'?"), ("xyzzy", "the verbs are prune, pretrain")]
)
def test_unknown_verb_is_one_sentence(capsys, wrong, hint):
    assert command.main([wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"osprey: there is no verb {wrong!r}; {hint}")
    assert error.count("\n") == 1


def test_arguments_and_status_pass_through(verb):
    seen = []
    verb(lambda argv: seen.append(argv) or 7)
    assert command.main(["prune", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
def test_errors_become_one_line(verb, capsys, monkeypatch, error):
    monkeypatch.delenv("OSPREY_DEBUG", raising=False)

    def fail(argv):
        raise error("first line\n  second line")

    verb(fail)
    assert command.main(["prune"]) == 1
    assert capsys.readouterr().err == "osprey prune: first line second line\n"


def test_debug_shows_the_traceback(verb, monkeypatch):
    monkeypatch.setenv("OSPREY_DEBUG", "1")

    def fail(argv):
        raise ValueError("why")

    verb(fail)
    with pytest.raises(ValueError, match="why"):
        command.main(["prune"])


def test_interrupt(verb, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    verb(interrupt)
    assert command.main(["prune"]) == 130
    assert capsys.readouterr().err == "osprey prune: interrupted\n"


def test_a_missing_package_names_the_extra(verb, capsys):
    def fail(argv):
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    verb(fail)
    assert command.main(["prune"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "pyarrow" in shown and "'.[train]'" in shown


# A verb that writes a folder, with a forked worker that is no concern of its cleaning up.
LONG_VERB = """
import os, signal, sys, time
from osprey.cli.main import guarded
from osprey.train.checkpoints import atomic_folder

def work():
    with atomic_folder(sys.argv[1]):
        ready, write = os.pipe()
        worker = os.fork()
        if worker == 0:
            try:
                os.write(write, b"!")
                time.sleep(60)
            finally:
                print("the worker cleared", flush=True)
                os._exit(1)
        os.read(ready, 1)
        os.kill(worker, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
        try:
            time.sleep(60)
        finally:
            time.sleep(0.5)

sys.exit(guarded("osprey prune", work))
"""


def test_sigterm_clears_up_as_an_interrupt_does(tmp_path):
    script = [sys.executable, "-c", LONG_VERB, str(tmp_path / "out")]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "-15\n"
    assert [path.name.startswith(".out-") for path in tmp_path.iterdir()] == [True]
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # as `timeout` does
    assert process.communicate(timeout=30) == ("", "osprey prune: terminated\n")
    assert process.returncode == 143 and list(tmp_path.iterdir()) == []


SWALLOWED = """
import os, signal
from osprey.train.endings import Terminated, sigterm_as_interrupt

with sigterm_as_interrupt():
    for _ in range(3):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Terminated:
            pass
"""


def test_a_swallowed_sigterm_does_not_make_deaf():
    process = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (-signal.SIGTERM, "")


def test_one_of_several_processes_ends_as_without_us(verb, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = []
    verb(lambda argv: seen.append(signal.getsignal(signal.SIGTERM)) or 0)
    assert command.main(["prune"]) == 0 and seen == [signal.SIG_DFL]


def test_handlers_of_others_stay(verb):
    def handler(number, frame):
        pass

    seen = []
    verb(lambda argv: seen.append(signal.getsignal(signal.SIGTERM)) or 0)
    command.main(["prune"])
    assert callable(seen[0]) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    try:
        command.main(["prune"])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert seen[1] is handler


@pytest.mark.parametrize(
    ("argv", "unbuffered"), [(["--help"], ""), (["--help"], "1"), (["--version"], ""), (["generate", "--help"], "")]
)
def test_a_reader_that_has_gone_is_no_error(argv, unbuffered):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "osprey.cli.main", *argv],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (141, "")


def test_an_error_is_said_though_the_reader_has_gone():
    fail = "from osprey.cli.main import guarded; import sys\n"
    fail += "def work(): print('figures'); raise ValueError('no more')\nsys.exit(guarded('osprey prune', work))"
    read, write = os.pipe()
    os.close(read)
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    script = [sys.executable, "-c", fail]
    process = subprocess.run(script, env=buffered, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "osprey prune: no more\n")


def test_a_closed_standard_output_is_no_error(verb, monkeypatch):
    verb(lambda argv: print("figures") or 0)
    monkeypatch.setattr(sys, "stdout", None)  # as `>&-` leaves it
    assert command.main(["prune"]) == 0


class PollOfMacOS:
    """Reports only what it is asked for, or an error along with it."""

    def __init__(self):
        self.there = select_poll()

    def register(self, output, events):
        if events:
            self.there.register(output, events)

    def poll(self, timeout):
        return self.there.poll(timeout)


@pytest.mark.parametrize("reader", [True, False])
def test_whether_the_reader_has_gone_on_macos(reader, monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        if not reader:
            os.close(read)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(select, "poll", PollOfMacOS)
        assert reader_has_gone() == (not reader)
    if reader:
        os.close(read)


def test_another_broken_pipe_is_said(verb, capsys, monkeypatch):
    monkeypatch.delenv("OSPREY_DEBUG", raising=False)

    def fail(argv):
        raise BrokenPipeError("the server hung up")

    verb(fail)
    assert command.main(["prune"]) == 1
    assert capsys.readouterr().err == "osprey prune: the server hung up\n"


EVERY_HELP = """
import json, runpy
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from osprey.cli.main import VERBS, main

def module(name):
    sys.argv = [name, "--help"]
    runpy.run_module(f"osprey.cli.{name}", run_name="__main__")

runs = {verb: lambda verb=verb: sys.exit(main([verb, "--help"])) for verb in VERBS}
runs |= {name: lambda name=name: module(name) for name in ("matched_runs", "throughput", "compare_pruning")}
found = {}
for name, run in runs.items():
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            run()
        except SystemExit as end:
            found[name] = [end.code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


def test_help_without_the_extra_works_or_names_it():
    script = [sys.executable, "-c", NO_EXTRAS + EVERY_HELP]
    found = json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert found.keys() > command.VERBS.keys()
    for name, (status, out, error) in found.items():
        if status == 0:
            assert out.startswith("usage: ") and error == "", name
        else:
            assert (status, out, error.count("\n")) == (1, "", 1), name
            assert "which is not installed: it comes with the extra `train`" in error, name
    working = {name for name, (status, *_) in found.items() if status == 0}
    assert working >= {"generate", "bench", "zoo", "push", "pull", "card", "align", "baseline", "export"}
