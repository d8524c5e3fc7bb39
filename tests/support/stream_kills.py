"""Reads steps from a stream until the process kills itself: ``stream_kills.py FOLDER STATE RANK WORLD STEPS KILL_AFTER``.

After every third step, it writes the position in the stream and the rows so far, as a checkpoint would. ``KILL_AFTER``: the process
kills itself after this number of its own steps; 0: never.
"""

import json
import os
import signal
import sys
from pathlib import Path

from retouch.data.base import DataContext
from retouch.data.sources.stream import StreamData
from retouch.data.tasks import UnindexedTasks, places_in_step

COUNT = 7
EVERY = 3


def main(folder: str, state: str, rank: int, world: int, steps: int, kill_after: int) -> None:
    sets = StreamData(path=folder, held_out=5, check=3, shuffle=16).build(DataContext(seed=3))
    stream, file = sets.train, Path(state)
    assert isinstance(stream, UnindexedTasks)
    rows: list[list[str]] = []
    if file.exists():
        stored = json.loads(file.read_text())
        rows = stored["rows"]
        stream.load_state(stored["stream"])
    places = places_in_step(count=COUNT, group_size=2, minibatches=1, rank=rank, world=world)
    for taken, step in enumerate(range(len(rows), steps), start=1):
        tasks = stream.at_step(step, count=COUNT, places=places)
        rows.append([f"{place} {tasks[place].instruction}" for place in places])
        if taken == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            new = file.with_suffix(".new")
            new.write_text(json.dumps({"rows": rows, "stream": stream.state()}))
            new.replace(file)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], given[1], *(int(word) for word in given[2:]))
