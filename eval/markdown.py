"""A benchmark's result as Markdown tables."""

from collections.abc import Callable
from typing import Any

import numpy as np

from osprey.eval.peers import ADAPTIVE, DEFAULT, PLAIN
from osprey.eval.report import DIMENSIONS, matrix, select

Row = dict[str, Any]


def to_markdown(result: Row) -> str:
    settings = result["settings"]
    parts = [f"# {settings['drafter']} with {settings['target']}", describe(result)]
    for temperature in settings["temperatures"]:
        for context in settings["context_lengths"] or [None]:
            parts += of_setting(result, temperature, context)
    if settings["context_lengths"]:
        parts += by_context(result)
    if settings["matrix"]:
        parts += matrix_table(result)
    return "\n\n".join(parts) + "\n"


def describe(result: Row) -> str:
    settings, environment, skipped = (
        result["settings"],
        result["environment"],
        result["skipped"]["longer_than_context"],
    )
    lines = [
        f"Suite `{settings['suite']}`, {result['requests']} requests, at most {settings['max_new_tokens']} new tokens "
        f"each, {settings['weights']} weights, {settings['device']}, {settings['threads']} threads; seed "
        f"{settings['seed']}. Intervals are 95 %, by bootstrap over requests.",
        "*MAL* is tokens emitted per verification of the target, the bonus token included, the prefill not counted: "
        "the mean over requests. *Speedup* is over plain generation in the same process.",
        f"Peak memory of the process, all models loaded: {result['peak_memory_bytes'] / 1e9:.1f} GB.",
        f"Made by `{environment['command']}` at commit {environment['commit'] or 'unknown'}.",
    ]
    if 0 in settings["temperatures"] and set(settings["draft_lengths"]) & {DEFAULT, ADAPTIVE}:
        lines.append(
            "Draft lengths that adapt (greedily also the default, unless the drafter turns it off) follow measured "
            "times: with them MAL varies from run to run. Fixed lengths give the same figures again."
        )
    if result.get("plain_scale", 1.0) > 1:
        lines.append(
            f"Plain generation is faster with fp32 weights: its rates are raised by {result['plain_scale']:.2f}."
        )
    if skipped:
        lines.append(f"Skipped, since they are longer than the target's context: {len(skipped)} requests.")
    return "\n".join(lines)


def of_setting(result: Row, temperature: float, context: int | None) -> list[str]:
    """All tables of one temperature and context length."""
    settings = result["settings"]
    rows = select(result, temperature=temperature, context_length=context)
    if not rows:
        return []
    mode = "Greedy" if temperature == 0 else f"Sampled at temperature {temperature:g}"
    parts = [f"## {mode}" + (f", context of {context} tokens" if context is not None else "")]
    first = settings["draft_lengths"][0]
    main = [row for row in rows if row["draft_length"] == first or row["peer"] == PLAIN]
    drafting = [row for row in rows if row["peer"] != PLAIN]
    parts += [f"Draft length: {first}.", overall([row for row in main if narrowed(row) == set()])]
    for name in DIMENSIONS:
        some = [row for row in drafting if row["draft_length"] == first and narrowed(row) == {name}]
        if len({row[name] for row in some}) > 1:
            parts += mal_and_speedup(some, name)
    everything = [row for row in drafting if narrowed(row) == set()]
    if len(settings["draft_lengths"]) > 1:
        parts += mal_and_speedup(everything, "draft_length")
    parts += by_position([row for row in everything if row["draft_length"] == first])
    return parts + compared(result, temperature, context, first)


def narrowed(row: Row) -> set[str]:
    """Which dimensions the slice of a row is narrowed in."""
    return {name for name in DIMENSIONS if row[name] is not None}


def mal_and_speedup(rows: list[Row], down: str) -> list[str]:
    name = down.replace("_", " ")
    return [
        f"### MAL by {name}",
        crossed(rows, down, "peer", lambda row: estimate(row["mal_mean"])),
        f"### Speedup by {name}",
        crossed(rows, down, "peer", lambda row: estimate(row["speedup"], "x")),
    ]


def overall(rows: list[Row]) -> str:
    header = ["", "MAL", "pooled", "accepted share", "drafted", "draft ms", "verify ms", "tok/s", "speedup"]
    header.append("identical")
    body = [
        [
            row["peer"],
            estimate(row["mal_mean"]),
            number(row["mal_pooled"] and row["mal_pooled"]["value"]),
            "-" if row["accepted_share"] is None else f"{100 * row['accepted_share']:.0f} %",
            number(row["drafted_per_verification"], 1),
            number(row["draft_ms"], 1),
            number(row["verify_ms"], 1),
            number(row["tokens_per_second"], 1),
            estimate(row["speedup"], "x"),
            "-" if row["identical"] is None else identical(row),
        ]
        for row in rows
    ]
    return table(header, body)


def identical(row: Row) -> str:
    ties = f" ({row['near_ties']} near-ties)" if row["near_ties"] else ""
    return f"{row['identical']} of {row['requests']}{ties}"


def by_position(rows: list[Row]) -> list[str]:
    depth = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    if depth == 0:
        return []
    header = ["", *map(str, range(1, depth + 1))]
    body = [
        [row["peer"], *(number(rate) for rate in row["acceptance_by_position"])]
        + ["-"] * (depth - len(row["acceptance_by_position"]))
        for row in rows
    ]
    return ["### Acceptance by draft position, those before it being accepted", table(header, body)]


def compared(result: Row, temperature: float, context: int | None, draft_length: str) -> list[str]:
    wanted = {"temperature": temperature, "context_length": context, "draft_length": draft_length}
    rows = [row for row in result["comparisons"] if all(row[name] == value for name, value in wanted.items())]
    rows = [row for row in rows if row["mal_ratio"] is not None]
    if not rows:
        return []
    body = [
        [row["over"], row["domain"] or row["language"] or "all", str(row["requests"]), estimate(row["mal_ratio"], "x")]
        for row in rows
    ]
    header = ["over", "requests of", "number", f"MAL of {rows[0]['peer']} over it"]
    return ["### Paired comparison", table(header, body)]


def by_context(result: Row) -> list[str]:
    settings = result["settings"]
    rows = select(result, domain=None, language=None, file=None, temperature=settings["temperatures"][0])
    rows = [row for row in rows if row["draft_length"] == settings["draft_lengths"][0] and row["peer"] != PLAIN]
    return ["## MAL by context length", crossed(rows, "context_length", "peer", lambda row: estimate(row["mal_mean"]))]


def matrix_table(result: Row) -> list[str]:
    peers = result["settings"]["matrix"]
    domains, cells = matrix(result, peers)
    body = [
        [peer, *("-" if np.isnan(value) else f"{value:.2f}" for value in row)]
        for peer, row in zip(peers, cells, strict=True)
    ]
    return ["## MAL of each drafter (row) in each domain (column)", table(["trained on", *domains], body)]


def crossed(rows: list[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """A table with the values of one key down and of another across."""
    names = list(dict.fromkeys(row[down] for row in rows))
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells = {(row[down], row[across]): cell(row) for row in rows}
    sizes = {row[down]: row["requests"] for row in rows}
    body = [[str(name), str(sizes[name]), *(cells.get((name, column), "-") for column in columns)] for name in names]
    return table([down.replace("_", " "), "requests", *map(str, columns)], body)


def table(header: list[str], body: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *body])


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def estimate(value: dict[str, float] | None, unit: str = "") -> str:
    return "-" if value is None else f"{value['value']:.2f}{unit} [{value['low']:.2f}, {value['high']:.2f}]"
