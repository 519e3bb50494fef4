"""The closing table and the totals of `osprey generate`, as text and as JSON."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from osprey.eval.acceptance import Measurement, Summary, summarize

POSITIONS = 5  # of a draft; a copy may have 32, which JSON has all
HEADER = (
    *("prompt", "tokens", "plain tok/s", "assisted tok/s", "speedup", "MAL", "identical"),
    f"acceptance by position, 1-{POSITIONS}",
)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def identical_text(summary: Summary) -> str:
    """`yes`, `no`, `-` (not compared); a `no` owed to near-ties alone says so."""
    if summary.identical is None:
        return "-"
    if summary.identical:
        return "yes"
    return f"no ({summary.near_ties} near-tie)" if summary.near_ties else "no"


def table_row(name: str, tokens: int, summary: Summary) -> tuple[str, ...]:
    positions = " ".join(
        "-" if rate is None else f"{rate:.2f}".removeprefix("0") for rate in summary.acceptance_by_position[:POSITIONS]
    )
    return (
        name,
        str(tokens),
        number(summary.tokens_per_second_plain, 1),
        number(summary.tokens_per_second_assisted, 1),
        number(summary.speedup, unit="x"),
        number(summary.mal_mean),
        identical_text(summary),
        positions or "-",
    )


def groups_of(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.group, []).append(measurement)
    return groups


def format_table(measurements: Sequence[Measurement], plain_scale: float = 1.0) -> str:
    """A row a prompt, one for each group of several prompts, and one for all; MAL is the mean over requests."""

    def row(name: str, some: Sequence[Measurement]) -> tuple[str, ...]:
        return table_row(name, sum(len(m.assisted.token_ids) for m in some), summarize(some, plain_scale))

    prompts = [row(m.id, [m]) for m in measurements]
    groups = groups_of(measurements)
    totals = [row(f"group {name}", some) for name, some in groups.items() if 1 < len(some) < len(measurements)]
    totals.append(row("all", measurements))
    widths = [max(len(cells[i]) for cells in (HEADER, *prompts, *totals)) for i in range(len(HEADER))]

    def line(cells: Sequence[str]) -> str:
        left = (0, 6, 7)  # text columns; figures stand to the right
        return "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "-" * len(line(HEADER))
    return "\n".join([line(HEADER), rule, *map(line, prompts), rule, *map(line, totals)])


def totals_line(summary: Summary) -> str:
    return (
        f"plain {number(summary.tokens_per_second_plain, 1)} tok/s, "
        f"assisted {number(summary.tokens_per_second_assisted, 1)} tok/s, "
        f"speedup {number(summary.speedup, unit='x')}, "
        f"MAL {number(summary.mal_mean)} mean {number(summary.mal_pooled)} pooled, "
        f"identical {identical_text(summary)}"
    )


def report(measurements: Sequence[Measurement], plain_scale: float, settings: dict[str, Any]) -> dict[str, Any]:
    """The totals' keys at the top; then groups, prompts with their raw counts, and settings."""
    return {
        **asdict(summarize(measurements, plain_scale)),
        "groups": {name: asdict(summarize(some, plain_scale)) for name, some in groups_of(measurements).items()},
        "prompts": [
            {
                "id": m.id,
                "group": m.group,
                **asdict(summarize([m], plain_scale)),
                "plain_tokens": len(m.plain.token_ids) if m.plain else None,
                "plain_seconds": m.plain.seconds if m.plain else None,
                "assisted_tokens": len(m.assisted.token_ids),
                "assisted_seconds": m.assisted.seconds,
                "rounds": m.assisted.rounds,
                "difference": asdict(m.difference) if m.difference else None,
            }
            for m in measurements
        ],
        "settings": settings,
    }


def check_writable(path: Path) -> None:
    """Raises before the work, not after it, where a file cannot be written."""
    if path.is_dir():
        raise OSError(f"{path} is a folder; --json wants a file name.")
    if not path.parent.is_dir():
        raise OSError(f"cannot write {path}: there is no folder {path.parent}.")
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"cannot write {path}: the folder {path.parent} is not writable.")
