// FLUX.2-klein (the 4B base model) learns to edit your own photographs on one GPU with 16 GB or more, at 512 px.
//
//   retouch train photos/one-gpu --set card=24gb --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction for each; docs/guides/photos.md has all steps. The reward is
// PickScore plus preservation of the source, on the CPU. docs/machines.md has the memory and the hours on each card.
//
// A healthy run looks like that of flux-kontext/photos. This recipe has not been run on a GPU; qwen-image-edit/one-gpu-playground,
// its twin, learns.
local one_gpu = import '../lib/one_gpu.libsonnet';
local photos = import '../lib/photos.libsonnet';

one_gpu.full_size(
  'photos/one-gpu',
  world={
    model: { kind: 'flux2-klein', path: 'black-forest-labs/FLUX.2-klein-base-4B', size: [512, 512], dtype: 'bfloat16' },
    tasks: photos.tasks('photos', held_out=0.1),
    judge: photos.preferred(device='cpu'),
  },
  num_steps=10,
  eval_steps=28,
)
