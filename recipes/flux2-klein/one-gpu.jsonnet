// FLUX.2-klein (the 4B base model) learns to render words on one GPU with 16 GB or more: images of 512 px, scored by an OCR model.
//
//   retouch train flux2-klein/one-gpu --set card=24gb
//
// The prompts are in recipes/words.txt; `--set data.path=LIST.txt` takes yours, one per line, with the words in double quotes.
// docs/machines.md has the memory and the hours on each card, and docs/guides/one-gpu.md the way from nothing to a LoRA.
//
// A healthy run looks like that of sd3/ocr-grpo. This recipe has not been run on a GPU; sd3/one-gpu-playground, its twin, learns.
local one_gpu = import '../lib/one_gpu.libsonnet';

one_gpu.full_size(
  'flux2-klein/one-gpu',
  world={
    model: { kind: 'flux2-klein', path: 'black-forest-labs/FLUX.2-klein-base-4B', size: [512, 512], dtype: 'bfloat16' },
    tasks: { kind: 'prompts', path: 'recipes/words.txt', held_out: 32 },
    judge: { kind: 'ocr', where: 'picture', combine: { correctness: 1 } },
  },
  num_steps=10,
  eval_steps=28,
)
