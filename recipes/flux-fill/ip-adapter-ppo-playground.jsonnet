// The twin of ip-adapter-ppo.jsonnet on signs of the playground: the same classes, tiny, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-ppo-playground.jsonnet
//
// A healthy run is as GRPO's, whose figures stand in ip-adapter-grpo-playground.jsonnet; this one was not run to its end.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.ppo(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-ppo-playground' })
