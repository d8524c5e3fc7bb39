"""The grammar of image tokens in requests to a vLLM server: free text, then an image of a fixed form.

The server imports this file in its own environment, so the file imports only torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

KEY = "retouch_form"
"""The key of the grammar in a request's ``extra_args``."""
_MAX_PLACES, _MAX_RANGES = 2**17, 2**12


@runtime_checkable
class ImageGrammar(Protocol):
    """A grammar (``retouch.protocols.Grammar``) of two vocabularies, text and visual tokens. Text is sampled until the token
    ``begin``. The i-th token after it is ``form[i]`` (f,), or sampled from the second vocabulary where that is -1."""

    vocabularies: Tensor
    begin: int
    form: Tensor


def grammar_to_json(grammar: ImageGrammar) -> dict[str, Any]:
    """The grammar as JSON, with its vocabularies as ranges of ids [first, last + 1]."""
    text, visual = grammar.vocabularies
    return {"begin": grammar.begin, "form": grammar.form.tolist(), "text": _ranges(text), "drawn": _ranges(visual)}


def check_grammar(document: Any) -> None:
    """Raise ValueError unless the document has the form that ``grammar_to_json`` returns."""
    if not isinstance(document, Mapping) or set(document) != {"begin", "form", "text", "drawn"}:
        raise ValueError(f"extra_args.{KEY} is not a grammar: give begin, form, text and drawn")
    if not _is_id(document["begin"]):
        raise ValueError(f"extra_args.{KEY}.begin: give the id with which the form begins")
    form = document["form"]
    if not isinstance(form, Sequence) or not 0 < len(form) <= _MAX_PLACES or not all(each == -1 or _is_id(each) for each in form):
        raise ValueError(f"extra_args.{KEY}.form: give at least one id, -1 where it is sampled")
    for name in ("text", "drawn"):
        ranges = document[name]
        if (
            not isinstance(ranges, Sequence)
            or not 0 < len(ranges) <= _MAX_RANGES
            or not all(
                (isinstance(each, Sequence) and len(each) == 2 and _is_id(each[0]) and _is_id(each[1]) and each[0] < each[1])
                for each in ranges
            )
        ):
            raise ValueError(f"extra_args.{KEY}.{name}: give ranges of ids, each as its first id and the one after its last")


class GrammarMask:
    """Applies a grammar, in the form of ``grammar_to_json``, to logits over ``vocabulary`` ids. A forced id outside the vocabulary
    is replaced by its last id, so that the client rejects the response and the server keeps running."""

    def __init__(self, document: Mapping[str, Any], *, vocabulary: int, device: torch.device) -> None:
        self.begin = int(document["begin"])
        allowed = torch.zeros(2, vocabulary, dtype=torch.bool)
        for number, name in enumerate(("text", "drawn")):
            for first, after in document[name]:
                allowed[number, first:after] = True
        self._allowed = allowed.to(device)
        # An index outside the logits would crash the whole server.
        self._form = torch.tensor(document["form"], device=device).clamp(max=vocabulary - 1)

    def __call__(self, logits: Tensor, since: Tensor) -> Tensor:
        """Logits (n, v) with -inf where an id is not allowed. ``since`` (n,): tokens since ``begin``, below 0 before ``begin``."""
        begun = since >= 0
        forced = torch.where(begun, self._form[since.clamp(0, len(self._form) - 1)], -1)
        free = logits.masked_fill(~self._allowed[begun.long()], -torch.inf)
        only = torch.full_like(logits, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
        return torch.where(forced[:, None] >= 0, only, free)


def _ranges(allowed: Tensor) -> list[list[int]]:
    edges = torch.nn.functional.pad(allowed.int().cpu(), (1, 1)).diff()
    return torch.stack([(edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]], dim=1).tolist()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
