// An IP-Adapter for Qwen-Image-Edit learns to render words in the style of a reference image. The IP-Adapter trainer planned this
// as its option `--model_type qwen`. 8 GPUs with 141 GB; a supervised warm-up of 400 steps, then GRPO.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/ip-adapter-grpo.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction, a target, a reference and the text for each. Triplets cannot
// be used: their source image shows the words, and this model, unlike FLUX.1-Fill, sees all of it.
//
// A healthy run is described in recipes/flux-fill/ip-adapter-grpo.jsonnet.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(
  worlds.qwen,
  worlds.flux_fill_sizes {
    name: 'qwen-image-edit-ip-adapter-grpo',
    num_steps: 10,
    window: 2,
    high: 5,
    eval_steps: 50,
    ema: ip_adapter.ema,
  },
)
