// The twin of ip-adapter-ppo.jsonnet on signs of the playground: the same classes, tiny, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-ppo-playground.jsonnet
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.ppo(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-ppo-playground' })
