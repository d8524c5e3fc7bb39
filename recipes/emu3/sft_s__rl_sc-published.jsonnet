// SFT (S), then RL (S+C) (system D), on what the source published: its data sets (mair-lab/earl-datasets), its supervised weights
// (mair-lab/sft-simple, converted or as they are), 3000 steps. 8 GPUs with 80 GB, one rank each, and a judge as for sft_s__rl_sc.
//
//   hf download mair-lab/earl-datasets --repo-type dataset --local-dir DATA/earl-datasets
//   hf download mair-lab/sft-simple --local-dir RUNS/sft-simple
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877 APP__RUN_NAME=published
//   retouch launch --nproc 8 recipes/emu3/sft_s__rl_sc-published.jsonnet --set data.trusted=true
//
// The published features are `.pth` files, which only torch's restricted loader opens, and only with data.trusted=true. Held-out
// scores come for each data set (`data_set=vismin`), besides their mean. The layout of the download was read in the source's own
// configuration; it has not been downloaded here.
//
// A healthy run looks like that of sft_s__rl_sc, from its first step: there is no supervised stage to wait for.
// **Claims of the source, none of them measured here**: VIEScore 4.80 on average over six benchmarks, from 3.88 before RL.
local earl = import '../lib/earl.libsonnet';

earl.rl(start='sft_s', data=earl.published.sc) {
  steps: 3000,
  microbatch: 4,
  policy+: { model+: { path: earl.runs + '/sft-simple' } },
}
