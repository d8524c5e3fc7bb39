// The benchmark recipe: a tiny, untrained Stable Diffusion 3 with the real classes learns to make its images redder, in a minute on
// a CPU. Settings, models and seeds are those of examples/one_file_flow_grpo.py, and the first gradient is the same.
//
//   retouch train tiny-sd3
local objectives = import 'lib/objectives.libsonnet';
local sampling = import 'lib/sampling.libsonnet';

{
  name: 'tiny-sd3',
  steps: 60,
  tasks_per_step: 2,
  group_size: 8,
  learning_rate: 3e-3,
  device: 'cpu',
  microbatch: 16,
  policy: {
    kind: 'denoising',
    model: { kind: 'import', class: 'retouch_worlds.models.tiny_sd3:TinySD3', args: { seed: 0 } },
    train: {
      kind: 'lora',
      rank: 32,
      alpha: 64,
      targets: ['attn.' + name for name in [
        'to_q', 'to_k', 'to_v', 'to_out.0', 'add_q_proj', 'add_k_proj', 'add_v_proj', 'to_add_out',
      ]],
    },
  },
  rollout: sampling.window(num_steps=6, size=2, high=3, transition=sampling.cps(0.8)),
  data: { kind: 'prompts', path: 'recipes/sd3/prompts.txt', held_out: 2 },
  reward: { kind: 'share', channel: 'red', combine: { share: 1 } },
  objective: objectives.grpo(1e-5),
  optimizer: { weight_decay: 1e-4 },
}
