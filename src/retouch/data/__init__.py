"""Data sources and tasks: rows and images, the split into training and held-out tasks, and checks of data.

A data source is a class in ``sources/`` or in a wing: it is the ``data`` section of a recipe, and its ``build`` creates the tasks.
``kinds.py`` lists them. ``checks.py`` reads every row before training, and ``streaming.py`` reads data sets while the run trains.
Modules that are imported while a recipe is parsed import neither torch nor ``datasets``.
"""
