"""A grammar as a request tells it to a vLLM server: text, then what has a fixed form.

The server's half of it runs in vLLM's environment, so nothing here imports more than torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

KEY = "retouch_form"
"""Under which a request's ``extra_args`` have it."""
PLUGIN = "retouch.policies.engines.plugin:FormProcessor"
"""What the server is started with: ``vllm serve --logits-processors``."""
_MOST_PLACES, _MOST_RANGES = 2**17, 2**12


@runtime_checkable
class Formed(Protocol):
    """A grammar (``retouch.protocols.Grammar``) of two sets. Text is drawn from the first set until ``begin``. After it, place
    ``i`` holds the token ``form[i]`` (f,), or a token of the second set where that is -1."""

    vocabularies: Tensor
    begin: int
    form: Tensor


def told(grammar: Formed) -> dict[str, Any]:
    """The grammar as JSON; its sets as ranges of ids, (first, after the last) each."""
    text, drawn = grammar.vocabularies
    return {"begin": grammar.begin, "form": grammar.form.tolist(), "text": _ranges(text), "drawn": _ranges(drawn)}


def check(said: Any) -> None:
    """ValueError where this is not what ``told`` makes."""
    if not isinstance(said, Mapping) or set(said) != {"begin", "form", "text", "drawn"}:
        raise ValueError(f"extra_args.{KEY} is no grammar: give begin, form, text and drawn")
    if not _id(said["begin"]):
        raise ValueError(f"extra_args.{KEY}.begin: give the id with which the form begins")
    form = said["form"]
    if not isinstance(form, Sequence) or not 0 < len(form) <= _MOST_PLACES or not all(each == -1 or _id(each) for each in form):
        raise ValueError(f"extra_args.{KEY}.form: give at least one id, -1 where it is drawn")
    for name in ("text", "drawn"):
        ranges = said[name]
        if not isinstance(ranges, Sequence) or not 0 < len(ranges) <= _MOST_RANGES or not all(_range(each) for each in ranges):
            raise ValueError(f"extra_args.{KEY}.{name}: give ranges of ids, each as its first and the one after its last")


class Form:
    """What ``told`` made, for logits of ``vocabulary`` ids. An id beyond them cannot be drawn, as whoever asked then sees."""

    def __init__(self, said: Mapping[str, Any], *, vocabulary: int, device: torch.device) -> None:
        self.begin = int(said["begin"])
        sets = torch.zeros(2, vocabulary, dtype=torch.bool)
        for number, name in enumerate(("text", "drawn")):
            for first, after in said[name]:
                sets[number, first:after] = True
        self._sets = sets.to(device)
        # An index beyond the logits would end the whole server.
        self._form = torch.tensor(said["form"], device=device).clamp(max=vocabulary - 1)

    def restrict(self, logits: Tensor, since: Tensor) -> Tensor:
        """Logits (n, v) with -inf where a token may not stand; ``since`` (n,): tokens since ``begin``, below 0 before it."""
        begun = since >= 0
        forced = torch.where(begun, self._form[since.clamp(0, len(self._form) - 1)], -1)
        drawn = logits.masked_fill(~self._sets[begun.long()], -torch.inf)
        only = torch.full_like(logits, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
        return torch.where(forced[:, None] >= 0, only, drawn)


def _ranges(allowed: Tensor) -> list[list[int]]:
    edges = torch.nn.functional.pad(allowed.int().cpu(), (1, 1)).diff()
    return torch.stack([(edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]], dim=1).tolist()


def _id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _range(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and _id(value[0]) and _id(value[1]) and value[0] < value[1]
