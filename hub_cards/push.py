"""Publishing a drafter or a backbone: checked here, uploaded in one commit, compared with what arrived, tagged."""

import re
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.utils import validate_repo_id

from osprey.hub_cards.sentences import hub_sentences
from osprey.hub_cards.validate import CheckedFolder, check_folder

HUB_OWN_FILES = {".gitattributes"}  # what the Hub itself puts into a new repo


@dataclass
class PushArguments:
    folder: str = field(metadata={"help": "folder of a drafter or a backbone, with its card"})
    repo: str = field(metadata={"help": "ORG/NAME on the Hub; created where there is none"})
    private: bool = field(default=False, metadata={"help": "create it private"})
    revision: str = field(default="main", metadata={"help": "branch to commit to; created where there is none"})
    dry_run: bool = field(
        default=False, metadata={"help": "check the folder, say what would be sent, and send nothing"}
    )
    collection: str | None = field(default=None, metadata={"help": "slug of a collection on the Hub to add it to"})


def push(arguments: PushArguments) -> dict[str, Any]:
    """Publishes the folder and returns what was done: repo, commit, version tag, files with their bytes.

    The repo then holds exactly the folder's files. What an interrupted upload has sent is not sent again. The token is
    the Hub client's own (HF_TOKEN, or that of `hf auth login`).

    Raises:
        ValueError, OSError: the folder may not be published, or the Hub refuses; one sentence.
    """
    api = HfApi()
    with hub_sentences(arguments.repo):  # at once, not after minutes with the weights
        validate_repo_id(arguments.repo)
        if not arguments.dry_run:
            refuse_read_token(api)
    checked = check_folder(arguments.folder)
    record = {
        "repo": arguments.repo,
        "kind": checked.kind,
        "base_model": checked.base_model,
        "bytes": sum(checked.files.values()),
        "files": checked.files,
        "dry_run": arguments.dry_run,
    }
    if arguments.dry_run:
        return record
    with hub_sentences(arguments.repo, arguments.revision):
        api.create_repo(arguments.repo, private=arguments.private or None, exist_ok=True)
        info = api.model_info(arguments.repo)
        refuse_other_repo(info, arguments)
        if arguments.revision != "main":
            api.create_branch(arguments.repo, branch=arguments.revision, exist_ok=True)
            info = api.model_info(arguments.repo, revision=arguments.revision)
        commit = upload(api, checked, info, arguments)
        version = tag_version(api, arguments.repo, commit)
        if arguments.collection is not None:
            api.add_collection_item(arguments.collection, arguments.repo, "model", exists_ok=True)
    url = f"{api.endpoint}/{arguments.repo}"
    return record | {"revision": commit, "version": version, "url": url, "collection": arguments.collection}


def refuse_read_token(api: HfApi) -> None:
    """Raises `OSError` for a token that may only read; the client itself raises where there is none."""
    access = (api.whoami().get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise OSError("the token can only read: make one with write permission and run `hf auth login` with it.")


def refuse_other_repo(info: ModelInfo, arguments: PushArguments) -> None:
    """Pushing replaces what a repo holds, so that one which is not ours, or not private, is left alone."""
    files = {sibling.rfilename for sibling in info.siblings or []} - HUB_OWN_FILES - {"README.md"}
    if files and "osprey" not in (info.tags or []):
        raise ValueError(f"{arguments.repo} holds another model already (no tag `osprey`): choose another --repo.")
    if arguments.private and not info.private:
        raise ValueError(f"{arguments.repo} exists and is public: make it private on the Hub, or leave out --private.")


def upload(api: HfApi, checked: CheckedFolder, info: ModelInfo, arguments: PushArguments) -> str:
    """Makes the branch hold exactly the folder's files, in one commit, and returns the commit's hash.

    Raises:
        OSError: what arrived is not what lies in the folder.
    """
    remote = {sibling.rfilename for sibling in info.siblings or []}
    stale = sorted(remote - checked.files.keys() - HUB_OWN_FILES)
    operations = [CommitOperationAdd(name, str(checked.folder / name)) for name in checked.files]
    commit = api.create_commit(
        arguments.repo,
        [*operations, *map(CommitOperationDelete, stale)],
        commit_message=f"Upload {checked.kind}",
        revision=arguments.revision,
        parent_commit=info.sha,
    ).oid
    arrived = api.verify_repo_checksums(arguments.repo, revision=commit, local_dir=checked.folder)
    wrong = [mismatch["path"] for mismatch in arrived.mismatches]
    wrong += sorted(set(arrived.extra_paths) & checked.files.keys())
    if wrong:
        raise OSError(
            f"checksum mismatch: {', '.join(wrong)} on the Hub is not what lies in {checked.folder} (was it changed "
            "during the upload?); the commit has no version tag: push again."
        )
    return commit


def tag_version(api: HfApi, repo: str, commit: str) -> str:
    """The commit's version tag; where it has none it gets the next of v1, v2, ..."""
    versions = {
        tag.name: tag.target_commit for tag in api.list_repo_refs(repo).tags if re.fullmatch(r"v[0-9]+", tag.name)
    }
    for name, target in versions.items():
        if target == commit:
            return name
    version = f"v{max((int(name[1:]) for name in versions), default=0) + 1}"
    api.create_tag(repo, tag=version, revision=commit)
    return version
