// The twin of ip-adapter-ppo.jsonnet on the signs of the playground: the same classes with tiny models, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-ppo-playground.jsonnet
//
// A healthy run looks like that of GRPO, whose figures are in ip-adapter-grpo-playground.jsonnet; docs/results.md has both.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.ppo(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-ppo-playground' })
