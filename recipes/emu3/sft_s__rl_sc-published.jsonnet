// SFT (S), then RL (S+C) (EARL), with the files that the source published: its data sets (mair-lab/earl-datasets) and its
// supervised weights (mair-lab/sft-simple, converted or as they are), for 3000 steps. 8 GPUs with 80 GB, one rank each, and a
// judge as for sft_s__rl_sc.
//
//   hf download mair-lab/earl-datasets --repo-type dataset --local-dir DATA/earl-datasets
//   hf download mair-lab/sft-simple --local-dir RUNS/sft-simple
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877 APP__RUN_NAME=published
//   retouch launch --nproc 8 recipes/emu3/sft_s__rl_sc-published.jsonnet --set data.trusted=true
//
// The published features are `.pth` files. They are opened only with data.trusted=true, and only by torch's restricted loader.
// Held-out scores are reported for each data set (`data_set=vismin`) and as their mean. The folder layout of the download is taken
// from the source's configuration; the data sets have not been downloaded here.
//
// A healthy run looks like a run of sft_s__rl_sc from the first step on; it needs no supervised stage before.
// **Claims of the source, none of them measured here**: VIEScore 4.80 on average over six benchmarks, from 3.88 before RL.
local earl = import '../lib/earl.libsonnet';

earl.rl(start='sft_s', data=earl.published.sc) {
  steps: 3000,
  microbatch: 4,
  policy+: { model+: { path: earl.runs + '/sft-simple' } },
}
