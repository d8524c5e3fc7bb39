// The values of an IP-Adapter trainer's GRPO script (train_grpo.sh) in ip-adapter-grpo.jsonnet: 12 images per task with 20
// denoising steps, of which the first half trains, guidance 3.5, OCR and the vision-language model with the weights 0.7 and 0.3, a
// moving average of the adapter with a decay of 0.9999, and a warm-up of 100 steps. 8 GPUs with 141 GB (H200), with the text
// encoders on the GPUs.
//
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-grpo-published.jsonnet --set data.path=DIR
//
// DIR and the judge are those of ip-adapter-grpo. The source's scripts all set the weights 0.7 and 0.3; the defaults of its flags,
// which no script uses, are --set reward.combine='0.6 * ocr/correctness + 0.4 * vlm/quality'. To start from an adapter of the
// source, convert it with `retouch tools convert`: `ip-adapter.bin` fits this recipe; `calligrapher.bin` has a Q-Former too, which needs
// --set policy.train.projection=qformer.
//
// Different here, because the script's values have no effect: the source sampled without noise and its KL was not in the loss, so
// noise and KL are those of ip-adapter-grpo; its clip range of 0.2 is for summed log-probabilities, which is 3e-6 for their mean.
//
// A healthy run looks like that of ip-adapter-grpo. With this decay, the moving average needs 10 000 optimizer steps to forget the
// initial weights, so held-out scores, which use it, follow the training reward late. The source makes no claims about these
// values.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.grpo(
  ip_adapter.published_world(worlds.flux_fill),
  worlds.flux_fill_sizes + ip_adapter.published_sizes {
    name: 'flux-fill-ip-adapter-grpo-published',
    group_size: 12,
    warmup_steps: 100,
    chunk: 12,
    ema: { decay: 0.9999 },
  },
)
