// Supervised learning of simple edits and then of both, SFT (S+C) in two stages (system D): the stage from which RL starts. 8 GPUs of 80 GB, one rank each.
//
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877
//   retouch launch --nproc 8 recipes/emu3/sft_sc2stage.jsonnet
//   retouch export RUNS/sft_sc2stage --to RUNS/sft_sc2stage/exported
//
// The judge is asked before, after and between: what is learnt from are the edited pictures of the data. The rate and the length are in
// the name of a checkpoint that the source released; its start is not named there: BAAI/Emu3-Stage1 and the batch of 128 are ours.
//
// A healthy run.
// - `policy/loss`, nats a token, falls fast for some hundred steps and then slowly; from about 10 (32 768 codes are equally likely) to
//   what the data's own variety leaves. It does not say how good edits are.
// - The held-out reward rises, and then no more: that is where RL begins.
// **Claims of the source, none of them measured here**: VIEScore 3.88 on average over six benchmarks after SFT (S); complex edits help
// RL and not this stage.
local earl = import '../lib/earl.libsonnet';

earl.sft('sft_sc2stage', phases=[
  { name: 'simple', steps: 10800, data: earl.data.s },
  { name: 'mixed', steps: 5400, data: earl.data.sc },
])
