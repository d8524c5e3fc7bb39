"""What all tests share: Hypothesis without a clock, since a busy machine is no failure; and what packaged recipes ask of the
environment."""

import os

from hypothesis import settings

settings.register_profile("retouch", deadline=None)
settings.load_profile("retouch")

for name, value in {
    "APP__DATA_DIR": "data",
    "APP__BASE_EXP_DIR": "runs",
    "APP__REWARD_FUNCTION_API_BASE": "http://127.0.0.1:4877",
    "APP__RUN_NAME": "named",
}.items():
    os.environ.setdefault(name, value)
