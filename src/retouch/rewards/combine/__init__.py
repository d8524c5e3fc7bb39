"""Combine many columns into one number: weighted sums and formulas, several rewards as one reward, and a reward with scores that
are calibrated on votes.

Start at ``combination.py::combination``. May import ``rewards.base`` and ``rewards.kinds``; torch only inside functions.
"""
