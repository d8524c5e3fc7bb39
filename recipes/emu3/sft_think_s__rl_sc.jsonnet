// SFT Think (S), then RL (S+C) (system D): RL on simple and complex edits, from a model taught to think before simple edits. 8 GPUs of 80 GB, one rank
// each, and 4 more for the judge, which several runs may share:
//
//   vllm serve Qwen/Qwen2.5-VL-72B-Instruct --port 4877 --host 0.0.0.0 --dtype bfloat16 --tensor-parallel-size 4 \
//       --max-model-len 4096 --max-num-seqs 1024 --limit-mm-per-prompt '{"image": 2}'
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877 APP__RUN_NAME=sft_think_s__rl_sc
//   retouch export RUNS/sft_think_s --to RUNS/sft_think_s/exported      # of recipes/emu3/sft_think_s.jsonnet
//   retouch launch --nproc 8 recipes/emu3/sft_think_s__rl_sc.jsonnet
//
// The same run name goes on where the run was. `--set push.repo=USER/NAME --set push.every=100` pushes to the Hub as the source
// does. Its own `.pth` features need --set data.trusted=true; `retouch data tokenize` makes safetensors of any edits.
//
// A healthy run. Weights move in the trial step, or the run does not begin.
// - `reward/missing_fraction` is near 0: look there first. `reward/fault_fraction` is 0, since only whole pictures can be written after the
//   thought; one that does not end in time is a fault.
// - `reward/mean`, 0 to 10, rises over hundreds of steps; `reward/sc` (was it done) should, and `reward/pq` (how it looks) not fall.
// - `group/zero_std_fraction` falls from a large part: a judge gives whole numbers, and a start that cannot do an edit gets 0 each time.
// - `policy/kl` grows slowly, and stays far below 1; `policy/grad_norm` stays of one size.
// - `completion/length` is that of the picture and of the thought before it; where it falls to the picture's alone, thinking has stopped.
//   To train only one of the two, or both in turn: --set objective.tokens=text, or {"text_steps": 10, "vision_steps": 10}.
// - The held-out reward rises with the training reward, for more than one kind of edit; look at the pictures that are kept every 5 steps.
// **Claims of the source, none of them measured here**: thinking first did not help; its best is RL (S+C) from SFT (S) without it, VIEScore
// 4.80 on average over six benchmarks, from 3.88 before RL.
local earl = import '../lib/earl.libsonnet';

earl.rl(start='sft_think_s', data=earl.data.sc, think=true)
