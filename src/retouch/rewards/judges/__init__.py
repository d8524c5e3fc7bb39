"""Vision-language models as judges: rewards that phrase questions, a panel that repeats them, and a client that gets them answered.

Example::

    client = ChatClient(model="Qwen/Qwen2.5-VL-72B-Instruct", base_url="http://localhost:4877/v1")
    reward = AspectsReward(Panel(client, repeats=3, temperature=0.7))
    reward([Sample(task, image)])  # {"alignment": ..., "quality": ..., "identity": ...}
"""

from retouch.rewards.judges.aspects import AspectsReward
from retouch.rewards.judges.complex_edit import ComplexEditReward
from retouch.rewards.judges.ground import GroundReward
from retouch.rewards.judges.pairwise import WinRateReward
from retouch.rewards.judges.panel import Panel
from retouch.rewards.judges.viescore import EditScore, VieScore
from retouch.rewards.judges.words import DigitReward, YesReward
from retouch.rewards.vlm.asking import Answer, Asker, Question
from retouch.rewards.vlm.backoff import Backoff
from retouch.rewards.vlm.chat import ChatClient, Patience

__all__ = [
    "Answer",
    "Asker",
    "AspectsReward",
    "Backoff",
    "ChatClient",
    "ComplexEditReward",
    "DigitReward",
    "EditScore",
    "GroundReward",
    "Panel",
    "Patience",
    "Question",
    "VieScore",
    "WinRateReward",
    "YesReward",
]
