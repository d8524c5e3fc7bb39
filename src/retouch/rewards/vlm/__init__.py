"""Vision-language models as judges: their settings, the clients that send questions, and the parsers of the answers.

``base.py``, ``endpoint_settings.py`` and ``models.py`` contain the ``judge`` sections of a recipe; ``chat_client.py`` and
``local_model.py`` are their clients; ``questions.py`` and ``forms.py`` define questions and the formats of answers; ``answers/``
reads scores in free text. No module knows a reward. Modules may import ``rewards.facts``, ``rewards.weights``, ``rewards.worker``,
``rewards.quota`` and ``core``.
"""
