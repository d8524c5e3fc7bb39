// Stable Diffusion 3.5 Medium learns from Stable Diffusion 3.5 Large with guidance. A denoising step of the larger model takes two
// passes; the smaller one learns to do it in one. One GPU with 32 GB or more, and 17 GB of CPU memory for the larger model; LoRA of
// rank 32, 64 images of 512 px per step, and no judge in training.
//
//   retouch train recipes/sd3/large-opd.jsonnet
//
// On-policy distillation (Flow-OPD, arXiv 2605.08063) from a larger teacher: the policy samples without guidance, and in each state
// that it reaches it learns the velocity of the larger model with guidance 3.5. Only the teacher's transformer is loaded; both models
// have the same text encoders and autoencoder, which is checked. It is on the GPU only while it teaches.
//
// A healthy run.
// - `policy/loss` falls at once, and later slowly.
// - `eval` is without guidance, too. Its OCR score should rise towards that of the larger model.
// This recipe has not been run on a GPU; playground/opd.jsonnet learns with the same objective.
local guidance = import 'guidance-opd.jsonnet';

guidance {
  name: 'sd3-large-opd',
  objective+: { teachers: { large: { model: 'stabilityai/stable-diffusion-3.5-large', guidance_scale: 3.5 } } },
}
