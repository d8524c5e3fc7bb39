// Qwen-Image-2.1 learns to edit photographs by Flow-GRPO-Fast: 8 GPUs with 80 GB, LoRA of rank 64, 32 groups of 16 images per step.
//
//   retouch launch --nproc 8 recipes/qwen-image-2/flow-grpo.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction for each. The reward is PickScore plus preservation of the
// source; docs/guides/photos.md says how to get the weights. The reward runs on the CPU. To use your own:
// --set 'reward={"kind": "import", "class": "package.module:Class", "combine": {"column": 1}}'. With prompts (`data.kind:
// 'prompts'`) the same model generates images from text alone; such a task has no source to preserve, so it needs another reward.
//
// The values are Flow-GRPO's for Qwen-Image-Edit, but without guidance, as Qwen-Image-2.1 is meant to be sampled. This recipe was
// not measured on Qwen-Image-2.1.
local photos = import '../lib/photos.libsonnet';
local qwen = import '../lib/qwen_image_edit.libsonnet';

qwen.flow_grpo(
  world={
    model: { kind: 'qwen-image-2', path: 'Qwen/Qwen-Image-2.1', size: [1024, 1024], dtype: 'bfloat16' },
    tasks: photos.tasks('photos'),
    judge: photos.preferred(device='cpu'),
  },
  sizes={
    name: 'qwen-image-2-flow-grpo',
    steps: 1000,
    tasks_per_step: 32,
    group_size: 16,
    learning_rate: 1e-4,
    ranks: 8,
    rank: 64,
    num_steps: 10,
    chunk: 4,
    microbatch: 1,
    gradient_checkpointing: true,
    eval_every: 50,
    eval_tasks: 128,
    eval_steps: 40,
  },
) { rollout+: { guidance_scale: 1 } }
