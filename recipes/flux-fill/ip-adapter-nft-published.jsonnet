// The values of an IP-Adapter trainer's DiffusionNFT script (train_nft.sh) in ip-adapter-nft.jsonnet: 4 images per task with 20
// denoising steps, beta 0.5, guidance 3.5, OCR and the vision-language model with the weights 0.7 and 0.3, a moving average of the
// adapter with a decay of 0.999, and one step of warm-up, because it starts from a trained adapter. 8 GPUs with 141 GB.
//
//   retouch tools convert ip-adapter.bin --to ADAPTER
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-nft-published.jsonnet --set data.path=DIR \
//       --set policy.train.init_from=ADAPTER
//
// DIR and the judge are those of ip-adapter-nft. The source multiplies the policy loss by the largest advantage, 5, so its
// reference weight of 0.01 is 0.002 here. The source's advantage modes are the values of `objective.advantages`; its second
// schedule of the old policy is `objective.old_decay: { flat: 75, rate: 0.0075, max: 0.999 }`.
//
// A healthy run looks like that of ip-adapter-nft. Without `init_from` one step of warm-up teaches nothing: add
// --set phases.0.steps=400. The source makes no claims about these values.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.nft(
  ip_adapter.published_world(worlds.flux_fill),
  worlds.flux_fill_sizes + ip_adapter.published_sizes {
    name: 'flux-fill-ip-adapter-nft-published',
    group_size: 4,
    warmup_steps: 1,
    chunk: 4,
    ema: { decay: 0.999 },
  },
) {
  objective+: { beta: 0.5, reference_weight: 0.01 / 5 },
}
