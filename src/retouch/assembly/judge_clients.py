"""Who answers a judge's questions, opened from a recipe's section: an endpoint, or a model in this process."""

import torch

from retouch.recipe import judges as recipe_judges
from retouch.recipe.judges import Endpoint, InProcess
from retouch.rewards.quota.quota import Quota
from retouch.rewards.vlm.asking import Asker
from retouch.rewards.vlm.backoff import Backoff
from retouch.rewards.vlm.chat import ChatClient, Patience
from retouch.rewards.vlm.prices import Prices


class Askers:
    """Each asker is opened once, however many rewards of a recipe name it. ``device``: for models whose section names none."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._opened: dict[str, Asker] = {}

    def open(self, section: Endpoint | InProcess) -> Asker:
        """ValueError: no key in the environment, no weights, or a package that is not installed."""
        name = section.model_dump_json()
        if name not in self._opened:
            self._opened[name] = _client(section) if isinstance(section, Endpoint) else self._local(section)
        return self._opened[name]

    def _local(self, section: InProcess) -> Asker:
        from retouch.rewards.vlm.in_process import InProcessJudge

        device = self._device if section.device is None else section.device
        return InProcessJudge(section.path, device=device, dtype=getattr(torch, section.dtype))


def _client(section: Endpoint) -> ChatClient:
    patience = Patience(
        timeout=section.timeout,
        deadline=section.deadline,
        attempts=section.attempts,
        backoff=Backoff(base=section.pause, cap=section.longest_pause),
    )
    return ChatClient(
        model=section.model,
        base_url=section.base_url,
        key=section.key,
        concurrency=section.concurrency,
        patience=patience,
        typed=section.typed,
        guided=section.guided,
        quota=None if section.quota is None else _quota(section.quota),
        prices=None if section.prices is None else Prices(section.prices.input, section.prices.output),
    )


def _quota(section: recipe_judges.Quota) -> Quota:
    return Quota(
        requests_per_minute=section.requests_per_minute,
        units_per_minute=section.tokens_per_minute,
        largest=section.tokens_per_question,
        calls=section.calls,
        cost=section.cost,
        file=section.file,
    )
