// The twin of ip-adapter-nft.jsonnet on the signs of the playground: the same classes with tiny models, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-nft-playground.jsonnet
//
// A healthy run. The signs in the source image have another style than the requested one, so `signs/style` is 0.24 at first; the
// autoencoder limits it to about 0.6. In the warm-up it reaches 0.5, and `ocr/correctness` stays near 0.35 because the
// demonstrations have wrong letters. In RL correctness rises to 0.7 and style falls to 0.46; a higher `objective.reference_weight`
// would preserve the style better.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.nft(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-nft-playground' })
