// Full fine-tuning in the TRL writer script's repository (run_8gpu_full_finetune.sh): writer-grpo-2509-published with all weights
// of the writer, a learning rate of 5e-6 and instructions of all eight complexity levels. 8 GPUs with 141 GB (H200).
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-full-2509-published.jsonnet --set data.allow_test_sets=true
//
// ZeRO-2 shards gradients and optimizer state over the ranks. With `sharding: 'fsdp2'` the weights are sharded too, and with
// `devices.reference: 'cpu'` the reference weights, if there are any, need no GPU memory.
//
// A healthy run looks like that of writer-grpo. All weights are trained here, also those of the vision tower: if held-out
// completions stop being fluent before `reward/alignment` rises, lower the learning rate. The checkpoints are large, because they
// contain the optimizer state. The source makes no claims about this variant.
(import 'writer-grpo-2509-published.jsonnet') {
  name: 'writer-grpo-full-2509-published',
  learning_rate: 5e-6,
  policy+: { train: { kind: 'full' }, gradient_checkpointing: true },
  data+: { complexity: '1-8' },
}
