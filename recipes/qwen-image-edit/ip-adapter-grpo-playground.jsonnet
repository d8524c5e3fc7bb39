// The twin of ip-adapter-grpo.jsonnet on signs of the playground: the same classes, tiny, on a laptop. Its editor never met letters.
//
//   retouch train recipes/qwen-image-edit/ip-adapter-grpo-playground.jsonnet
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(
  worlds.signs_of_qwen,
  worlds.signs_sizes { name: 'qwen-image-edit-ip-adapter-grpo-playground', num_steps: 10, window: 2, high: 5 },
)
