// Qwen-Image-Edit by Flow-GRPO-Fast: 8 GPUs with 80 GB, LoRA of rank 64, 32 groups of 16 images per step.
//
//   retouch launch --nproc 8 recipes/qwen-image-edit/flow-grpo.jsonnet --set data.path=DIR
//
// DIR contains photographs and a metadata.jsonl with an instruction for each. The reward is PickScore plus preservation of the
// source; docs/guides/photos.md says how to get the weights. The reward runs on the CPU, because the model needs nearly all of the
// GPU's memory. To use your own: --set 'reward={"kind": "import", "class": "package.module:Class", "combine": {"column": 1}}'.
local photos = import 'lib/photos.libsonnet';
local qwen = import 'lib/qwen_image_edit.libsonnet';

qwen.flow_grpo(
  world={
    model: { kind: 'qwen-image-edit', path: 'Qwen/Qwen-Image-Edit', size: [1024, 1024], dtype: 'bfloat16', vae_slicing: true },
    tasks: photos.tasks('photos'),
    judge: photos.preferred(device='cpu'),
  },
  sizes={
    name: 'qwen-image-edit-flow-grpo',
    steps: 1000,
    tasks_per_step: 32,
    group_size: 16,
    learning_rate: 1e-4,
    ranks: 8,
    rank: 64,
    num_steps: 10,
    chunk: 2,
    microbatch: 1,
    gradient_checkpointing: true,
    compile: 'regional',
    eval_every: 50,
    eval_tasks: 128,
    eval_steps: 50,
  },
)
