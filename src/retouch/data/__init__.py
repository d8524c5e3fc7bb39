"""The tasks of a run: data sources, their rows and images, the split into training and held-out tasks, and the guard against
training on known test sets.

A data source is one class in ``sources/`` or in ``playground/``: it is the ``data`` section of a recipe, and
<<<<<<< HEAD
``build`` makes the tasks. ``kinds.py`` lists the sources. ``examination.py`` and ``kept_check.py`` check rows and keep the result;
``streaming/`` reads data sets while the run trains. Modules here import ``types``, ``config`` and ``core``.
Those that a recipe's parse imports import no torch and no ``datasets``.
=======
``build`` makes the tasks. ``kinds.py`` lists the sources. ``examination.py`` checks rows and ``kept_check.py`` stores the result;
``streams.py`` and ``stream_loader.py`` read data sets while the run trains. Modules here import ``types``, ``config`` and ``core``.
A module that is imported while a recipe is parsed imports neither torch nor ``datasets``.
>>>>>>> prose
"""
