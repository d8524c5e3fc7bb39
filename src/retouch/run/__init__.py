"""A run, from its recipe to its last checkpoint.

``step.py`` is a training step from the tasks to the optimizer; ``collecting.py`` collects samples ahead of it, or in place of
groups that teach nothing. ``build.py`` builds the parts of a run, ``preflight.py`` tries one step of it, and ``session.py`` runs
all steps, with what happens after each of them in ``hooks.py``, ``evaluation.py``, ``heldout.py``, ``watch.py``, ``control.py``
and ``recorder.py``. ``folder.py`` opens the run's folder, ``checkpoint.py`` and ``ledger.py`` keep its state and its scores, and
``identity.py`` what it trains on. May import every package but ``inference``, ``trainer`` and those above them.
"""
