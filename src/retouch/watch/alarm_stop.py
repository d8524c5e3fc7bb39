"""Stops a run because of an alarm: records the stop, builds the message, and decides whether the run may continue later."""

from collections.abc import Callable, Sequence

from retouch.distributed.ranks import Ranks
from retouch.records.folder import RunFolder
from retouch.watch.alarms import Alarm, AlarmStop


def stopping_alarms(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Return the alarms whose response stops the run."""
    return [alarm for alarm in alarms if alarm.response != "note"]


def write_stop(folder: RunFolder, alarms: Sequence[Alarm], *, step: int, back_to: int | None) -> None:
    """Record why the run stopped after ``step`` steps. ``back_to``: the step to which it was rolled back; None: no roll-back.

    Call this last: a run that was killed before must not look like a stopped one.
    """
    records = [{"rule": alarm.rule, "text": alarm.text, "response": alarm.response} for alarm in alarms]
    folder.write_alarm({"step": step, "back_to": back_to, "alarms": records})


def stop_message(alarms: Sequence[Alarm], *, step: int, back_to: int | None) -> str:
    """Return the message for the user."""
    state = (
        f"The checkpoint of step {step} is saved"
        if back_to is None
        else f"The run is back in the state of step {back_to}, before the alarm; later records are kept for inspection"
    )
    lines = "\n".join(f"  {alarm.key}: {alarm.text}" for alarm in alarms)
    return f"stopped by an alarm after step {step}:\n{lines}\n{state}. To continue, relax the rule and run the same command"


def refuse_if_stopped(folder: RunFolder, alarms_at: Callable[[int], Sequence[Alarm]], *, ranks: Ranks) -> None:
    """Raise AlarmStop if an alarm stopped the run and would stop it again under the recipe's current rules.

    Otherwise the run may continue, and the record of the stop is deleted. ``alarms_at``: maps a number of steps to the alarms that
    the current rules raise after them. Call this before later records are deleted from the run's folder.
    """
    record = folder.read_alarm()
    if record is None:
        return
    alarms = stopping_alarms(alarms_at(record["step"]))
    if alarms:
        raise AlarmStop(f"{folder.root} was {stop_message(alarms, step=record['step'], back_to=record['back_to'])}")
    ranks.barrier()
    if ranks.is_main:
        folder.alarm.unlink()
