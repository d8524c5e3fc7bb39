// The twin of ip-adapter-grpo.jsonnet on signs of the playground: the same classes, tiny, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-grpo-playground.jsonnet
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-grpo-playground' })
