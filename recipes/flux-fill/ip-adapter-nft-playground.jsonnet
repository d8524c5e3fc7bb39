// The twin of ip-adapter-nft.jsonnet on signs of the playground: the same classes, tiny, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-nft-playground.jsonnet
//
// A healthy run. The picture's own signs are in another style than what is asked for, so untrained `signs/style` is 0.24 of the 0.6 that
// the autoencoder lets through. In the warm-up it comes to 0.5 and `ocr/correctness` stays near 0.35, since demonstrations have wrong
// letters. In RL correctness rises to 0.7, and style falls to 0.46: a higher `objective.reference_weight` would hold it more.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.nft(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-nft-playground' })
