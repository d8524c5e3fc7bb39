"""Whether a text that a policy wrote is one that a text-to-image model reads to its end."""

from retouch.models.flux.model import Flux
from retouch.models.qwen_image.model import QwenImage
from retouch.models.sd3.model import SD3
from retouch.models.z_image.model import ZImage
from retouch.types import Task


def readable(model: SD3 | Flux | QwenImage | ZImage, prompt: str) -> bool:
    """False where the model would refuse the prompt: too long for it, or spelling one of its special tokens."""
    try:
        if isinstance(model, QwenImage):
            model.prepare([Task(id="written", instruction=prompt)])
        else:
            model.text.check(prompt, "written")
    except ValueError:
        return False
    return True
