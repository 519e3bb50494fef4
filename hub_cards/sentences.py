"""What the Hub's client raises, as one sentence that says what to do. No token ever enters one."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import errors
from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses

# By name, since the library that they are of is another one from version 2 of the client on.
UNREACHABLE = ("ConnectError", "ConnectTimeout", "ProxyError")
SIGN_IN = "run `hf auth login`, or set HF_TOKEN to a token of https://huggingface.co/settings/tokens"


@contextmanager
def hub_sentences(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turns whatever the client raises about `repo` into a `ValueError` or an `OSError` of one sentence."""
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{repo!r} is not the name of a repo: on the Hub it is ORG/NAME.") from error
    except (HTTPError, OSError, RuntimeError, errors.RevisionResolutionError) as error:
        sentence = explain(error, repo, revision)
        if sentence is None:
            raise
        raise OSError(sentence) from error


def explain(error: BaseException, repo: str, revision: str | None = None) -> str | None:
    """The sentence for an error of the client, None where it is not the Hub's."""
    not_cached = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
    if (not_cached or isinstance(error, RuntimeError)) and isinstance(error.__cause__, HTTPError):  # an upload's
        error = error.__cause__
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"pushing to {repo} needs a token, and there is none: {SIGN_IN}."
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then {SIGN_IN}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repo {repo} on the Hub, or it is private: check the name; for a private repo {SIGN_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}: name a branch, a tag (v1, v2, ...) or a commit hash of it."
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error, repo)
    unreachable = type(error).__name__ in UNREACHABLE
    if not_cached and (unreachable or not isinstance(error, HTTPError)):
        return (
            f"{repo}{f' at {revision}' if revision else ''} is not (wholly) in the local cache, and the Hub cannot be "
            "reached: unset HF_HUB_OFFLINE if it is set, check the network, and run again."
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"the Hub cannot be reached for {repo}: HF_HUB_OFFLINE is set; unset it, and run again."
    if unreachable:
        return f"the Hub cannot be reached for {repo} ({type(error).__name__}): check the network, and run again."
    if isinstance(error, HTTPError) or "Consistency check failed" in str(error):
        return f"the connection to the Hub broke ({type(error).__name__}) at {repo}: run again; what is done is kept."
    return None


def _explain_status(error: errors.HfHubHTTPError, repo: str) -> str:
    status, headers = error.response.status_code, error.response.headers
    if status == 401:
        return f"the Hub does not accept the token (wrong or expired) for {repo}: {SIGN_IN}."
    if status == 403:
        return f"the token may not do this with {repo}: use one with write permission for its organisation."
    if status == 409:
        return f"the Hub reports a conflict at {repo} ({_said(error)}): run again."
    if status == 412:
        return f"{repo} was changed by someone else in the meantime: look at what is new there, then run again."
    if status == 429:
        wait = f"in {headers['Retry-After']} s" if headers.get("Retry-After", "").isdigit() else "in a few minutes"
        return f"the Hub limits the rate of requests (429) at {repo}: run again {wait}; what is done is kept."
    return f"the Hub answered {status} for {repo} ({_said(error)}): run again, or later where it is the Hub's fault."


def _said(error: errors.HfHubHTTPError) -> str:
    return (error.server_message or "no reason given").splitlines()[0].strip().rstrip(".")
