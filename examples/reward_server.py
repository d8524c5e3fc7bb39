"""A reward server: several runs, or all ranks of one run, send their images to one process, which has the reward model.

    python examples/reward_server.py                                        # on the machine with the reward model
    python examples/train_with_reward_server.py http://127.0.0.1:8700       # one or more runs
    python examples/reward_server.py --tiny                                 # a CPU

`retouch serve pickscore --replicas 4 --gpus 0,1,2,3` does the same with one process per GPU. To serve other machines, set `host`
and a token (docs/serving.md).
"""

import sys
import time

import retouch

reward = retouch.rewards.PickScore()
if "--tiny" in sys.argv:
    import tiny

    reward = retouch.rewards.PickScore(path=tiny.clip())

port = int(sys.argv[sys.argv.index("--port") + 1]) if "--port" in sys.argv else 8700
with retouch.serve(reward, port=port) as server:
    print(server.url, flush=True)
    while True:
        time.sleep(1)
