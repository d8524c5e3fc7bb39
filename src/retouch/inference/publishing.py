"""Pushes a run's weights to the Hugging Face Hub while it trains: written as `retouch export` writes them, sent by a thread.

The Hub may fail in the middle of a run and costs it nothing: what could not be sent stays in the run's folder, and the log says how
to send it by hand. What can be known before the first step is asked then: whether there is a token, and whether it may write.
"""

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError

from retouch.assembly.assembly import Assembly
from retouch.inference.exporting import write_export
from retouch.recipe.keys import Push
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder

log = logging.getLogger("retouch")

UNSENT: tuple[type[Exception], ...] = tuple(HfHubHTTPError.__bases__)
"""The errors of the Hub's HTTP client, whose package differs between its versions, and of the system."""


def unable() -> str | None:
    """Why nothing can be pushed from here; None where it may be tried."""
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if get_token() is None:
        return "there is no token of the Hugging Face Hub: set HF_TOKEN or run `hf auth login`"
    return None


def open_publisher(recipe: Recipe, folder: RunFolder, *, first: bool) -> "Publisher | None":
    """The publisher of a recipe that pushes, on the ``first`` rank; None elsewhere, and, with a line in the log, where it cannot.

    Makes the repository if there is none. ValueError where the Hub refuses this token the repository.
    """
    if recipe.push is None or not first:
        return None
    if (reason := unable()) is not None:
        log.warning("push is off: %s", reason)
        return None
    api = HfApi()
    try:
        api.create_repo(recipe.push.repo, private=recipe.push.private, exist_ok=True)
    except HfHubHTTPError as error:
        raise ValueError(
            f"push.repo {recipe.push.repo}: the Hugging Face Hub refuses it ({error}); name a repository that this token may write "
            "to, or train without: --set push=null"
        ) from error
    except UNSENT as error:
        log.warning("the Hugging Face Hub does not answer (%s); pushes are tried all the same", error)
    return Publisher(recipe.push, folder, api)


class Publisher:
    """Sends one export at a time; ``close`` waits for what is under way."""

    def __init__(self, push: Push, folder: RunFolder, api: HfApi) -> None:
        self._settings = push
        self._folder = folder
        self._api = api
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._sent: list[Future[None]] = []

    def after(self, parts: Assembly, step: int, *, last: bool) -> None:
        """Write the weights aside and send them, where they are due after this step."""
        every = self._settings.every
        if not last and (every == 0 or step % every):
            return
        revision = f"step-{step:06d}"
        to = self._folder.root / "push" / revision
        shutil.rmtree(to, ignore_errors=True)  # of a run that was killed there
        write_export(parts, to, step=step)
        self._sent.append(self._thread.submit(self._send, to, [revision, "main"] if last else [revision]))

    def close(self) -> None:
        """Wait until all is sent."""
        if any(not future.done() for future in self._sent):
            log.info("waiting for the Hugging Face Hub to take the last push")
        self._thread.shutdown()
        for future in self._sent:
            future.result()

    def _send(self, folder: Path, revisions: list[str]) -> None:
        repo = self._settings.repo
        for revision in revisions:
            try:
                if revision != "main":
                    self._api.create_branch(repo, branch=revision, exist_ok=True)
                message = f"{self._folder.name}, {folder.name}"
                self._api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=message)
            except UNSENT as error:
                log.warning("could not push to %s at %s: %s", repo, revision, error)
                log.warning("the weights stay here; send them with: hf upload %s %s --revision %s", repo, folder, revision)
                return
            log.info("pushed %s to %s at %s", folder.name, repo, revision)
        shutil.rmtree(folder)
