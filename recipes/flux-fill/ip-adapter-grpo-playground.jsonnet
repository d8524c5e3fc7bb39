// The twin of ip-adapter-grpo.jsonnet on the signs of the playground: the same classes with tiny models, on a laptop.
//
//   retouch train recipes/flux-fill/ip-adapter-grpo-playground.jsonnet
//
// A healthy run. The signs in the source image have another style than the requested one, so `signs/style` is 0.24 at first; the
// autoencoder limits it to about 0.6. In the warm-up it reaches 0.5, and `ocr/correctness` stays near 0.35 because the
// demonstrations have wrong letters. In RL correctness rises and style must not fall; if it does, raise `objective.kl.weight`.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(worlds.signs, worlds.signs_sizes { name: 'flux-fill-ip-adapter-grpo-playground' })
