// System B at full size: an IP-Adapter for FLUX.1-Fill paints words in the style of a reference, in what its source calls PPO: each picture against all of the step.
// 8 GPUs of 80 GB, narrowly (71 GB are planned; `retouch doctor` says for what); a supervised warm-up of 400 steps, then RL.
//
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-ppo.jsonnet --set data.path=DIR
//
// DIR holds self_bench.txt and test<number>_source.png, _mask.png, _ref.png. The published set of this layout is a benchmark, on
// which this does not train. The judge of looks is a server: see recipes/lib/ip_adapter_worlds.libsonnet.
//
// A healthy run. Before the first step weights move, and in RL the ratio is 1 within 1e-2 (16 bits), or it does not begin.
// - In the warm-up the loss falls for some hundred steps. The adapter begins by adding nothing, so pictures are the base's at first.
// - `reward/ocr/correctness` rises and `reward/ocr/confidence`, which is only reported, need not.
// - `policy/clip_fraction` lies between 0.05 and 0.5. Items that are hard for everyone pull all their pictures down here; where
//   `reward/std` within groups is much smaller than over the step, take ip-adapter-grpo.jsonnet.
// - `missing/vlm/quality` is 0, or the server is down and the run will stop.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.ppo(worlds.flux_fill, worlds.flux_fill_sizes { name: 'flux-fill-ip-adapter-ppo' })
