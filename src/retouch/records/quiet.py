"""What third parties would print between our lines."""

import diffusers.utils.logging
import transformers.utils.logging


def quiet() -> None:
    """No progress bars while weights load, and no warnings of transformers, one of which misleads.

    It says that sliding windows are not implemented for this attention, though its mask has them (tests/pretraining checks).
    """
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
