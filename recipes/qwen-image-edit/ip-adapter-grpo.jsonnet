// An IP-Adapter for Qwen-Image-Edit paints words in the style of a reference: what system B left open as `--model_type qwen`.
// 8 GPUs of 141 GB; a supervised warm-up of 400 steps, then GRPO.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/ip-adapter-grpo.jsonnet --set data.path=DIR
//
// DIR holds photographs and a metadata.jsonl with an instruction, a target, a reference and the text for each. Triplets will not do:
// their source shows the words, and this model, unlike FLUX.1-Fill, sees all of it.
//
// A healthy run is that of recipes/flux-fill/ip-adapter-grpo.jsonnet.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(
  worlds.qwen,
  worlds.flux_fill_sizes { name: 'qwen-image-edit-ip-adapter-grpo', num_steps: 10, window: 2, high: 5, eval_steps: 50 },
)
