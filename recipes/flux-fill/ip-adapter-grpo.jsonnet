// System B at full size: an IP-Adapter for FLUX.1-Fill paints words in the style of a reference, by GRPO: each picture against the others of its task.
// 8 GPUs of 80 GB, narrowly (71 GB are planned; `retouch doctor` says for what); a supervised warm-up of 400 steps, then RL.
//
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-grpo.jsonnet --set data.path=DIR
//
// DIR holds self_bench.txt and test<number>_source.png, _mask.png, _ref.png. The published set of this layout is a benchmark, on
// which this does not train. The judge of looks is a server: see recipes/lib/ip_adapter_worlds.libsonnet.
//
// A healthy run. Before the first step weights move, and in RL the ratio is 1 within 1e-2 (16 bits), or it does not begin.
// - In the warm-up the loss falls for some hundred steps. The adapter begins by adding nothing, so pictures are the base's at first.
// - `reward/ocr/correctness` rises and `reward/ocr/confidence`, which is only reported, need not.
// - `policy/clip_fraction` lies between 0.05 and 0.5. At 0 the steps are too small to need a bound; lower the range. Near 1 nothing
//   but the bound is learnt: lower the learning rate.
// - `missing/vlm/quality` is 0, or the server is down and the run will stop.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(worlds.flux_fill, worlds.flux_fill_sizes { name: 'flux-fill-ip-adapter-grpo' })
