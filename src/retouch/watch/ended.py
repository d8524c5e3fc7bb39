"""A run that a rule of ``watch`` has ended: what is kept of that, and when it may go on."""

from collections.abc import Mapping, Sequence

from retouch.distributed.ranks import Ranks
from retouch.recipe.watch import Watch
from retouch.records.folder import RunFolder
from retouch.types import Column
from retouch.watch.alarms import Alarm, Raised, raised
from retouch.watch.looks import Looks
from retouch.watch.watching import kept_diversity


def ending(found: Sequence[Raised]) -> list[Raised]:
    """The alarms that end a run."""
    return [one for one in found if one.response != "note"]


def write_ended(folder: RunFolder, found: Sequence[Raised], *, step: int, back_to: int | None) -> None:
    """Keep why the run ended after ``step`` steps, and the step it went back to (None: it stays where it ended).

    Written last, so that a run that is killed before it is not taken for an ended one.
    """
    alarms = [{"rule": one.rule, "text": one.text, "response": one.response} for one in found]
    folder.write_alarm({"step": step, "back_to": back_to, "alarms": alarms})


def message(found: Sequence[Raised], *, step: int, back_to: int | None) -> str:
    """What a person is told."""
    state = (
        f"the checkpoint of step {step} is saved"
        if back_to is None
        else f"the run's state is again that of step {back_to}, from before the alarm; what came after it is kept to look at"
    )
    told = "\n".join(f"  watch.{one.rule}: {one.text}" for one in found)
    return (
        f"ended by an alarm after step {step}:\n{told}\n"
        f"{state[0].upper()}{state[1:]}. To go on from there, relax the rule and give the same command again"
    )


def refuse_if_ended(folder: RunFolder, watch: Watch, *, columns: Mapping[str, Column], ranks: Ranks) -> None:
    """Alarm where the run was ended by a rule that stands as ``watch`` now is; where none does, the run may go on.

    ``columns``: the reward's. Call it before anything of the run's folder is cut back.
    """
    kept = folder.read_alarm()
    if kept is None:
        return
    step = kept["step"]
    found = ending(raised(watch, Looks(folder.watch).until(step), kept_diversity(folder, step), columns))
    if found:
        raise Alarm(f"{folder.root} was {message(found, step=kept['step'], back_to=kept['back_to'])}")
    ranks.barrier()
    if ranks.is_main:
        folder.alarm.unlink()
