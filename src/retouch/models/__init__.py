"""Model families: the adapters of published architectures to the two kinds of policies, one folder per family.

``base.py`` and ``language.py`` are the base classes of the recipe's sections, ``kinds.py`` lists the families, and ``train.py``
says which weights are trained. ``common`` is shared by the families. It may import ``core``, ``config``, ``types`` and
``protocols``; it knows no policy, objective or reward."""
