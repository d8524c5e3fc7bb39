"""Vision-language models as judges: where they are asked, how a question goes out, and how its answer is read.

``base.py``, ``endpoint.py`` and ``in_process.py`` are the ``judge`` sections of a recipe; ``chat_client.py`` and ``local_model.py``
are their clients; ``questions.py`` and ``forms.py`` say what a question and an answer are; ``answers/`` reads scores in free text.
Nothing here knows a reward. May import ``rewards.facts``, ``rewards.client`` (event loop), ``rewards.quota`` and ``core``.
"""
