"""Parsing of scores in the text of a judge's answer. Start at ``scores.py::read_scores``. An ambiguous text has no score.

``scales.py``: the allowed numbers. ``json_scores.py``: answers in JSON. ``labelled_scores.py``: "Score: 7/10" in prose.
``visible_text.py``: the answer without reasoning and quotations, and refusals. ``retractions.py``: scores that the text retracts.
``unseen_images.py``: judges that could not see the images. ``other_scales.py``: scores on another scale than the requested one.

Modules may import only ``types``.
"""
