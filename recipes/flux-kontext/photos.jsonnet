// FLUX.1-Kontext learns to edit your own photographs: one GPU with 80 GB, LoRA of rank 32, 4 groups of 12 images of 512 px per
// step.
//
//   retouch train recipes/flux-kontext/photos.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction for each; docs/guides/photos.md has all steps. The reward is
// PickScore plus preservation of the source. PickScore compares the image with the instruction, so an instruction should say what
// can be seen in the result: "the house at sunset" rather than "make it nicer".
//
// From Flow-GRPO's code for FLUX.1-Kontext: 512 px, 6 steps (28 in evaluation), guidance 2.5, noise level 0.9, standard deviation
// over the whole step. Different here: two of the first three steps are stochastic, one GPU instead of 28, and the reward.
//
// A healthy run. In the trial step the ratio is 1 within 1e-2 (16 bits).
// - `reward/pick/pickscore` starts between 18 and 23. One point more means that people prefer the image in 73 % of pairs.
// - `reward/source/preservation` is 1 for an unchanged image. If it rises towards 1 while PickScore stays, the model stops editing:
//   raise the weight of PickScore, `--set 'reward.combine="0.2 * pick/pickscore + source/preservation"'`.
// - Look at the held-out images. PickScore likes saturated, detailed images.
// This recipe has not been run on a GPU.
local objectives = import '../lib/objectives.libsonnet';
local photos = import '../lib/photos.libsonnet';
local sampling = import '../lib/sampling.libsonnet';

{
  name: 'flux-kontext-photos',
  steps: 200,
  tasks_per_step: 4,
  group_size: 12,
  learning_rate: 1e-4,
  minibatches: 2,
  microbatch: 2,
  policy: {
    kind: 'denoising',
    model: {
      kind: 'flux-kontext',
      path: 'black-forest-labs/FLUX.1-Kontext-dev',
      size: [512, 512],
      dtype: 'bfloat16',
      guidance: 2.5,
    },
    train: { kind: 'lora', rank: 32, alpha: 64 },
    ema: { decay: 0.9, every: 8 },
    gradient_checkpointing: true,
  },
  rollout: sampling.window(num_steps=6, size=2, high=3, transition=sampling.sde(0.9)) { chunk: 12 },
  data: photos.tasks('photos', held_out=0.2),
  reward: photos.preferred(),
  advantage: { kind: 'group', scale: 'batch' },
  objective: objectives.grpo(1e-5),
  optimizer: { weight_decay: 1e-4 },
  eval: { every: 50, tasks: 16, num_steps: 28, batch: 8 },
  samples: { every: 50, tasks: 4 },
  checkpoints: { every: 50 },
}
