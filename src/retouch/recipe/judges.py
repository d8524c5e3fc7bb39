"""Sections of rewards that ask a vision-language model, and of who answers them."""

import re
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.recipe.reward_section import RewardDevice, RewardSection
from retouch.rewards.judges.aspects import Aspect
from retouch.rewards.judges.words import By


def _variable(name: str) -> str:
    # What was given is not repeated: it may be the key itself.
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise ValueError("give the name of an environment variable, OPENAI_API_KEY say; a key itself never stands in a recipe")
    return name


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give an address as http://host:port/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("give the address alone, without a user, a key or a query in it")
    return url.rstrip("/")


def _with_version(url: str) -> str:
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


Variable: TypeAlias = Annotated[str, AfterValidator(_variable)]
Address: TypeAlias = Annotated[str, AfterValidator(_address)]
VersionedAddress: TypeAlias = Annotated[Address, AfterValidator(_with_version)]


class Quota(Section):
    """How much is asked of the endpoint at most, by all ranks together; a budget that is spent ends the run with a checkpoint."""

    requests_per_minute: Positive | None = None
    """Requests in any minute."""
    tokens_per_minute: Positive | None = None
    """Tokens in any minute, read and written."""
    tokens_per_question: Positive = 8000.0
    """Most tokens that one question takes: what counts until its answer tells."""
    calls: Count | None = None
    """Requests in all."""
    cost: Positive | None = None
    """Dollars in all, by ``prices``."""
    file: str | None = None
    """File in which the processes of a machine keep count together, and from run to run; null gives each rank its share."""


class Prices(Section):
    """What the endpoint charges, in dollars for a million tokens: for estimates, and for a quota of cost."""

    input: NonNegative
    """Of what is read."""
    output: NonNegative
    """Of what is written."""


class Endpoint(Section):
    """A model behind an OpenAI-compatible address: OpenAI, vLLM, SGLang, llama.cpp."""

    kind: Literal["endpoint"]
    model: str
    """The model's name there."""
    base_url: VersionedAddress = "https://api.openai.com/v1"
    """The address; an address of a server alone, ``http://host:4877``, gets ``/v1``."""
    key: Variable | None = "OPENAI_API_KEY"
    """Environment variable that holds the key or, with ``_FILE`` after its name, the path of a file that does; null is for servers
    that ask for none."""
    typed: bool = True
    """Answers are constrained to a JSON schema; false is for servers that cannot."""
    guided: Literal["structured_outputs", "guided_choice"] | None = None
    """The field in which the server takes the few answers that a vote may have: vLLM's from 0.11 on, or its former one; null sends
    them as a schema."""
    concurrency: Count = 32
    """Requests in flight at once, from each rank."""
    timeout: Positive = 60.0
    """Seconds that one attempt may take."""
    deadline: Positive = 120.0
    """Seconds in which a question must be answered, further attempts included; those that wait in line give up when nothing was
    answered for so long. What has no answer then is missing."""
    attempts: Count = 5
    """How often one question is asked before its score is missing."""
    pause: Positive = 0.5
    """Longest first pause between attempts, in seconds; it doubles, and is drawn between 0 and that."""
    longest_pause: Positive = 20.0
    """Longest pause of all."""
    prices: Prices | None = None
    """What it charges; null leaves costs out of estimates."""
    quota: Quota | None = None
    """How much is asked at most; null sets no limit."""


class InProcess(Section):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL in the run's own process, on a device of its own choice; it answers one question after
    another."""

    kind: Literal["in_process"]
    path: str
    """Folder of the weights, or their id in the Hugging Face cache."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights."""


class JudgeReward(RewardSection):
    """What all judges have in common."""

    judge: Annotated[Endpoint | InProcess, Field(discriminator="kind")]
    """Who answers."""
    n_evals: Count = 1
    """How often each question is asked, with seeds of their own; a score is the mean, and missing where one answer is."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """At which the judge answers; 0 gives the same answer every time, so that asking again is no use."""
    seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    """Seed of the first answer; the next ones count up from it."""


class AspectsReward(JudgeReward):
    """System A's judge: alignment, quality and identity, each 0 to 1 and asked on its own."""

    kind: Literal["aspects"]
    n_evals: Count = 3
    """How often each question is asked, with seeds of their own; a score is the mean, and missing where one answer is."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.7
    """At which the judge answers; 0 gives the same answer every time, so that asking again is no use."""
    aspects: Annotated[tuple[Aspect, ...], Field(min_length=1)] = ("alignment", "quality", "identity")
    """Which of them to ask for; identity compares with a source picture."""


class VieScore(JudgeReward):
    """VIEScore: ``sc``, what was done, ``pq``, how it looks, and ``overall``, the root of their product; 0 to 10."""

    kind: Literal["viescore"]


class EditScore(JudgeReward):
    """EditScore's version of VIEScore, for judges that were tuned on it; the same columns."""

    kind: Literal["editscore"]
    average: Literal["last", "first"] = "last"
    """The mean of the repeats' overall scores, or the overall score of their means."""


class ComplexEditReward(JudgeReward):
    """Complex-Edit's judge: instruction following, identity preservation, perceptual quality, overall; 0 to 10."""

    kind: Literal["complex_edit"]


class GroundReward(JudgeReward):
    """How near the picture comes to the task's target (EARL); 0 to 10."""

    kind: Literal["ground"]


class YesReward(JudgeReward):
    """The probability of the answer yes; needs log-probabilities, or repeats that vote."""

    kind: Literal["yes"]
    min_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Least probability of yes and no together; with less the score is missing."""
    by: By = "probability"
    """From the first token's log-probabilities, or ``choice``: the share of ``n_evals`` answers, for endpoints that give none."""


class DigitReward(JudgeReward):
    """The expected digit from 0 to 5, over 5 (Edit-R1); needs log-probabilities, or repeats that vote."""

    kind: Literal["digit"]
    min_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Least probability of the six digits together; with less the score is missing."""
    by: By = "probability"
    """From the first token's log-probabilities, or ``choice``: the mean of ``n_evals`` answers, for endpoints that give none."""


class WinRateReward(JudgeReward):
    """Win rate among the pictures made for one task, compared in pairs and both ways round."""

    kind: Literal["win_rate"]


Judge: TypeAlias = AspectsReward | VieScore | EditScore | ComplexEditReward | GroundReward | YesReward | DigitReward | WinRateReward
