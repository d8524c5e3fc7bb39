// The twin of ip-adapter-nft.jsonnet on signs of the playground: the same classes, tiny, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-nft-playground.jsonnet
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.nft(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-nft-playground' })
