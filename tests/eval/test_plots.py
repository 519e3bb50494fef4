"""Figures: which are drawn from which result, what stands in them, and what is refused."""

import json

import pytest
from bench_runs import ENVIRONMENT, SETTINGS, journal_of, random_runs

from osprey.eval.plots import (
    THEMES,
    bars,
    by_context_length,
    by_draft_length,
    by_position,
    draw_all,
    heat_map,
    training,
)
from osprey.eval.report import make_result, select

CELLS = [("chat", "en"), ("code", "en"), ("chat", "de")]
STATE = {
    "log_history": [
        {"step": 10, "loss": 3.0, "top1_0": 0.2, "top1_1": 0.1},
        {"step": 20, "loss": 2.0, "top1_0": 0.4, "top1_1": 0.3},
        {"step": 20, "eval_loss": 2.5},
    ]
}


def result_of(folder, **changes):
    settings = SETTINGS | changes
    folder.mkdir(exist_ok=True)
    journal = journal_of(folder / "x.runs.jsonl", random_runs(settings, CELLS, 2), settings)
    return make_result(journal, settings, ENVIRONMENT, [], 0)


@pytest.fixture(scope="module")
def plain_result(tmp_path_factory):
    return result_of(tmp_path_factory.mktemp("plots"))


def test_files_in_both_themes(plain_result, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(plain_result))
    written = draw_all([str(tmp_path / "r.json")], tmp_path / "out")
    names = ("mal-by-domain", "mal-by-language", "acceptance-by-position")
    expected = {f"{name}-{theme}.{kind}" for name in names for theme in THEMES for kind in ("png", "svg")}
    assert {path.name for path in written} == {path.name for path in (tmp_path / "out").iterdir()} == expected
    assert (tmp_path / "out" / "mal-by-domain-light.png").read_bytes().startswith(b"\x89PNG")
    for theme, colours in THEMES.items():
        svg = (tmp_path / "out" / f"mal-by-domain-{theme}.svg").read_text()
        assert colours["paper"] in svg and "eagle3" in svg  # text stays text


def test_bars_are_the_figures(plain_result):
    (axes,) = bars(plain_result, "domain").axes
    assert [label.get_text() for label in axes.get_yticklabels()] in (
        ["code (2)", "chat (4)"],
        ["chat (4)", "code (2)"],
    )
    groups = [label.get_text().split()[0] for label in axes.get_yticklabels()]
    osprey = axes.containers[1]  # of each peer the intervals, then the bars
    for group, bar in zip(groups, osprey, strict=True):
        (row,) = select(plain_result, peer="osprey", domain=group, language=None, file=None)
        assert bar.get_x() == 1 and bar.get_x() + bar.get_width() == pytest.approx(row["mal_mean"]["value"])
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["osprey", "eagle3", "prompt-lookup"]


def test_acceptance_is_in_per_cent(plain_result):
    line = by_position(plain_result).axes[0].lines[0]
    (row,) = select(plain_result, peer="osprey", domain=None, language=None, file=None)
    assert list(line.get_ydata()) == pytest.approx([100 * rate for rate in row["acceptance_by_position"]])
    assert list(line.get_xdata()) == [1, 2, 3]


def test_draft_lengths_in_order(tmp_path):
    result = result_of(tmp_path, draft_lengths=["default", "8", "2", "adaptive"])
    (axes,) = by_draft_length(result).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "8", "default", "adaptive"]
    assert list(axes.get_xticks()) == [2, 8, 9, 10]


def test_contexts_in_order(tmp_path):
    result = result_of(tmp_path, context_lengths=[2048, 512])
    (axes,) = by_context_length(result).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "2,048"]
    value = axes.containers[0].lines[0].get_ydata()
    for at, context in enumerate((512, 2048)):
        (row,) = select(result, peer="osprey", domain=None, language=None, file=None, context_length=context)
        assert value[at] == row["mal_mean"]["value"]


def test_heat_map_writes_its_values(tmp_path):
    result = result_of(tmp_path, matrix=["osprey", "eagle3"])
    axes = heat_map(result).axes[0]
    (row,) = select(result, peer="eagle3", domain="code", language=None, file=None)
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts[1, 1] == f"{row['mal_mean']['value']:.2f}"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["chat", "code"]


def test_training_curves(tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    path = tmp_path / "checkpoint-20" / "trainer_state.json"
    path.write_text(json.dumps(STATE))
    written = draw_all([str(path)], tmp_path / "out")
    assert {file.name for file in written} == {
        f"training-checkpoint-20-{theme}.{kind}" for theme in THEMES for kind in ("png", "svg")
    }
    loss, top1 = training(STATE).axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[3.0, 2.0], [2.5]]
    assert [list(line.get_ydata()) for line in top1.lines] == [[20.0, 40.0], [10.0, 30.0]]
    assert len(training({"log_history": [{"step": 1, "loss": 1.0}]}).axes) == 1


def test_refusals(plain_result, tmp_path):
    path = tmp_path / "r.json"
    with pytest.raises(OSError, match="there is no result file"):
        draw_all([str(path)], tmp_path / "out")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        draw_all([str(path)], tmp_path / "out")
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no result"):
        draw_all([str(path)], tmp_path / "out")
    path.write_text(json.dumps(plain_result | {"schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99"):
        draw_all([str(path)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
