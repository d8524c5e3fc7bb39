"""From many columns to one number: weighted sums and formulas, several rewards as one, and a reward whose scores are
calibrated by votes.

Start at ``combination.py::combination``. May import ``rewards.base`` and ``rewards.kinds``; torch only inside functions.
"""
