"""Why an attempt brought no scores, and what follows from it."""

from dataclasses import dataclass

_FINAL = frozenset({400, 401, 403, 404, 405, 411, 413, 414, 415, 422, 431})


@dataclass(slots=True, eq=False)
class Fault(Exception):
    """``kind``: a short name. ``final``: asking again cannot help. ``tried``: a server may have worked on it, so it is one of the
    attempts. ``blame``: counts against the endpoint. ``rest``: seconds that the endpoint asked to be left alone.
    """

    kind: str
    final: bool = False
    tried: bool = True
    blame: bool = True
    rest: float = 0.0

    def __post_init__(self) -> None:
        Exception.__init__(self, self.kind)


def of_status(status: int, retry_after: float) -> Fault:
    """The fault that an answer with another status than 200 is."""
    if status == 429:
        return Fault("busy", tried=False, blame=False, rest=max(retry_after, 0.05))
    if status == 503:
        return Fault("unavailable", tried=False, rest=retry_after)
    if status == 504:
        return Fault("deadline", blame=False)
    return Fault(f"http_{status}", final=status in _FINAL)
