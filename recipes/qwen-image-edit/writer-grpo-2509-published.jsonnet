// The values of the TRL writer script's later version (run_8gpu.sh) in writer-grpo.jsonnet: Qwen-Image-Edit-2509, 1024 new tokens,
// 50 denoising steps at guidance 4.0, 16 completions of one task per step, a LoRA of rank 128, 1000 steps. 8 GPUs with 141 GB
// (H200).
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-2509-published.jsonnet --set data.allow_test_sets=true
//
// Complex-Edit has only test splits, see writer-grpo. A data set of this kind for training is GPT-Image-Edit-1.5M:
// `retouch data convert gpt-image-edit DIR`, then --set 'data={kind: "folder", path: "DIR"}'. The source generates with vLLM in the
// training process; here a vLLM server can be used with `rollout.engine`, see docs/engines.md.
//
// A healthy run looks like that of writer-grpo. One task per step makes the curves noisier: look at means over 100 steps. Most of
// the time of a step is spent on 50 denoising steps for 16 images; with `renderer.num_steps: 20` a step takes less than half as
// long.
(import 'writer-grpo.jsonnet') {
  name: 'writer-grpo-2509-published',
  steps: 1000,
  passes: null,
  tasks_per_step: 1,
  group_size: 16,
  microbatch: 2,
  policy+: { train+: { rank: 128, alpha: 256 } },
  rollout+: { max_new_tokens: 1024 },
  renderer+: {
    model+: { kind: 'qwen-image-edit-plus', path: 'Qwen/Qwen-Image-Edit-2509' },
    num_steps: 50,
    guidance_scale: 4.0,
  },
  checkpoints: { every: 50, keep: 10 },
}
