"""Pushes a run's weights to the Hugging Face Hub during training: exports them like ``retouch export``, and uploads them in a
thread.

A failure of the Hub does not stop the run: the files that could not be uploaded stay in the run's folder, and the log says how to
upload them by hand. Before the first step, the run checks that there is a token and that it may write.
"""

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError

from retouch.inference.exporting import write_export
from retouch.recipe.keys import Push
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder
from retouch.run.build import Assembly
from retouch.run.hooks import Hook, StepResult
from retouch.run.step import ScoredRollout

log = logging.getLogger("retouch")

UNSENT: tuple[type[Exception], ...] = tuple(HfHubHTTPError.__bases__)
"""The errors of the operating system and of the Hub's HTTP client, whose package depends on the version of huggingface_hub."""
FAILED: tuple[type[Exception], ...] = (*UNSENT, ValueError)
"""``UNSENT``, and the error for a model card whose metadata the Hub refuses."""


def why_not_pushable() -> str | None:
    """The reason why this process cannot push; None if a push can be tried."""
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if get_token() is None:
        return "there is no token for the Hugging Face Hub: set HF_TOKEN or run `hf auth login`"
    return None


def open_publisher(recipe: Recipe, folder: RunFolder, *, is_main: bool) -> "Publisher | None":
    """The publisher of a recipe with ``push`` on the main rank. None on other ranks, and if nothing can be pushed, which is logged.

    Creates the repository if it does not exist. Raises ValueError if this token may not write to the repository.
    """
    if recipe.push is None or not is_main:
        return None
    if (reason := why_not_pushable()) is not None:
        log.warning("push is off: %s", reason)
        return None
    api = HfApi()
    try:
        _create_repo(
            api, recipe.push.repo, private=recipe.push.private, key="push.repo", or_else="train without it: --set push=null"
        )
    except UNSENT as error:
        log.warning("the Hugging Face Hub does not answer (%s); the run will still try to push", error)
    return Publisher(recipe.push, folder, api)


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a folder to a repository, which is created if it does not exist; returns the address.

    Raises ValueError if there is no token, or if it may not write to the repository.
    """
    if (reason := why_not_pushable()) is not None:
        raise ValueError(reason)
    api = HfApi()
    _create_repo(api, repo, private=private, key="repo", or_else="save_pretrained to a folder")
    return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message))


def _create_repo(api: HfApi, repo: str, *, private: bool, key: str, or_else: str) -> None:
    try:
        api.create_repo(repo, private=private, exist_ok=True)
    except HfHubHTTPError as error:
        raise ValueError(
            f"{key} {repo}: the Hugging Face Hub refused it ({error}); name a repository that this token may write to, or {or_else}"
        ) from error


class Publisher(Hook):
    """Uploads one export at a time; ``close`` waits for running uploads."""

    station = "saved"

    def __init__(self, push: Push, folder: RunFolder, api: HfApi) -> None:
        self._settings = push
        self._folder = folder
        self._api = api
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._uploads: list[Future[None]] = []

    def attach(self, parts: Assembly) -> None:
        self._parts = parts

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        if step.step < step.steps and self._settings.every and step.step % self._settings.every == 0:
            self._push(step.step, last=False)

    def ended(self, step: int, *, finished: bool) -> None:
        if finished:
            self._push(step, last=True)

    def _push(self, step: int, *, last: bool) -> None:
        """Export the weights and start the upload. ``last``: this is the last step of the run."""
        revision = f"step-{step:06d}"
        to = self._folder.root / "push" / revision
        shutil.rmtree(to, ignore_errors=True)  # left over from a killed run
        write_export(self._parts, to, step=step)
        self._uploads.append(self._thread.submit(self._upload, to, [revision, "main"] if last else [revision]))

    def close(self) -> None:
        """Wait until everything is uploaded."""
        if any(not future.done() for future in self._uploads):
            log.info("waiting for the last push to the Hugging Face Hub")
        self._thread.shutdown()
        for future in self._uploads:
            future.result()

    def _upload(self, folder: Path, revisions: list[str]) -> None:
        repo = self._settings.repo
        for revision in revisions:
            try:
                if revision != "main":
                    self._api.create_branch(repo, branch=revision, exist_ok=True)
                message = f"{self._folder.name}, {folder.name}"
                self._api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=message)
            except FAILED as error:
                log.warning("could not push to %s at %s: %s", repo, revision, error)
                log.warning(
                    "the weights stay on this machine; upload them with: hf upload %s %s --revision %s", repo, folder, revision
                )
                return
            log.info("pushed %s to %s at %s", folder.name, repo, revision)
        shutil.rmtree(folder)
