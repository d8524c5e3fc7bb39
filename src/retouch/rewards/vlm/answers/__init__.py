"""Scores in the text of a judge's answer. Start at ``scores.py::read_scores``; whatever can be understood in two ways has no score.

``scales.py``: which numbers are legal. ``json_scores.py``: answers in JSON. ``labelled_scores.py``: "Score: 7/10" in prose.
``visible_text.py``: the answer without thoughts and quotations, and refusals. ``retractions.py``: a score that the text takes back.
``unseen_images.py``: a judge that could not see. ``other_scales.py``: a score on another scale than the requested one.

It may import only ``types``.
"""
