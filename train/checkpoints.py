"""What every stage does with checkpoints: write them whole or not at all, and say where they come from."""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRAINING_FILE = "training.json"
CUSTOM_GENERATE = "custom_generate"  # of `osprey.modeling`, and of every drafter folder
OWN_SUBFOLDERS = {CUSTOM_GENERATE, "__pycache__", ".cache"}  # the last is what a download from the Hub leaves


@contextmanager
def atomic_folder(
    out: str | Path, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()
) -> Iterator[Path]:
    """Yields an empty folder beside `out` that takes its name at the end, and vanishes if anything fails.

    Raises:
        ValueError, FileExistsError: `out` may not be written or replaced (see `check_out`), before the work or after
            it; what is finished by then stays under a name of its own.
        OSError: weights cannot be written.
    """
    check_out(out, overwrite, inputs)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would stay with the checkpoint
        try:
            yield work
        except SafetensorError as error:  # of a full disk as well
            raise OSError(f"{out} cannot be written: {error}.") from error
        try:
            check_out(out, overwrite, inputs)  # again: hours later something else may stand there
        except (ValueError, OSError) as error:
            kept = work.rename(work.with_name(work.name.removeprefix(".")))
            raise type(error)(f"{error} What was to stand there is finished, and kept as {kept}.") from error
        for path in work.rglob("*.safetensors"):
            path.chmod(0o644)  # safetensors writes 0600: a shared folder could not be read
        _put_in_place(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_out(out: str | Path, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuses an `out` whose replacement would cost what it must not.

    Raises:
        ValueError: it is, or holds, one of `inputs` (see `refuse_input`), or lies in the cache.
        FileExistsError: it exists and `overwrite` is false, or it is neither empty nor what a stage has written, or it
            is a git checkout.
    """
    refuse_input(out, inputs)
    out = Path(out)
    if cache_dir().resolve() in out.resolve().parents:
        raise ValueError(f"{out} lies in the cache, {cache_dir()}, for what is fetched: choose another --out.")
    if not out.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists already: choose another --out, or give --overwrite to replace it.")
    if (out / ".git").exists():
        raise FileExistsError(f"--overwrite does not replace {out}, a git checkout: choose another --out.")
    if not out.is_dir() or (any(out.iterdir()) and not holds_model(out)):
        raise FileExistsError(
            f"--overwrite does not replace {out}, which is no folder of a model (it has no config.json with a "
            "`model_type`): choose another --out, or remove it first."
        )
    strange = sorted(path.name for path in out.iterdir() if path.is_dir() and path.name not in OWN_SUBFOLDERS)
    if strange:
        raise FileExistsError(
            f"--overwrite does not replace {out}, which holds the folder {strange[0]} that no stage has written: "
            "choose another --out, or move it away first."
        )


def holds_model(folder: Path) -> bool:
    """Whether `folder` has what every folder has that a stage, an export or a pull writes."""
    if (folder / "model.gguf").is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or a stranger's
        return False
    return isinstance(config, dict) and "model_type" in config


def refuse_input(out: str | Path, inputs: Iterable[str | Path | None]) -> None:
    """Raises `ValueError` where `out` is, or holds, one of `inputs`: files or folders; names of the Hub are passed."""
    if not os.path.exists(out):
        return
    for path in (Path(name).expanduser() for name in inputs if name is not None):
        if not path.exists():
            continue
        # Not by name: where case does not count, one folder has several.
        source, *parents = (os.path.samefile(place, out) for place in (path, *path.resolve().parents))
        if source or any(parents):
            what = "is the input itself" if source else f"holds the input {path}"
            raise ValueError(f"the folder to write, {out}, {what}, which would be lost: choose another --out.")


def _put_in_place(work: Path, out: Path) -> None:
    """Gives `work` the name `out`; what stood there goes only once the new folder stands."""
    if not os.path.lexists(out):
        os.rename(work, out)
        return
    old = work.with_name(f"{work.name}.old")
    os.rename(out, old)
    try:
        os.rename(work, out)
    except BaseException:
        os.rename(old, out)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()


@contextmanager
def reading_weights(name_or_path: str | Path) -> Iterator[None]:
    """Says of weights that cannot be read that they are a source's; `atomic_folder` would blame what it writes."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"The weights of {name_or_path} cannot be read ({error}): a file is truncated or damaged; fetch or make "
            "it again."
        ) from error


def save_drafter(drafter: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Weights, config, the remote code with its `custom_generate`, and the target's tokenizer."""
    drafter.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / CUSTOM_GENERATE).mkdir(exist_ok=True)
    for file in resources.files("osprey.modeling").joinpath(CUSTOM_GENERATE).iterdir():
        if file.is_file():
            (folder / CUSTOM_GENERATE / file.name).write_bytes(file.read_bytes())


def cache_dir() -> Path:
    """Where what is fetched or computed once is kept."""
    return Path(os.environ.get("OSPREY_CACHE") or Path.home() / ".cache" / "osprey").expanduser()


def write_json(path: Path, content: Any) -> None:
    """Writes through a temporary name, so that a failed write leaves the old file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def provenance(folder: str | Path) -> list[dict[str, Any]]:
    """The stages that a checkpoint has gone through, oldest first; none where it brings no `training.json`."""
    path = Path(folder) / TRAINING_FILE
    if not path.is_file():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))["stages"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a training record (JSON with `stages`); remove it to go on.") from error


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "datasets", "osprey-drafter"):
        with suppress(PackageNotFoundError):  # datasets comes with the extra `train` only
            found[package] = version(package)
    return found


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(name_or_path: str) -> str | None:
    """Of the weight files of a folder or of a .gguf file; None for a model on the Hub."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return file_sha256(path)
    files = sorted([*path.glob("model*.safetensors"), *path.glob("pytorch_model*.bin")])
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest() if files else None


def hub_commit(name_or_path: str, revision: str | None = None) -> str | None:
    """The commit that `revision` of a model on the Hub is at; of a folder, or where the Hub tells none, `revision`."""
    from transformers.utils import resolve_revision

    found = resolve_revision(name_or_path, revision)
    return getattr(found, "resolved", found)


def public_name(name_or_path: str) -> str:
    """A Hub id as it is; of a local folder only its name, since where it lies on this machine means nothing else."""
    path = Path(name_or_path).expanduser()
    return path.resolve().name if path.exists() else name_or_path
