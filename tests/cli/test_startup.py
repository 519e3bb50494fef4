"""The measuring scripts, run in this process."""

import json
import sys

from cards import save_drafter, save_target

from osprey.cli import startup
from osprey.modeling import OspreyCandidateGenerator


def test_every_figure_is_measured(tmp_path, capsys, monkeypatch):
    save_target(tmp_path / "target")
    save_drafter(tmp_path / "drafter")
    monkeypatch.setattr(OspreyCandidateGenerator, "choose", OspreyCandidateGenerator.choose)  # put back afterwards
    runs = []

    def run_here(script, models):
        monkeypatch.setattr(sys, "argv", ["-c", *models])
        names = {}
        exec(script, names)
        runs.append(names["seconds"])
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(startup, "run", run_here)
    models = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    assert startup.main([*models, "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(runs) == 4 and runs[2].keys() == {"import_osprey_modeling"}
    assert result == {name: round(value, 3) for name, value in (runs[2] | runs[3]).items()}
    total = runs[3]["load"] + runs[3]["first_draft"]
    assert abs(runs[3]["load_to_first_draft"] - total) < 1e-6 and runs[3]["load"] > 0 and runs[3]["first_draft"] > 0
