"""Drafters and backbones that can be had: published on the Hub, in its local cache, in given folders."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from huggingface_hub import CacheNotFound, EvalResult, HfApi, ModelInfo, errors, scan_cache_dir
from huggingface_hub.errors import HTTPError
from huggingface_hub.repocard_data import model_index_to_eval_results

from osprey.hub_cards.layout import METRIC, card_data, read_json
from osprey.hub_cards.sentences import hub_sentences

TAG = "osprey"
KINDS = ("drafter", "backbone")


@dataclass(frozen=True)
class ZooEntry:
    """A drafter (`base_model`: its target) or a backbone (`base_model`: what it was cut from).

    `name` is ORG/NAME or, with `place` "folder", a path; `revision` a commit hash; `mean_acceptance_length` the mean
    over the results in its card, None where it states none.
    """

    name: str
    kind: str
    place: str
    base_model: str | None
    revision: str | None
    mean_acceptance_length: float | None
    cached: bool = False


def zoo(target: str | None = None, folders: Iterable[str | Path] = ()) -> tuple[list[ZooEntry], bool]:
    """Everything there is (for one target), best first, and whether the Hub could be asked.

    Raises:
        OSError: the Hub answers with an error. One that cannot be reached is none: cache and folders remain.
    """
    cached = [entry for entry in cached_entries() if target in (None, entry.base_model)]
    try:
        with hub_sentences("the list of models"):
            hub = published(target)
        reached = True
    except OSError as error:
        if not unreachable(error.__cause__):
            raise
        hub, reached = [], False
    held = {(entry.name, entry.revision) for entry in cached}
    hub = [replace(entry, cached=(entry.name, entry.revision) in held) for entry in hub]
    listed = {(entry.name, entry.revision) for entry in hub}
    entries = [*hub, *(entry for entry in cached if (entry.name, entry.revision) not in listed)]
    entries += [entry for entry in folder_entries(folders) if target in (None, entry.base_model)]
    return sorted(entries, key=rank), reached


def unreachable(error: BaseException | None) -> bool:
    if isinstance(error, errors.HfHubHTTPError):
        return False
    return isinstance(error, (HTTPError, errors.OfflineModeIsEnabled))


def rank(entry: ZooEntry) -> tuple:
    """Drafters before backbones, longest acceptance first, those without results last; then by name."""
    length = entry.mean_acceptance_length
    return KINDS.index(entry.kind), -length if length is not None else 0.0, entry.name


def best_drafter(target: str) -> ZooEntry:
    """The drafter with the longest mean acceptance length by its card; of the cache alone without the Hub.

    Raises:
        ValueError: there is none.
    """
    entries, reached = zoo(target)
    drafters = [entry for entry in entries if entry.kind == "drafter"]
    if not drafters:
        where = (
            "on the Hub or in its local cache"
            if reached
            else "in the Hub's local cache, and the Hub cannot be reached"
        )
        raise ValueError(
            f"there is no drafter for {target} {where}: check the target's name (ORG/NAME), or make one with `osprey "
            f"adapt BACKBONE --target {target}`."
        )
    return drafters[0]


def published(target: str | None = None) -> list[ZooEntry]:
    """What the Hub lists under our tag (and as made for `target`)."""
    filters = [TAG, f"base_model:{target}"] if target else [TAG]
    wanted = ["sha", "tags", "cardData", "model-index"]
    return [entry for info in HfApi().list_models(filter=filters, expand=wanted) if (entry := hub_entry(info))]


def hub_entry(info: ModelInfo) -> ZooEntry | None:
    kind = kind_of(info.tags or [])
    if kind is None:
        return None
    data, results = info.card_data, []
    if data is not None:
        results = data.eval_results or []
    if not results and info.model_index:
        try:
            results = model_index_to_eval_results(info.model_index)[1]
        except (KeyError, TypeError, ValueError):  # a stranger's card: listed, but without results
            results = []
    base = data.base_model if data is not None else None
    return ZooEntry(info.id, kind, "hub", first(base), info.sha, mean_acceptance_length(results))


def cached_entries() -> list[ZooEntry]:
    """Every snapshot of ours with weights in the Hub's local cache, one for each commit, that of `main` first."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda one: ("main" not in one.refs, -one.last_modified)):
            entry = folder_entry(revision.snapshot_path)
            if entry is not None and any(file.file_name.endswith(".safetensors") for file in revision.files):
                place = {"name": repo.repo_id, "place": "cache", "revision": revision.commit_hash, "cached": True}
                found.append(replace(entry, **place))
    return found


def folder_entries(folders: Iterable[str | Path]) -> list[ZooEntry]:
    """What the folders are, or hold one level below."""
    paths = [Path(folder).expanduser() for folder in folders]
    missing = [str(path) for path in paths if not path.is_dir()]
    if missing:
        raise OSError(f"there is no folder {missing[0]} to look into.")
    candidates = [below for path in paths for below in (path, *sorted(path.iterdir()))]
    return [entry for path in candidates if (entry := folder_entry(path)) is not None]


def folder_entry(folder: Path) -> ZooEntry | None:
    """What a folder with a config and a card of ours holds; None for any other, damaged ones too."""
    if not (folder / "config.json").is_file() or not (folder / "README.md").is_file():
        return None
    try:
        config, data = read_json(folder / "config.json"), card_data(folder / "README.md")
    except (ValueError, OSError):
        return None
    kind = "drafter" if config.get("model_type") == "osprey" else kind_of(data.tags or [])
    if kind is None:
        return None
    base = config.get("target") if kind == "drafter" else first(data.base_model)
    return ZooEntry(str(folder), kind, "folder", base, None, mean_acceptance_length(data.eval_results or []))


def kind_of(tags: list[str]) -> str | None:
    return next((kind for kind in KINDS if kind in tags), None) if TAG in tags else None


def first(value: str | list[str] | None) -> str | None:
    return value[0] if isinstance(value, list) and value else value or None


def mean_acceptance_length(results: list[EvalResult]) -> float | None:
    """The mean over the data sets in a card's results of our metric; None without any.

    A data set counts with its configuration `all`, as `osprey card` writes it, else with the mean of those it has.
    """
    by_dataset: dict[str, dict[str | None, float]] = {}
    for result in results:
        if result.metric_type == METRIC and isinstance(result.metric_value, int | float):
            by_dataset.setdefault(result.dataset_type, {})[result.dataset_config] = float(result.metric_value)
    values = [found["all"] if "all" in found else fmean(found.values()) for found in by_dataset.values()]
    return fmean(values) if values else None
