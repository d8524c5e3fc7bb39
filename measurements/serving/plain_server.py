"""A usual reward server, for comparison: FastAPI, PNGs as base64 in JSON, and the scorer is called in the request handler.

python measurements/serving/plain_server.py PORT BASE EACH
"""

import base64
import io
import sys

import uvicorn
from fastapi import FastAPI
from PIL import Image
from pydantic import BaseModel
from scorers import Fixed

from retouch.types import Sample, Task


class Request(BaseModel):
    prompts: list[str]
    images: list[str]


def build(scorer: Fixed) -> FastAPI:
    """The app of the plain server."""
    app = FastAPI()

    @app.post("/compute")
    async def compute(request: Request) -> dict[str, list[float]]:
        pictures = [Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB") for text in request.images]
        samples = [Sample(Task(id=p, instruction=p), image) for p, image in zip(request.prompts, pictures, strict=True)]
        return {"rewards": scorer(samples)["score"].tolist()}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


if __name__ == "__main__":
    port, base, each = sys.argv[1:]
    uvicorn.run(build(Fixed(float(base), float(each))), port=int(port), log_level="warning")
