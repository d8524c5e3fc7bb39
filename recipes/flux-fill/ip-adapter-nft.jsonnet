// An IP-Adapter for FLUX.1-Fill learns to render words in the style of a reference image, by DiffusionNFT: it needs only images
// and rewards, with the old policy and the reference as two more copies of the adapter. 8 GPUs with 141 GB (`retouch doctor` lists
// what the planned 99 GB are for); a supervised warm-up of 400 steps, then RL.
//
//   retouch launch --nproc 8 recipes/flux-fill/ip-adapter-nft.jsonnet --set data.path=DIR
//
// DIR contains self_bench.txt and test<number>_source.png, _mask.png, _ref.png. The published set with this layout is a benchmark;
// training on it is refused. The judge of image quality is a server, see recipes/lib/ip_adapter_worlds.libsonnet.
//
// A healthy run. In the trial step the weights change and, in RL, the ratio is 1 within 1e-2 (16 bits); otherwise the run stops.
// - In the warm-up the loss falls for some hundred steps. The adapter initially adds 0, so the first images are those of the base
//   model.
// - `reward/ocr/correctness` rises; `reward/ocr/confidence` is only reported and need not rise.
// - There is no ratio. The loss need not fall; the held-out reward should rise within some 50 steps, otherwise raise the learning
//   rate.
// - `missing/vlm/quality` is 0; otherwise the server is down, and the run will stop.
local ip_adapter = import '../lib/ip_adapter.libsonnet';
local worlds = import '../lib/ip_adapter_worlds.libsonnet';

ip_adapter.nft(worlds.flux_fill, worlds.flux_fill_sizes { name: 'flux-fill-ip-adapter-nft', ema: ip_adapter.ema })
