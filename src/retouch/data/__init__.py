"""Data sources and tasks: rows and images, the split into training and held-out tasks, and checks of data.

A data source is one class in ``sources/`` or in ``playground/``: it is the ``data`` section of a recipe, and its ``build`` creates
the tasks. ``kinds.py`` lists the sources. ``examination.py`` checks rows, and ``stored_check.py`` keeps the result; ``streaming/``
reads data sets while the run trains. Modules here import ``types``, ``config`` and ``core``. Those that are imported while a recipe
is parsed import neither torch nor ``datasets``.
"""
