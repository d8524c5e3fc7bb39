// Z-Image-Turbo learns what people prefer on one GPU with 12 GB or more: images of 512 px in 8 steps, scored by PickScore.
//
//   retouch train z-image/one-gpu --set card=16gb
//
// The prompts are those of recipes/sd3/challenging.txt; `--set data.path=LIST.txt` takes yours, one per line. PickScore runs on the
// CPU, so that its 4.3 GB are not needed on the GPU; with room for it, `--set reward.device=null` is faster.
// docs/machines.md has the memory and the hours on each card, and docs/guides/one-gpu.md the way from nothing to a LoRA.
//
// A healthy run. `reward/pickscore` starts between 18 and 23; one point more means that people prefer the image in 73 % of pairs.
// PickScore likes saturated, detailed images: look at the held-out images. This recipe has not been run on a GPU;
// sd3/one-gpu-playground, its twin, learns.
local one_gpu = import '../lib/one_gpu.libsonnet';

one_gpu.full_size(
  'z-image/one-gpu',
  world={
    model: { kind: 'z-image', path: 'Tongyi-MAI/Z-Image-Turbo', size: [512, 512], dtype: 'bfloat16' },
    tasks: { kind: 'prompts', path: 'recipes/sd3/challenging.txt', held_out: 32 },
    judge: { kind: 'pickscore', device: 'cpu', combine: { pickscore: 1 } },
  },
  num_steps=8,
  eval_steps=8,
)
