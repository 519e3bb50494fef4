"""Figures of a benchmark's result and of a training run, each in light and dark, as PNG and SVG.

Colours are Okabe and Ito's, which people with any common colour blindness tell apart; peers also differ in markers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from osprey.eval.journal import check_schema, read_result
from osprey.eval.peers import PLAIN
from osprey.eval.report import matrix, select

Row = dict[str, Any]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
MARKERS = "osD^vPX"
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0"},
    "dark": {"paper": "#0d1117", "ink": "#f0f6fc", "faint": "#9198a1", "grid": "#30363d"},
}
DARK_COLOURS = ("#4AA8E8", *COLOURS[1:4], "#A5D8F3", "#F0803C", "#B0B0B0")
FONT = 10


def draw_all(files: list[str], out: str | Path) -> list[Path]:
    """Draws whatever each file has data for, and returns the paths written.

    Args:
        files: results of `osprey bench`, and `trainer_state.json` files of training runs.
        out: folder for the figures, made if need be.

    Raises:
        OSError, ValueError: a file is missing, no JSON, neither kind of file, or of another schema version.
    """
    out, written = Path(out), []
    for name in files:
        content = read_result(name)
        if "log_history" in content:
            figures = {f"training-{Path(name).resolve().parent.name}": lambda content=content: training(content)}
        else:
            check_schema(name, content)
            figures = figures_of(content)
        prefix = f"{Path(name).stem}-" if len(files) > 1 and "log_history" not in content else ""
        out.mkdir(parents=True, exist_ok=True)
        for figure_name, draw in figures.items():
            written += save(draw, out / f"{prefix}{figure_name}")
    return written


def save(draw: Callable[[], Figure], path: Path) -> list[Path]:
    """Draws once for each theme, and writes `PATH-THEME.png` and `.svg`."""
    written = []
    for theme in THEMES:
        with matplotlib.rc_context(style(theme)):
            figure = draw()
            for kind in ("png", "svg"):
                file = path.with_name(f"{path.name}-{theme}.{kind}")
                # Without a date the same figures give the same file.
                figure.savefig(file, dpi=160, metadata={"Date": None} if kind == "svg" else None)
                written.append(file)
    return written


def style(theme: str) -> dict[str, Any]:
    colours = THEMES[theme]
    return {
        "figure.facecolor": colours["paper"],
        "savefig.facecolor": colours["paper"],
        "axes.facecolor": colours["paper"],
        "axes.edgecolor": colours["grid"],
        "axes.labelcolor": colours["faint"],
        "axes.titlecolor": colours["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": FONT + 2,
        "axes.titleweight": "bold",
        "axes.titlepad": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": matplotlib.cycler(color=DARK_COLOURS if theme == "dark" else COLOURS),
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
        "text.color": colours["ink"],
        "xtick.color": colours["faint"],
        "ytick.color": colours["faint"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "font.size": FONT,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "osprey",
    }


def figures_of(result: Row) -> dict[str, Callable[[], Figure]]:
    """The figures that a result has data for, by name: greedy where it was run, at the first draft length."""
    settings, figures = result["settings"], {}
    for name in ("domain", "language"):
        if len({row[name] for row in main_rows(result, name)}) > 1:
            figures[f"mal-by-{name}"] = lambda name=name: bars(result, name)
    figures["acceptance-by-position"] = lambda: by_position(result)
    if len(settings["draft_lengths"]) > 1:
        figures["speedup-by-draft-length"] = lambda: by_draft_length(result)
    if len(settings["context_lengths"]) > 1:
        figures["mal-by-context-length"] = lambda: by_context_length(result)
    if settings["matrix"]:
        figures["matrix"] = lambda: heat_map(result)
    return figures


def slice_of(result: Row, narrowed: str | None = None) -> list[Row]:
    """Rows at the first temperature over all requests, or over each value of `narrowed`; plain generation left out."""
    wanted = {name: None for name in ("domain", "language", "file") if name != narrowed}
    rows = select(result, temperature=result["settings"]["temperatures"][0], **wanted)
    return [row for row in rows if row["peer"] != PLAIN and (narrowed is None or row[narrowed] is not None)]


def main_rows(result: Row, narrowed: str | None = None) -> list[Row]:
    """Those at the first draft length and the shortest context."""
    settings = result["settings"]
    context = min(settings["context_lengths"], default=None)
    rows = slice_of(result, narrowed)
    return [
        row for row in rows if row["draft_length"] == settings["draft_lengths"][0] and row["context_length"] == context
    ]


def subtitle(result: Row) -> str:
    settings = result["settings"]
    temperature = settings["temperatures"][0]
    decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{settings['target']}, suite {settings['suite']}, {decoding}"


def titled(axes, title: str, result: Row) -> None:
    axes.set_title(title, pad=28)
    colour = matplotlib.rcParams["axes.labelcolor"]
    axes.annotate(subtitle(result), (0, 1), (0, 10), "axes fraction", "offset points", color=colour)


def new_figure(width: float, height: float):
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def bars(result: Row, name: str) -> Figure:
    """Horizontal bars of mean MAL with intervals, a group for each domain or language, the best for us on top."""
    rows = main_rows(result, name)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    values = {(row[name], row["peer"]): row["mal_mean"] for row in rows if row["mal_mean"]}
    groups = sorted(
        {row[name] for row in rows}, key=lambda group: values.get((group, peers[0]), {"value": 0})["value"]
    )
    sizes = {row[name]: row["requests"] for row in rows}
    height = 0.8 / len(peers)
    figure, axes = new_figure(8, 1.5 + len(groups) * (0.2 + 0.14 * len(peers)))
    for rank, peer in enumerate(peers):
        places = [index for index, group in enumerate(groups) if (group, peer) in values]
        found = [values[groups[index], peer] for index in places]
        at = np.array(places) + 0.4 - height * (rank + 0.5)
        value = np.array([each["value"] for each in found])
        ends = np.array([[each["value"] - each["low"], each["high"] - each["value"]] for each in found]).T  # [2, n]
        axes.barh(
            at,
            value - 1,
            0.86 * height,
            left=1,
            label=peer,
            xerr=ends,
            error_kw={"ecolor": matplotlib.rcParams["text.color"], "elinewidth": 0.9, "capsize": 0},
        )
    axes.set_yticks(range(len(groups)), [f"{group} ({sizes[group]})" for group in groups])
    axes.tick_params(axis="y", labelcolor=matplotlib.rcParams["text.color"])
    axes.set_ylim(-0.6, len(groups) - 0.4)
    axes.set_xlim(left=1)
    axes.grid(False, axis="y")
    axes.set_xlabel("mean acceptance length: tokens per verification (1: no gain), 95 % interval")
    titled(axes, f"Acceptance by {name}", result)
    legend(figure, len(peers))
    return figure


def legend(figure: Figure, entries: int) -> None:
    if entries > 1:
        figure.legend(loc="outside lower left", ncols=min(entries, 4))


def by_position(result: Row) -> Figure:
    rows = [row for row in main_rows(result) if row["acceptance_by_position"]]
    figure, axes = new_figure(7, 4.2)
    for rank, row in enumerate(rows):
        rates = row["acceptance_by_position"]
        axes.plot(
            range(1, len(rates) + 1),
            [np.nan if rate is None else 100 * rate for rate in rates],
            marker=MARKERS[rank % len(MARKERS)],
            linewidth=2,
            label=row["peer"],
            clip_on=False,
        )
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, those before it being accepted (%)")
    titled(axes, "Acceptance by draft position", result)
    legend(figure, len(rows))
    return figure


def by_draft_length(result: Row) -> Figure:
    """Speedup at each fixed length as a line; the default and the adaptive length as points beside it."""
    lengths = result["settings"]["draft_lengths"]
    fixed = sorted(int(length) for length in lengths if length.isdecimal())
    others = [length for length in lengths if not length.isdecimal()]
    last = fixed[-1] if fixed else 0
    places = {str(length): length for length in fixed} | {name: last + 1 + i for i, name in enumerate(others)}
    context = min(result["settings"]["context_lengths"], default=None)
    rows = [row for row in slice_of(result) if row["context_length"] == context and row["speedup"]]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = new_figure(7.5, 4.4)
    for rank, peer in enumerate(peers):
        own = sorted((row for row in rows if row["peer"] == peer), key=lambda row: places[row["draft_length"]])
        look = {"color": f"C{rank}", "marker": MARKERS[rank % len(MARKERS)]}
        shift = 0.06 * (rank - (len(peers) - 1) / 2)
        label: str | None = peer
        for line, some in (
            (2, [row for row in own if row["draft_length"].isdecimal()]),
            (0, [row for row in own if not row["draft_length"].isdecimal()]),
        ):
            if some:
                value = np.array(
                    [[row["speedup"][key] for key in ("value", "low", "high")] for row in some]
                ).T  # [3, n]
                at = [places[row["draft_length"]] + shift for row in some]
                ends = [value[0] - value[1], value[2] - value[0]]
                axes.errorbar(at, value[0], ends, linewidth=line, elinewidth=0.9, label=label, **look)
                label = None
    axes.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=1)
    axes.set_xticks(list(places.values()), list(places))
    axes.set_xlabel("draft length")
    axes.set_ylabel("speedup over plain generation (x), 95 % interval")
    titled(axes, "Speedup by draft length", result)
    legend(figure, len(peers))
    return figure


def by_context_length(result: Row) -> Figure:
    rows = [
        row
        for row in slice_of(result)
        if row["draft_length"] == result["settings"]["draft_lengths"][0] and row["mal_mean"]
    ]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = new_figure(7, 4.2)
    for rank, peer in enumerate(peers):
        own = sorted((row for row in rows if row["peer"] == peer), key=lambda row: row["context_length"])
        value = np.array([[row["mal_mean"][key] for key in ("value", "low", "high")] for row in own]).T  # [3, n]
        at = [row["context_length"] * 2 ** (0.03 * (rank - (len(peers) - 1) / 2)) for row in own]
        ends = [value[0] - value[1], value[2] - value[0]]
        axes.errorbar(at, value[0], ends, linewidth=2, elinewidth=0.9, marker=MARKERS[rank % len(MARKERS)], label=peer)
    lengths = sorted({row["context_length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=1)
    axes.set_xlabel("context (tokens, the new ones included)")
    axes.set_ylabel("mean acceptance length, 95 % interval")
    titled(axes, "Acceptance by context length", result)
    legend(figure, len(peers))
    return figure


def heat_map(result: Row) -> Figure:
    """The matrix of drafters by domain, the best of each column bold."""
    peers = result["settings"]["matrix"]
    domains, cells = matrix(result, peers)  # [peers, domains]
    figure, axes = new_figure(2.6 + 0.95 * len(domains), 2.2 + 0.6 * len(peers))
    image = axes.imshow(cells, cmap="cividis", aspect="auto")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for row, column in np.ndindex(cells.shape):
        if not np.isnan(cells[row, column]):
            colour = "#000000" if cells[row, column] > middle else "#ffffff"
            best = cells[row, column] == np.nanmax(cells[:, column])
            text = f"{cells[row, column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, weight="bold" if best else "normal")
    axes.set_xticks(range(len(domains)), domains, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(peers)), peers)
    axes.tick_params(labelcolor=matplotlib.rcParams["text.color"])
    axes.set_xlabel("tested on (bold: the best)")
    axes.set_ylabel("trained on")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, shrink=0.9, label="mean acceptance length")
    bar.outline.set_visible(False)
    titled(axes, "Acceptance across domains", result)
    return figure


def training(state: Row) -> Figure:
    """Loss by step from a trainer's log; beside it the top-1 agreement of each draft step, where it was logged."""
    logs = [row for row in state["log_history"] if "loss" in row or "eval_loss" in row]
    tops = sorted({key for row in logs for key in row if key.startswith("top1_")})
    figure = Figure(figsize=(10 if tops else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if tops else 1, squeeze=False)[0]
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        points = [(row["step"], row[key]) for row in logs if key in row]
        if points:
            axes[0].plot(*zip(*points, strict=True), linewidth=1.5, label=label)
    axes[0].set_title("Loss")
    if any("eval_loss" in row for row in logs):
        axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    for key in tops:
        points = [(row["step"], 100 * row[key]) for row in logs if key in row]
        axes[1].plot(
            *zip(*points, strict=True), linewidth=1.5, label=f"draft step {int(key.removeprefix('top1_')) + 1}"
        )
    if tops:
        axes[1].set_title("Top-1 agreement with the target (%)")
        axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    for each in axes:
        each.set_xlabel("step")
    return figure
