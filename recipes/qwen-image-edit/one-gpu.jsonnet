// Qwen-Image-Edit, with 20 billion weights, learns to edit photographs on one GPU, at 512 px.
//
//   retouch train qwen-image-edit/one-gpu --set card=80gb --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction for each; docs/guides/photos.md has all steps. The reward is
// PickScore plus preservation of the source, on the CPU. docs/machines.md has the memory and the hours on each card.
//
// A healthy run looks like that of flux-kontext/photos. This recipe has not been run on a GPU; its twin learns.
local one_gpu = import '../lib/one_gpu.libsonnet';
local photos = import '../lib/photos.libsonnet';

one_gpu.full_size(
  'qwen-image-edit/one-gpu',
  world={
    model: { kind: 'qwen-image-edit', path: 'Qwen/Qwen-Image-Edit', size: [512, 512], dtype: 'bfloat16' },
    tasks: photos.tasks('photos', held_out=0.1),
    judge: photos.preferred(device='cpu'),
  },
  num_steps=10,
  eval_steps=28,
  noise_level=1.2,
  learning_rate=1e-4,
  card='80gb',
)
