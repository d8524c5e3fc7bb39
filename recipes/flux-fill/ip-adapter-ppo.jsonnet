// An IP-Adapter for FLUX.1-Fill learns to render words in the style of a reference image, by the algorithm that the source calls
// PPO: each image is compared with all images of the step. 8 GPUs with 80 GB, with the text encoders in CPU memory (`retouch
// doctor --rehearse` shows what each GPU holds); a supervised warm-up of 400 steps, then RL.
//
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-ppo.jsonnet --set data.path=DIR
//
// DIR contains self_bench.txt and test<number>_source.png, _mask.png, _ref.png. The published set with this layout is a benchmark;
// training on it is refused. The judge of image quality is a server, see recipes/lib/ip_adapter_worlds.libsonnet. The adapter is not
// averaged, because 80 GB are not enough for the average (77.8 GB are needed, and a tenth of the memory should stay free). On GPUs
// with 141 GB, add --set 'policy.ema={"decay": 0.9, "every": 8}', as in ip-adapter-nft.
//
// A healthy run. In the trial step the weights change and, in RL, the ratio is 1 within 1e-2 (16 bits); otherwise the run stops.
// - In the warm-up the loss falls for some hundred steps. The adapter initially adds 0, so the first images are those of the base
//   model.
// - `reward/ocr/correctness` rises; `reward/ocr/confidence` is only reported and need not rise.
// - `policy/clip_fraction` is between 0.05 and 0.5. All images of a difficult task get negative advantages here; if `reward/std`
//   within groups is much smaller than over the step, use ip-adapter-grpo.jsonnet.
// - `missing/vlm/quality` is 0; otherwise the server is down, and the run will stop.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

// Three steps of each image are trained, so a microbatch of 3 needs no padding.
ip_adapter.ppo(worlds.flux_fill, worlds.flux_fill_sizes { name: 'flux-fill-ip-adapter-ppo', microbatch: 3 })
+ { policy+: { prompt_embeddings: 'cached' } }
