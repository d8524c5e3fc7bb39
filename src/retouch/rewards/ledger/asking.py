"""An asker that remembers: what was answered before is not asked again, and whatever is asked is recorded."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass

from retouch.rewards.closing import close
from retouch.rewards.judges.rubrics import fingerprint
from retouch.rewards.ledger import content
from retouch.rewards.ledger.answers import Answers, Call
from retouch.rewards.ledger.once import Once
from retouch.rewards.vlm.asking import Answer, Asker, Question
from retouch.types import Json


class RememberingAsker:
    """Asks ``asker`` what ``answers`` does not hold. An answer from memory has taken no attempt, no time and no tokens."""

    def __init__(self, asker: Asker, answers: Answers) -> None:
        self.asker = asker
        self.answers = answers
        self.identity = asker.identity
        self._once: Once[Answer] = Once()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer each, in order; equal questions share one."""
        pictures = content.Pictures()
        names = [of_question(question, self.identity, pictures) for question in questions]
        if self.answers.fresh:
            return self._asked(names, questions, pictures)
        by_name = dict(zip(names, questions, strict=True))
        return self._once.get(
            names,
            known=lambda wanted: self._recalled(wanted, by_name),
            ask=lambda wanted: self._asked(wanted, [by_name[name] for name in wanted], pictures),
        )

    def close(self) -> None:
        """Let go of the asker's connections."""
        close(self.asker)

    def _recalled(self, names: Sequence[str], questions: Mapping[str, Question]) -> dict[str, Answer]:
        return {
            name: Answer(scores=kept.scores, text=kept.text, seed=kept.seed, temperature=questions[name].temperature)
            for name, kept in self.answers.recall(names).items()
        }

    def _asked(self, names: Sequence[str], questions: Sequence[Question], pictures: content.Pictures) -> list[Answer]:
        given = self.asker.ask(questions)
        asked = zip(names, questions, given, strict=True)
        self.answers.record([_call(*each, judge=self.identity, pictures=pictures) for each in asked])
        return given


def of_question(question: Question, judge: str, pictures: content.Pictures) -> str:
    """The name of a question: a hash of all that decides its answer: what is asked, of whom, how it is read, temperature and seed.

    Where the form is no dataclass, nothing says whether two of them are equal: such a question has another name each time.
    """
    if not is_dataclass(question.form):
        return secrets.token_hex(32)
    parts: list[Json] = [part if isinstance(part, str) else {"picture": pictures(part)} for part in question.parts]
    form = f"{type(question.form).__module__}.{question.form!r}"
    return content.digest([judge, question.rubric, parts, form, question.temperature, question.seed])


def _call(name: str, question: Question, answer: Answer, *, judge: str, pictures: content.Pictures) -> Call:
    judged = next((part for part in reversed(question.parts) if not isinstance(part, str)), None)
    return Call(
        content=name,
        picture=pictures(judged),
        judge=judge,
        scores=answer.scores or None,
        rubric=fingerprint(question.rubric),
        seed=answer.seed,
        temperature=answer.temperature,
        fault=answer.fault,
        text=answer.text,
        attempts=answer.attempts,
        faults=answer.faults,
        seconds=answer.seconds,
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        cost=answer.cost,
    )
