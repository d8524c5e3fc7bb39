"""What all tests share: Hypothesis without a clock, since a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("retouch", deadline=None)
settings.load_profile("retouch")
