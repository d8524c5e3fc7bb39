"""From many columns to one number: weighted sums and formulas, and several rewards as one.

Start at ``combination.py::combination``. May import ``rewards.base`` and ``rewards.kinds``; torch only inside functions.
"""
