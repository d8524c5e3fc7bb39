// Supervised learning of simple and complex edits at once, SFT (S+C) (EARL): the stage before RL. 8 GPUs with 80 GB, one rank
// each.
//
//   export APP__DATA_DIR=DATA APP__BASE_EXP_DIR=RUNS APP__REWARD_FUNCTION_API_BASE=http://HOST:4877
//   retouch launch --nproc 8 recipes/emu3/sft_sc.jsonnet
//   retouch export RUNS/sft_sc --to RUNS/sft_sc/exported
//
// The judge is only used for evaluation; training imitates the edited images of the data. Initial weights, batch size and schedule
// (a cosine from 1e-4 to 1e-5, weight decay 0.1, gradients clipped at 5) are those of the source's script; the number of steps is
// in the name of a checkpoint that the source released. For the source's variant with ZeRO-3 and CPU offload, add
// --set sharding=fsdp2 --set devices.weights=cpu --set optimizer.moments=cpu
//
// A healthy run.
// - `policy/loss`, in nats per token, falls fast for some hundred steps and then slowly, from about 10 (32 768 equally likely
//   codes) to the entropy of the data. It does not measure the quality of edits.
// - The held-out reward rises and then stays constant; that is the point to start RL.
// **Claims of the source, none of them measured here**: VIEScore 3.88 on average over six benchmarks after SFT (S); complex edits
// help RL but not this stage.
local earl = import '../lib/earl.libsonnet';

earl.sft('sft_sc', data=earl.data.sc)
