"""The endpoints of ``retouch view --try``: sample a task with the untrained and the trained weights of a run, in a separate
process.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from retouch.config import imports
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.records.ownership import current_owner
from retouch_view.live.requests import FRESH, read_object, run_of
from retouch_view.live.runs import Catalogue

MOST_BYTES = 40_000_000
MOST_CHARACTERS = 10_000
_LARGEST_SEED = 2**31
_LINE_BYTES = 512 * 2**20
_ERROR_BYTES = 8192
_POLL_SECONDS = 0.5
_STOP_SECONDS = 10
_T = TypeVar("_T")


class TrialWorker:
    """One worker process, which does one job at a time and is killed if the client disconnects. ``device``: None is the device of
    the recipe, or the CPU for a run that is training."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []
        self._errors = bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._readers: set[asyncio.Task[Any]] = set()
        self._busy = False

    async def events(self, folder: RunFolder, asked: Mapping[str, Any], request: Request) -> AsyncIterator[str]:
        """Yield lines of JSON: ``stage`` with the number of model ``calls`` so far, and at the end ``done`` or ``error``. Empty
        lines keep the connection alive. If the client disconnects, the process is killed."""
        if self._busy:
            yield json.dumps({"error": "another try is being computed; wait until it is done"}) + "\n"
            return
        self._busy = True
        device = self._device or ("cpu" if current_owner(folder.root) is not None else None)
        job = {**asked, "run": str(folder.root.resolve()), "device": device}
        complete = False
        try:
            process = self._process
            if process is None or process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                command, env = imports.python("-m", "retouch_view.live.trial_worker"), imports.environment()
                self._process = process = await asyncio.create_subprocess_exec(
                    *command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE_BYTES
                )
                self._errors.clear()
                self._reading = self._reader(self._keep_errors(process))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job).encode() + b"\n")
            await process.stdin.drain()
            reading = self._reader(process.stdout.readline())
            while not complete:
                done, _ = await asyncio.wait({reading}, timeout=_POLL_SECONDS)
                if await request.is_disconnected():
                    return
                if not done:
                    yield "\n"
                    continue
                line = reading.result().decode()
                if not line:
                    yield json.dumps({"error": await self._last_words()}) + "\n"
                    return
                complete = not line.startswith('{"stage"')
                yield line
                if not complete:
                    reading = self._reader(process.stdout.readline())
        except (BrokenPipeError, ConnectionResetError):
            yield json.dumps({"error": await self._last_words()}) + "\n"
        finally:
            self._busy = False  # no await in this block: a cancelled task cannot wait
            if not complete:
                self.close()

    def _reader(self, content: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start to read from a process, which ends with the process at the latest."""
        reader = asyncio.create_task(content)
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return reader

    def close(self) -> None:
        """Kill the process, without waiting for its end."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            self._killed = [*(each for each in self._killed if each.returncode is None), process]

    async def stop(self) -> None:
        """Kill the process, and wait until all killed processes have ended and their pipes are closed."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                for process in self._killed:
                    await process.wait()
                    assert process.stdin is not None
                    process.stdin.close()
                    with suppress(OSError):
                        await process.stdin.wait_closed()
                await asyncio.gather(*self._readers, return_exceptions=True)

    async def _keep_errors(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(_ERROR_BYTES):
            self._errors += part
            del self._errors[:-_ERROR_BYTES]

    async def _last_words(self) -> str:
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=5)
        lines = [line for line in self._errors.decode(errors="replace").splitlines() if line.strip()]
        return f"the process ended: {lines[-1].strip()[:500]}" if lines else "the process ended without a message"


def try_routes(catalogue: Catalogue, bench: TrialWorker) -> list[Route]:
    """``GET /api/runs/NAME/checkpoints``, with the ``steps`` and the ``inputs`` of the model; and ``POST /api/runs/NAME/try`` with
    ``instruction``, ``step``, ``seed``, the images ``image``, ``mask`` and ``reference`` (base64 or null), and ``context``
    ("reference" or null), which replies with lines of JSON."""

    async def checkpoints(request: Request) -> Response:
        run = await run_of(request, catalogue)
        found = {"steps": await run_in_threadpool(_steps, run.folder), "inputs": await run_in_threadpool(trial_inputs, run.folder)}
        return JSONResponse(found, headers=FRESH)

    async def attempt(request: Request) -> Response:
        run = await run_of(request, catalogue)
        asked = _checked(await read_object(request, max_bytes=MOST_BYTES), await run_in_threadpool(_steps, run.folder))
        return StreamingResponse(bench.events(run.folder, asked, request), media_type="application/x-ndjson")

    return [Route("/api/runs/{name}/checkpoints", checkpoints), Route("/api/runs/{name}/try", attempt, methods=["POST"])]


def _steps(folder: RunFolder) -> list[int]:
    names = (path.parent.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*/manifest.json"))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def _checked(asked: Mapping[str, Any], steps: list[int]) -> dict[str, Any]:
    """Return the job for the worker. Raises ValueError if a value is missing or invalid."""
    instruction, step, seed, context = (asked.get(name) for name in ("instruction", "step", "seed", "context"))
    images = {name: asked.get(name) for name in ("image", "mask", "reference")}
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError("the prompt is empty")
    if len(instruction) > MOST_CHARACTERS:
        raise ValueError(f"the prompt has more than {MOST_CHARACTERS} characters")
    for name, image in images.items():
        if not isinstance(image, str | None):
            raise ValueError(f"the {name} must be a base64 string or null")
    if context not in (None, "reference"):
        raise ValueError("the context must be 'reference' or null")
    if type(step) is not int or step not in steps:
        raise ValueError("this run has no checkpoint of this step")
    if type(seed) is not int or not 0 <= seed < _LARGEST_SEED:
        raise ValueError(f"the seed must be a number from 0 to {_LARGEST_SEED - 1}")
    return {"instruction": instruction, **images, "context": context, "step": step, "seed": seed}


def trial_inputs(folder: RunFolder) -> Mapping[str, bool]:
    """Return whether the page asks for a ``mask`` and a ``reference`` image, and whether the reference can be ``context``
    (``retouch.inference.sampling``). All are false if the recipe of the run cannot be read; a try then fails with the reason."""
    try:
        recipe = parse(folder.read_recipe()["recipe"])
    except (ValueError, OSError):
        return {"mask": False, "reference": False, "context": False}
    takes = recipe.image_model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
    mask, reference = takes is not None and takes.mask, recipe.policy.train.reads_reference
    return {"mask": mask, "reference": reference, "context": mask and reference and recipe.renderer is None}
