// The twin of ip-adapter-grpo.jsonnet on the signs of the playground: the same classes with tiny models, on a laptop. The base
// editor was never trained on letters.
//
//   retouch train recipes/qwen-image-edit/ip-adapter-grpo-playground.jsonnet
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(
  worlds.signs_of_qwen,
  worlds.signs_sizes { name: 'qwen-image-edit-ip-adapter-grpo-playground', num_steps: 10, window: 2, high: 5 },
)
