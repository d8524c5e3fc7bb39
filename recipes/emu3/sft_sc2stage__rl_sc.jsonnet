// SFT (S+C), two stages, then RL (S+C) (EARL): RL on simple and complex edits, from a model that was trained on simple edits and
// then on both kinds. 8 GPUs with 80 GB, one rank each, and 4 more for the judge, which several runs can share:
//
//   vllm serve Qwen/Qwen2.5-VL-72B-Instruct --port 4877 --host 0.0.0.0 --dtype bfloat16 --tensor-parallel-size 4 \
//       --max-model-len 4096 --max-num-seqs 1024 --limit-mm-per-prompt '{"image": 2}'
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877 APP__RUN_NAME=sft_sc2stage__rl_sc
//   retouch export RUNS/sft_sc2stage --to RUNS/sft_sc2stage/exported      # the run of recipes/emu3/sft_sc2stage.jsonnet
//   retouch launch --nproc 8 recipes/emu3/sft_sc2stage__rl_sc.jsonnet
//
// A run with the same name is resumed. `--set push.repo=USER/NAME --set push.every=100` uploads to the Hub as the source does. The
// source's own `.pth` features need --set data.trusted=true; `retouch data tokenize` makes safetensors from any edits.
//
// A healthy run. The weights change in the trial step; otherwise the run stops.
// - `reward/missing_fraction` is near 0; check this first. `reward/fault_fraction` is 0, because only complete images can be
//   generated.
// - `reward/mean`, from 0 to 10, rises over hundreds of steps; `reward/sc` (semantic consistency) should rise too, and `reward/pq`
//   (perceptual quality) should not fall.
// - `group/zero_std_fraction` is large at first and falls: the judge gives whole numbers, and a model that cannot make an edit gets
//   0 each time.
// - `policy/kl` grows slowly and stays far below 1; `policy/grad_norm` stays of the same order.
// - The held-out reward rises with the training reward, for more than one kind of edit; look at the images that are saved every 5
//   steps.
// **Claims of the source, none of them measured here**: the best result is RL (S+C) from SFT (S), VIEScore 4.80 on average over six
// benchmarks, from 3.88 before RL.
local earl = import '../lib/earl.libsonnet';

earl.rl(start='sft_sc2stage', data=earl.data.sc)
