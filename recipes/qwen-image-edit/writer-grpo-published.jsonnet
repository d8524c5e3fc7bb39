// The documents of the TRL writer script (train_grpo.py, run_8gpu.sh and deepspeed_zero2.yaml): writer-grpo with the values that TRL
// takes where the documents name none. These are a loss that is averaged over the tokens of a step (`loss_type` dapo) and a learning
// rate that falls linearly to 0. 8 GPUs with 80 GB or more, one rank each.
//
//   export OPENAI_API_KEY=...
//   retouch launch --nproc 8 recipes/qwen-image-edit/writer-grpo-published.jsonnet --set data.allow_test_sets=true
//
// A healthy run and the claims of the source: see writer-grpo.
(import 'writer-grpo.jsonnet') {
  name: 'writer-grpo-published',
  objective+: { normalise: 'token' },
  optimizer: { schedule: 'linear' },
}
