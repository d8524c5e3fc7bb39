"""Parsing of scores in the text of a judge's answer. Start at ``scores.py::read_scores``. An ambiguous text has no score.

``scores.py`` reads answers in JSON and labelled scores in prose. ``wording.py`` has the allowed numbers, and recognises reasoning,
quotations, refusals, scores that the text retracts or that are on another scale, and judges that could not see the images.

Modules may import only ``types`` and ``records``.
"""
